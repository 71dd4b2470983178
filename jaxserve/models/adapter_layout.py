"""The layout of adapter arrays in a model: which weights they change, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from jaxserve.core.errors import InvalidParamsError
from jaxserve.models.adapter_source import AdapterSource
from jaxserve.models.adapters import AdaptedWeight
from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.families import weights_of
from jaxserve.models.linear import WeightAxes
from jaxserve.models.loading import abstract_model, prefix_of, with_prefix
from jaxserve.models.weights import Weight, WeightSource

Path = tuple[Any, ...]
Arrays = dict[Path, jax.Array]  # by their path in the model's parameters
# Maximum number of an adapter's problems in a message.
_MAX_PROBLEMS = 5
# Number of parts in which the arrays are replaced, one after another.
_PARTS = 8


@final
@dataclass(frozen=True)
class AdapterValues:
    """One adapter in the layout of a model."""

    # By path, without the axis of adapters; zeros where the adapter changes nothing.
    arrays: dict[Path, np.ndarray]
    identity: bytes  # hash of the arrays


@final
class AdapterLayout:
    """The weights of a model that adapters may change, and the arrays that change them.

    These are the matrices of the layers, except experts and their router. A weight that is made of
    several modules of a checkpoint (`q_proj`, `k_proj`, `v_proj`) has `max_rank` for each of them.
    `dtype` is that of the adapters' matrices; by default that of the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_layout: LayerLayout,
        *,
        num_adapters: int,
        max_rank: int,
        dtype: str | None = None,
    ):
        table = weights_of(config)
        _, dense = abstract_model(config, layer_layout=layer_layout)
        flat = nnx.to_flat_state(dense)
        targets = (_Target.of(path, v, table, max_rank, dtype) for path, v in flat)
        self._prefix = prefix_of(config)
        self._targets = [target for target in targets if target is not None]
        self._num_adapters = num_adapters
        self._max_rank = max_rank

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays of all adapters."""
        arrays = (array for target in self._targets for array in target.arrays)
        return self._num_adapters * sum(math.prod(shape) * kind.itemsize for shape, kind in arrays)

    def adapt(self, model: nnx.Module) -> None:
        """Add adapters of zeros to the weights of a model, on its device."""
        place = jax.tree.leaves(nnx.state(model))[0].sharding
        for target in self._targets:
            owner: Any = model
            for part in target.path[:-1]:
                owner = owner[part] if isinstance(part, int) else getattr(owner, part)
            adapted = AdaptedWeight.empty(
                target.dense,
                target.axes,
                num_adapters=self._num_adapters,
                rank=target.max_rank,
                spans=target.spans,
                dtype=target.dtype,
                base=getattr(owner, target.path[-1]),
                place=place,
            )
            setattr(owner, target.path[-1], adapted)

    def arrays_of(self, params: nnx.State) -> Arrays:
        flat = dict(nnx.to_flat_state(params))
        return {path: flat[path].get_value() for target in self._targets for path in target.paths}

    def state(self, arrays: Arrays) -> nnx.State:
        return nnx.from_flat_state([(path, nnx.Param(array)) for path, array in arrays.items()])

    def inside(self, params: nnx.State) -> nnx.State:
        """Return parameters of the model without adapters, with their paths in the adapted one."""
        adapted = {target.path for target in self._targets}

        def moved(path: Path) -> Path:
            for end in range(len(path), 0, -1):
                if path[:end] in adapted:
                    return (*path[:end], "base", *path[end:])
            return path

        return nnx.from_flat_state([(moved(path), v) for path, v in nnx.to_flat_state(params)])

    def put(self, arrays: Arrays, index: int, new: Mapping[Path, Any] | None) -> Iterator[Arrays]:
        """Yield the arrays with one adapter replaced, in parts; the given arrays are unchanged.

        A caller that frees the replaced arrays holds an eighth more than all of them. It is
        compiled once for each shape, for all adapters. `new` is `AdapterValues.arrays`; None for
        zeros.
        """
        most = sum(array.nbytes for array in arrays.values()) // _PARTS
        part: Arrays = {}
        for target in self._targets:
            own = target.zeros() if new is None else new
            for path in target.paths:
                part[path] = _put(arrays[path], np.int32(index), own[path], target.num_stacked)
            if sum(array.nbytes for array in part.values()) >= most:
                yield jax.block_until_ready(part)
                part = {}
        if part:
            yield jax.block_until_ready(part)

    @property
    def weight_axes(self) -> dict[Path, WeightAxes]:
        return {target.path: target.axes for target in self._targets}

    def change(self, path: Path, arrays: Mapping[Path, np.ndarray]) -> np.ndarray:
        """Return `scale * a @ b` of an adapter for the weight at a path, in the weight's shape."""
        (target,) = (target for target in self._targets if target.path == path)
        return target.change(*(arrays[part] for part in target.paths))

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an adapter's matrices if it changes all weights, by PEFT's names."""
        return {
            name: shape
            for target in self._targets
            for layer in target.layers
            for module in target.modules
            for name, shape in target.wanted(module, layer, rank)
        }

    def values(self, source: AdapterSource, *, limits_rank: bool = True) -> AdapterValues:
        """Return an adapter in this layout.

        Args:
          limits_rank: whether the caller chose `max_rank`, which an error then names.

        Raises:
          InvalidParamsError: matrices are missing, have other shapes, a rank over the maximum or
            numbers that are not finite, or belong to no weight that adapters may change.
        """
        tensors = with_prefix(source, self._prefix)
        arrays: dict[Path, np.ndarray] = {}
        used: set[str] = set()
        problems: list[str] = []
        for target in self._targets:
            arrays |= target.read(tensors, source.scale, used, problems)
        others = sorted(tensors.shapes().keys() - used)
        problems += [f"{name} belongs to no weight that adapters may change" for name in others]
        if not used:
            problems.append("it has no matrix lora_A or lora_B of this model")
        infinite = [path for path, array in arrays.items() if not np.isfinite(array).all()]
        problems += [f"{'.'.join(map(str, p))} has NaN or infinite numbers" for p in infinite]
        if problems:
            more = len(problems) - _MAX_PROBLEMS
            raise InvalidParamsError(
                f"the adapter of {source.where} does not fit this model: "
                + "; ".join(problems[:_MAX_PROBLEMS])
                + (f"; and {more} more problems" if more > 0 else "")
                + ". Pass the adapter of this model"
                + (f", of rank {self._max_rank} at most (max_adapter_rank)" if limits_rank else "")
            )
        digest = blake2b(digest_size=16)
        for path in sorted(arrays, key=str):
            digest.update(np.ascontiguousarray(arrays[path]).tobytes())
        return AdapterValues(arrays, digest.digest())


@final
@dataclass(frozen=True)
class _Module:
    """A matrix of a checkpoint that is a part of a weight, and the two matrices that change it."""

    a: Weight
    b: Weight


@final
@dataclass(frozen=True, eq=False)
class _Target:
    """A weight that adapters may change, of one layer or of all layers stacked."""

    path: Path
    dense: nnx.Variable  # abstract
    axes: WeightAxes
    names: tuple[str, ...]  # of its axes, without those that are stacked
    modules: tuple[_Module, ...]
    spans: tuple[tuple[int, int], ...]  # see `AdaptedWeight`
    max_rank: int
    dtype: np.dtype

    @classmethod
    def of(
        cls,
        path: Path,
        dense: nnx.Variable,
        table: Mapping[str, Weight],
        max_rank: int,
        dtype: str | None,
    ) -> _Target | None:
        """Return the target for a parameter; None if adapters may not change it."""
        axes: WeightAxes | None = dense.get_metadata().get("weight_axes")
        if axes is None or path[0] != "blocks" or axes.transposed:
            return None
        if axes.num_stacked != (not isinstance(path[1], int)):  # experts
            return None
        if dense.get_metadata().get("stays_dense", False):
            return None
        weight = table[".".join(part for part in path if not isinstance(part, int))]
        names = tuple(weight.axes.split())
        summed, out = names[: axes.num_in], names[axes.num_in :]
        modules = []
        for tensor in weight.tensors:
            factors = tensor.factors(summed)
            if factors is None:
                return None
            a, b = factors
            modules.append(
                _Module(
                    Weight(" ".join([*summed, "rank"]), (a,)), Weight(f"rank {' '.join(out)}", (b,))
                )
            )
        like = dense.get_value()
        spans = _spans(modules, out, axes.split(like.shape)[2]) if len(modules) > 1 else ()
        own_dtype = np.dtype(dtype or like.dtype)
        return cls(path, dense, axes, names, tuple(modules), spans, max_rank, own_dtype)

    @property
    def num_stacked(self) -> int:
        return self.axes.num_stacked

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple((*self.path, name) for name in ("a", "b", "scale"))

    @property
    def layers(self) -> range:
        if self.num_stacked:
            return range(self._shape[0])
        return range(self.path[1], self.path[1] + 1)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.dense.get_value().shape

    @property
    def arrays(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shapes and dtypes of the arrays of one adapter, in the order of `paths`."""
        stacked, summed, out = self.axes.split(self._shape)
        ranks = len(self.modules) * self.max_rank
        shapes = ((*stacked, *summed, ranks), (*stacked, self.max_rank, *out), stacked)
        kinds = (self.dtype, self.dtype, np.dtype(np.float32))
        return list(zip(shapes, kinds, strict=True))

    def zeros(self) -> dict[Path, np.ndarray]:
        return {
            path: np.zeros(shape, kind)
            for path, (shape, kind) in zip(self.paths, self.arrays, strict=True)
        }

    def change(self, a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> np.ndarray:
        stacked, summed, out = self.axes.split(self._shape)
        product = np.zeros((*stacked, math.prod(summed), math.prod(out)), b.dtype)
        a, b = a.reshape(*stacked, math.prod(summed), -1), b.reshape(*stacked, self.max_rank, -1)
        end = 0
        for module, size in self.spans or [(0, b.shape[-1])]:
            own = slice(module * self.max_rank, (module + 1) * self.max_rank)
            begin, end = end, end + size
            product[..., begin:end] = a[..., own] @ b[..., begin:end]
        return (scale[..., None, None] * product).reshape(self._shape)

    def read(
        self, source: WeightSource, scale: float, used: set[str], problems: list[str]
    ) -> dict[Path, np.ndarray]:
        """Return the arrays of one adapter; add the names that it reads, and its problems."""
        arrays = self.zeros()
        a, b, scales = arrays.values()
        for index, layer in enumerate(self.layers):
            own = index if self.num_stacked else ()
            for place, module in enumerate(self.modules):
                rank = self._rank_of(module, layer, source, used, problems)
                if rank:
                    part = slice(place * self.max_rank, place * self.max_rank + rank)
                    _fill(a[own][..., part], module.a, source, layer)
                    # In `b`, this module has these outputs.
                    _fill(b[own][:rank], module.b, source, layer)
                    scales[own] = scale
        return arrays

    def _rank_of(
        self, module: _Module, layer: int, source: WeightSource, used: set[str], problems: list[str]
    ) -> int:
        """Return the rank of a module's matrices; 0 if they are missing or wrong."""
        found = source.shapes()
        names = {
            which: weight.tensors[0].name.format(layer=layer)
            for which, weight in (("a", module.a), ("b", module.b))
        }
        own = {which: name for which, name in names.items() if name in found}
        used.update(own.values())
        if not own:
            return 0
        if len(own) == 1:
            (missing,) = names.keys() - own.keys()
            problems.append(f"{names[missing]} is missing")
            return 0
        rank = next(iter(found[names["a"]]), 0)
        if not 1 <= rank <= self.max_rank:
            problems.append(f"{names['a']} has rank {rank}, and {self.max_rank} is the maximum")
            return 0
        wrong = False
        for name, shape in self.wanted(module, layer, rank):
            if found[name] != shape:
                problems.append(f"{name} has shape {found[name]} instead of {shape}")
                wrong = True
        return 0 if wrong else rank

    def wanted(
        self, module: _Module, layer: int, rank: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        _, summed, out = self.axes.split(self._shape)
        for weight, shape in ((module.a, (*summed, rank)), (module.b, (rank, *out))):
            yield from weight.needed(shape, layer=layer)


def _spans(
    modules: Sequence[_Module], names: Sequence[str], shape: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return which outputs, with axes of these names and sizes, belong to which module."""
    module_of = np.zeros(shape, np.int64)
    for number, module in enumerate(modules):
        (tensor,) = module.b.tensors
        ranges = tensor.ranges(dict(zip(names, shape, strict=True)))
        module_of[tuple(slice(*ranges[name]) for name in names)] = number
    flat = module_of.ravel()
    edges = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist(), len(flat)]
    return tuple((int(flat[begin]), end - begin) for begin, end in pairwise(edges))


def _fill(out: np.ndarray, weight: Weight, source: WeightSource, layer: int) -> None:
    """Fill a module's part of an array from its tensor."""
    weight.read_into(out, source, out.shape, [slice(0, n) for n in out.shape], layer=layer)


@partial(jax.jit, static_argnums=3)
def _put(
    array: jax.Array,  # [*stacked, adapters, ...]
    index: np.int32,
    new: np.ndarray,  # [*stacked, ...]
    num_stacked: int,
) -> jax.Array:
    return array.at[(*(slice(None),) * num_stacked, index)].set(new)
