"""The storage of a model's weights: in how many bits (`quantize`), and in which layout."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast, final

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import InvalidConfigError, UnsupportedModelError
from jaxserve.core.options import RuntimeOptions
from jaxserve.kernels import build, columns_of, dispatch, from_panels, panel_matmul, to_panels
from jaxserve.kernels.quantised_matmul import Rounding
from jaxserve.models.linear import WeightAxes, replace_weights
from jaxserve.models.loading import abstract_model
from jaxserve.models.quantised import FP8, INT4, INT8, QuantisedWeight, WeightFormat


@final
class PanelledWeight(nnx.Module):
    """A weight of one matrix, in the panels that the kernel for CPUs reads.

    panels    float32 [panels, in, 48], or bfloat16 [panels, in / 2, 96]

    Axes that a product sums over are one, and so are those of its result. See `panel_matmul` for
    the precision of products.
    """

    def __init__(self, panels: Float[Array, "panels depth width"], out: tuple[int, ...]):
        # A model in half precision may have a few weights in float32, such as T5's.
        self.panels = nnx.Param(panels, logical_axes=(None, None, None), has_own_dtype=True)
        self.out = out

    @classmethod
    def of(cls, dense: nnx.Param, axes: WeightAxes, dtype: str = "float32") -> PanelledWeight:
        """Return a copy of a dense weight in panels of a dtype, on its device."""
        array = dense[...]
        return cls(_in_panels(array, axes, dtype), axes.split(array.shape)[2])

    @staticmethod
    def serves(dense: nnx.Param, axes: WeightAxes, dtype: str) -> bool:
        """Return whether the weight is one matrix in float32 that panels of a dtype can have."""
        width = math.prod(axes.split(dense[...].shape)[1])
        is_matrix = axes.num_stacked == 0 and dense[...].dtype.name == "float32"
        return is_matrix and (dtype == "float32" or width % 2 == 0)

    def matrix(self) -> Float[Array, "in out"]:
        """Return the weight as one dense matrix; for tests."""
        return from_panels(self.panels[...], math.prod(self.out))

    def product(
        self,
        x: Float[Array, "tokens *in"],
        adapter: Int32[Array, " tokens"] | None,
        *,
        transposed: bool,
        out_dtype: jax.typing.DTypeLike,
    ) -> Float[Array, " tokens *out"]:
        x = x.reshape(x.shape[0], -1)
        out = panel_matmul(x, self.panels[...], columns=math.prod(self.out))
        return out.reshape(-1, *self.out).astype(out_dtype)

    def grouped_product(
        self,
        x: Float[Array, "tokens in"],
        sizes: Int32[Array, " matrices"],
        adapter: Int32[Array, " tokens"] | None,
    ) -> Float[Array, " tokens *out"]:
        """Raise NotImplementedError: `serves` refuses weights of several matrices."""
        raise NotImplementedError("a weight in panels is one matrix; keep experts' weights dense")

    def rows(
        self,
        index: Int32[Array, " tokens"],
        adapter: Int32[Array, " tokens"] | None,
        dtype: jax.typing.DTypeLike,
    ) -> Float[Array, "tokens in"]:
        return columns_of(self.panels[...], index).astype(dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _in_panels(
    array: Float32[Array, " *axes"], axes: WeightAxes, dtype: str
) -> Float[Array, "panels depth width"]:
    _, summed, out = axes.split(range(array.ndim))
    width = math.prod(axes.split(array.shape)[1])
    return to_panels(array.transpose(*summed, *out).reshape(width, -1), dtype)


def dense_array(
    stored: Mapping[tuple[Any, ...], nnx.Variable], path: tuple[Any, ...], dense: nnx.Variable
) -> np.ndarray:
    """Return on the host the array of one parameter of a model, without its adapters.

    Args:
      stored: all parameters of the model by path, dense or in panels.
      dense: the abstract parameter of the dense model.

    Raises:
      UnsupportedModelError: it is stored in a narrower type than the model's.
    """
    axes, value = dense.get_metadata().get("weight_axes"), dense.get_value()
    for owner in (path, (*path, "base")):
        if owner in stored:
            return np.asarray(stored[owner].get_value())
        if (*owner, "panels") in stored:
            panels = stored[(*owner, "panels")].get_value()
            if panels.dtype != value.dtype:
                break
            assert axes is not None, "panels of a parameter that no product reads"
            _, summed, out = axes.split(range(value.ndim))
            ordered = [value.shape[axis] for axis in (*summed, *out)]
            columns = math.prod(value.shape[axis] for axis in out)
            matrix = np.asarray(from_panels(panels, columns)).reshape(ordered)
            return matrix.transpose(np.argsort((*summed, *out)))
    raise UnsupportedModelError(
        f"the parameter {'.'.join(map(str, path))} is stored in few bits, from which the weights "
        "cannot be written as they were; create the runtime with dtype='float32', and without "
        "quantize"
    )


_log = logging.getLogger(__name__)
# "w8a8" is int8 with activations that are also rounded on GPUs.
_FORMATS = {"int8": INT8, "int4": INT4, "fp8": FP8, "w8a8": INT8}
# Formats that only store weights in another dtype, in panels.
_PANELS = {"bf16": "bfloat16"}


@final
@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """The formats of a model's weights."""

    name: str  # of the formats, for the cache of converted models
    layers: WeightFormat | None  # of the weights of the layers; None leaves them unchanged
    embeddings: WeightFormat | None  # of the embedding and of the head; None leaves them unchanged
    keeps_blocks: bool  # whether weights stay in the checkpoint's form
    rounds_activations: Rounding | None  # see `WeightFormat`
    # Dtype of the panels in which dense weights in float32 are stored (`PanelledWeight`); None
    # leaves them unchanged.
    panels: str | None = None

    @property
    def rounds_weights(self) -> bool:
        """Whether some weights are rounded to a format."""
        is_rounded = self.panels not in (None, "float32")
        return is_rounded or self.layers is not None or self.embeddings is not None

    @classmethod
    def of(cls, options: RuntimeOptions) -> Self | None:
        """Return the formats that the options select; None for dense weights."""
        if options.quantize is None:
            return None
        ends = options.quantize_embeddings or "int8"
        rounds: Rounding | None = "groups" if dispatch.target_platform() == "cpu" else None

        def format_of(name: str) -> WeightFormat | None:
            found = _FORMATS.get(name)
            if found is None:
                return None
            own = "tokens" if rounds is None and name == "w8a8" else rounds
            return replace(found, rounds_activations=None if found.is_float else own)

        panels = _PANELS.get(options.quantize)
        layers = format_of(options.quantize)
        embeddings = None if panels or options.quantize == "keep" else format_of(ends)
        named = [options.quantize, *(str(each.group) for each in (layers, embeddings) if each)]
        return cls(
            name="-".join([*named, panels or ends, *(() if rounds else ("whole",))]),
            layers=layers,
            embeddings=embeddings,
            keeps_blocks=options.quantize == "keep",
            rounds_activations=rounds,
            panels=panels,
        )

    @classmethod
    def at_loading(cls, options: RuntimeOptions, mesh: Any, panels: str = "float32") -> Self | None:
        """Return the storage of a checkpoint's weights that only this runtime will use.

        On a single CPU, dense float32 weights get the layout of its kernel, in the dtype `panels`.
        It is a copy, so that weights that are shared with a trainer keep theirs.
        """
        found = cls.of(options)
        is_alone = mesh is None and jax.default_backend() == "cpu"
        if not is_alone or not build.has_compiler() or (found and found.keeps_blocks):
            return found
        return cls.in_panels(found, panels)

    @classmethod
    def in_panels(cls, other: Self | None, dtype: str = "float32") -> Self:
        """Return the same with dense float32 weights in panels, if they are not yet."""
        if other is not None and other.panels is not None:
            return other
        name = "panels" if dtype == "float32" else f"{dtype}-panels"
        if other is not None:
            return replace(other, name=f"{other.name}-{name}", panels=dtype)
        # A folder whose weights are in few bits is read with these settings, too.
        return replace(cls.stored(), name=name, keeps_blocks=False, panels=dtype)

    @classmethod
    def stored(cls) -> Self:
        """Return the storage of a folder whose weights are in few bits: unchanged."""
        kept = cls.of(RuntimeOptions(quantize="keep"))
        assert kept is not None
        return kept

    def change(self, weight: nnx.Param, axes: WeightAxes) -> Any:
        """Return the weight in its format: quantised, in panels, or itself.

        The router of a mixture of experts is not changed: it is small, and decides a lot.
        """
        names = weight.get_metadata()["logical_axes"]
        format = self.embeddings if "vocab" in names else self.layers
        if weight.get_metadata().get("stays_dense", False):
            return weight
        if format is None:
            if self.panels is None or not PanelledWeight.serves(weight, axes, self.panels):
                return weight
            return PanelledWeight.of(weight, axes, self.panels)
        return QuantisedWeight.of(weight, axes, format)


@final
class Quantiser:
    """Converts a trainer's dense weights to the storage of a model, one by one.

    Args:
      model: a decoder, or an abstract one, whose weights are dense or already stored so.

    Raises:
      InvalidConfigError: the blocks of a checkpoint are to be kept, but the weights are dense.
    """

    def __init__(self, model: nnx.Module, quantisation: Quantisation):
        in_few_bits = is_quantised(model)
        if quantisation.keeps_blocks and not in_few_bits:
            raise InvalidConfigError(
                "quantize='keep' keeps the blocks of a GGUF file or the codes of a folder in few "
                "bits, and this model has dense weights; pass quantize='int8' or 'int4' to round "
                "them"
            )
        graphdef, state = nnx.split(model)
        is_changed = in_few_bits or panels_dtype(model) is not None
        if is_changed and not quantisation.keeps_blocks:
            decoder = cast(Any, model)
            # Traced when it is first needed: tracing takes a large part of a second of a start.
            self._dense_model = functools.cache(
                partial(abstract_model, decoder.config, layer_layout=decoder.layer_layout)
            )
            self._own_paths = _paths(state)
        else:
            # Abstract, so that the first weights are freed when new ones have come.
            dense = nnx.map_state(lambda _, variable: variable.replace(_abstract(variable)), state)
            self._dense_model = lambda: (graphdef, dense)
            self._own_paths = set()
        self._quantisation = quantisation
        self._dtype = np.dtype(cast(Any, model).config.dtype)

    def model(self, params: nnx.State) -> nnx.Module:
        """Return the model that stores these dense parameters as it does."""
        model = nnx.merge(self._dense_model()[0], params)
        replace_weights(model, self._changed)
        return model

    def _changed(self, weight: nnx.Param, axes: WeightAxes) -> Any:
        value = weight.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):
            return weight
        cast_one = weight.replace(_cast(value, self._dtype)) if _is_cast_late(weight) else weight
        return self._quantisation.change(cast(nnx.Param, cast_one), axes)

    def is_dense(self, params: nnx.State, *, partial: bool = False) -> bool:
        """Return whether parameters have the structure of the model with dense weights.

        With `partial`, or the structure of a part of it.
        """
        paths = _paths(params)
        if paths <= self._own_paths and (partial or len(paths) == len(self._own_paths)):
            return False
        dense = _paths(self._dense_model()[1])
        return paths <= dense if partial else paths == dense

    def params(self, params: nnx.State, *, partial: bool = False) -> nnx.State:
        """Return parameters as the model stores them.

        Dense ones may have any floating dtype; those that stay dense get the model's. Parameters of
        another structure are returned unchanged. With `partial` they may be a part of the model's;
        the same part is returned.
        """
        if not self.is_dense(params, partial=partial):
            return params
        new = dict(nnx.to_flat_state(params))

        def taken(path: tuple[Any, ...], v: nnx.Variable) -> nnx.Variable:
            """Return a variable of the model, since that of the state may lack its metadata."""
            if path not in new:
                return v
            value = new[path].get_value()
            return v.replace(value if _is_cast_late(v) else _cast(value, v.get_value().dtype))

        whole = [(path, taken(path, v)) for path, v in nnx.to_flat_state(self._dense_model()[1])]
        stored = nnx.split(self.model(nnx.from_flat_state(whole)))[1]
        return nnx.from_flat_state(
            [
                (path, v)
                for path, v in nnx.to_flat_state(stored)
                if not isinstance(v.get_value(), jax.ShapeDtypeStruct)
            ]
        )


def _paths(params: nnx.State) -> set[tuple[Any, ...]]:
    return {path for path, _ in nnx.to_flat_state(params)}


def panels_dtype(model: nnx.Module) -> str | None:
    """Return the dtype of the panels of a model; None if no weight is in panels."""
    modules = (module for _, module in nnx.iter_modules(model))
    found = (each for each in modules if isinstance(each, PanelledWeight))
    return next((each.panels.get_value().dtype.name for each in found), None)


def is_quantised(model: nnx.Module) -> bool:
    return any(isinstance(module, QuantisedWeight) for _, module in nnx.iter_modules(model))


def log_replicated(params: nnx.State, mesh: Mesh) -> None:
    """Log the weights whose groups or panels a mesh does not divide; each device has all."""
    shares = mesh.shape.get("tensor", 1)
    for path, variable in nnx.to_flat_state(params):
        axes = variable.get_metadata().get("logical_axes") or ()
        uneven = [
            f"{size} {name}"
            for name, size in zip(axes, variable.get_value().shape, strict=False)
            if name in ("groups", "panels") and size % shares
        ]
        if uneven and path[-1] == "codes":
            _log.info(
                "%s has %s, which %d devices cannot share; each has all of them",
                ".".join(map(str, path[:-1])),
                " and ".join(uneven),
                shares,
            )


def _is_cast_late(variable: nnx.Variable) -> bool:
    """Return whether it is a weight of the model's dtype, of which only one is cast at a time."""
    about = variable.get_metadata()
    return about.get("weight_axes") is not None and not about.get("has_own_dtype", False)


def _cast(array: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore"):  # what becomes infinite is refused later
        return array if array.dtype == dtype else array.astype(dtype)


def _abstract(variable: nnx.Variable) -> jax.ShapeDtypeStruct:
    array = variable.get_value()
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
