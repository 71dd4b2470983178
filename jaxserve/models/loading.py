"""From checkpoint tensors to the parameters of a decoder, shard by shard."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from jaxserve.core.errors import CheckpointError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import LayerLayout, Part
from jaxserve.models.families import family_of
from jaxserve.models.family import Family
from jaxserve.models.huge_pages import HugePages
from jaxserve.models.linear import WeightAxes, replace_weights
from jaxserve.models.source import WeightSource
from jaxserve.models.tensor_names import tied_names, under_own_names
from jaxserve.models.weights import Weight

Progress = Callable[[int, int], None]
Path = tuple[Any, ...]
# What takes the place of a dense weight: a module, or the weight itself.
WeightChange = Callable[[nnx.Param, WeightAxes], Any]
# Makes a weight from its path, its dense form, the names of its tensors, and a function that reads
# it from a source in a dtype, or in another shape; see `gguf_kept.KeptBlocks.weight`.
KeepWeight = Callable[[Path, nnx.Variable, WeightAxes, list[str], Callable[..., jax.Array]], Any]


def load_params(
    abstract_state: nnx.State,
    config: DecoderConfig,
    source: WeightSource,
    shardings: nnx.State | None = None,
    progress: Progress | None = None,
    change: WeightChange | None = None,
    keep: KeepWeight | None = None,
    spare: Collection[str] = (),
) -> nnx.State:
    """Read the parameters of a decoder from a checkpoint straight onto their shards.

    The host holds one shard of one parameter at a time. On one CPU, large parameters lie in huge
    pages, where the system has them.

    Args:
      abstract_state: shapes and dtypes, from `abstract_model`.
      source: tensors under Hugging Face names.
      shardings: from `sharding.state_shardings`; None for the default device.
      progress: called with (parameters done, parameters in all).
      change: applied to each dense weight after it is read, before the next is; by default none.
      keep: makes a weight of the form that the checkpoint has; None where it cannot. By default
        all are read as dense ones.
      spare: tensors that the checkpoint may have and the model does not need.

    Raises:
      CheckpointError: every missing, surplus and misshapen tensor together, before data is read;
        or a tensor whose data cannot be read.
    """
    family = family_of(config)
    source = under_own_names(source, config)
    flat = nnx.to_flat_state(abstract_state)
    table = family.weights(config)
    plan = {path: _Parameter(path, variable, table) for path, variable in flat}
    _check(plan, source, family, config, spare)
    places = None if shardings is None else dict(nnx.to_flat_state(shardings))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    memory = HugePages()
    loaded: list[tuple[Path, nnx.Variable]] = []
    for done, (path, variable) in enumerate(flat):
        place = here if places is None else places[path].get_value()
        kind = np.dtype(variable.get_value().dtype)
        axes = variable.get_metadata().get("weight_axes")
        kept = None
        if keep is not None and axes is not None:
            names = [name for name, _ in plan[path].needed()]
            kept = keep(path, variable, axes, names, partial(plan[path].load, place=place))
        if kept is not None:
            own = _inside(path, kept)
        else:
            dense = variable.replace(plan[path].load(source, kind, place=place))
            own = _changed(path, dense, change)
        loaded += [(at, v.replace(memory.copied(v.get_value()))) for at, v in own]
        if progress is not None:
            progress(done + 1, len(flat))
    return nnx.from_flat_state(loaded)


def random_params(
    config: DecoderConfig,
    seed: int,
    *,
    layer_layout: LayerLayout = "unrolled",
    change: WeightChange | None = None,
) -> nnx.State:
    """Return random parameters, normal with 1 / sqrt(fan-in), made on the device.

    Every matrix is drawn in the configuration's dtype, so bfloat16 never has a float32 copy.

    Args:
      change: see `load_params`; here all weights are drawn first.
    """
    # Not under one jit: drawing array by array compiles once a shape, not once a parameter.
    decoder = family_of(config).decoder
    model = decoder(config, rngs=nnx.Rngs(params=seed), layer_layout=layer_layout)
    if change is not None:
        replace_weights(model, change)
    return nnx.state(model, nnx.Param)


def abstract_model(
    config: DecoderConfig,
    *,
    layer_layout: LayerLayout = "unrolled",
    part: Part | None = None,
    change: WeightChange | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the graph definition, to `nnx.merge` with parameters, and abstract parameters.

    Args:
      part: None for the whole model.
      change: see `load_params`.
    """
    decoder = family_of(config).decoder

    def built() -> nnx.Module:
        model = decoder(config, rngs=None, layer_layout=layer_layout, part=part)
        if change is not None:
            replace_weights(model, change)
        return model

    return nnx.split(nnx.eval_shape(built))


def _changed(
    path: Path, dense: nnx.Variable, change: WeightChange | None
) -> list[tuple[Path, nnx.Variable]]:
    """Return the parameters that take the place of one, with their paths."""
    axes = dense.get_metadata().get("weight_axes")
    if change is None or axes is None:
        return [(path, dense)]
    weight = change(nnx.Param(dense.get_value(), **dense.get_metadata()), axes)
    if not isinstance(weight, nnx.Module):
        return [(path, dense)]
    return _inside(path, weight)


def _inside(path: Path, weight: nnx.Module) -> list[tuple[Path, nnx.Variable]]:
    """Return the parameters of a module at `path`."""
    return [((*path, *inner), v) for inner, v in nnx.to_flat_state(nnx.state(weight))]


@final
class _Parameter:
    """A parameter, of one layer or of all layers stacked, and the tensors that fill it."""

    def __init__(
        self,
        path: Path,
        variable: nnx.Variable,
        table: Mapping[str, Weight],
    ):
        self.shape: tuple[int, ...] = variable.get_value().shape
        self.weight = table[".".join(str(part) for part in path if not isinstance(part, int))]
        inside = path[path.index("blocks") + 1 :] if "blocks" in path else ()
        self._stacked = bool(inside) and not isinstance(inside[0], int)
        if self._stacked:
            self._layers: tuple[int | None, ...] = tuple(range(self.shape[0]))
        else:
            self._layers = (inside[0],) if inside else (None,)

    def needed(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return names and shapes of the tensors that fill the parameter."""
        shape = self.shape[1:] if self._stacked else self.shape
        for layer in self._layers:
            yield from self.weight.needed(shape, **_place(layer))

    def load(
        self,
        source: WeightSource,
        dtype: np.dtype,
        shape: tuple[int, ...] | None = None,
        *,
        place: jax.sharding.Sharding,
    ) -> jax.Array:
        """Return the array; each shard is read on its own, and equal shards once.

        Args:
          shape: that of the parameter in this source; by default its own. A mesh that does not
            divide it has a whole array on each device.
        """
        size = self.shape if shape is None else shape
        if size != self.shape:
            place = _dividing(place, size)
        shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            parts = index or (slice(None),) * len(size)
            ranges = [part.indices(n)[:2] for part, n in zip(parts, size, strict=True)]
            if tuple(ranges) not in shards:
                shards.clear()  # equal shards come one after another, or are cheap to read
                out = np.empty([last - first for first, last in ranges], dtype)
                self._fill(out, source, size, [slice(*r) for r in ranges])
                shards[tuple(ranges)] = out
            return shards[tuple(ranges)]

        return jax.make_array_from_callback(size, place, shard)

    def _fill(
        self, out: np.ndarray, source: WeightSource, shape: tuple[int, ...], index: list[slice]
    ) -> None:
        if not self._stacked:
            self.weight.read_into(out, source, shape, index, **_place(self._layers[0]))
            return
        for i, layer in enumerate(self._layers[index[0]]):
            self.weight.read_into(out[i], source, shape[1:], index[1:], **_place(layer))


def _dividing(place: jax.sharding.Sharding, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """Return the sharding, or that of a whole array on each device if it does not divide."""
    try:
        place.shard_shape(shape)
    except ValueError:
        assert isinstance(place, jax.sharding.NamedSharding)
        return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return place


def _place(layer: int | None) -> dict[str, int]:
    return {} if layer is None else {"layer": layer}


def _check(
    plan: Mapping[Path, _Parameter],
    source: WeightSource,
    family: Family,
    config: DecoderConfig,
    spare: Collection[str],
) -> None:
    found = source.shapes()
    wanted = {name: shape for parameter in plan.values() for name, shape in parameter.needed()}
    problems = [f"missing tensor {name} {wanted[name]}" for name in sorted(wanted.keys() - found)]
    problems += [
        f"tensor {name} has shape {tuple(found[name])}, the configuration says {shape}"
        for name, shape in sorted(wanted.items())
        if name in found and tuple(found[name]) != shape
    ]
    # A second copy of tied embeddings, and tensors that the family does not need.
    tied = r"lm_head\.weight|embed_out\.weight" if config.tie_word_embeddings else "(?!)"
    ignored = re.compile(f"{tied}|{family.ignored}")
    problems += [
        f"surplus tensor {name} {tuple(found[name])}"
        for name in sorted(found.keys() - wanted - set(spare))
        if not ignored.fullmatch(name)
    ]
    if problems:
        raise CheckpointError(source.where, problems, _remedy(wanted, found, config))


def _remedy(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    config: DecoderConfig,
) -> str:
    """Return what to do about tensors that are not those of the configuration."""
    missing = wanted.keys() - found
    if any(".lora_A." in name for name in found):
        return "an adapter is not merged into these weights; merge it with PEFT's merge_and_unload"
    some = min(missing, default="")
    before = [name.removesuffix(some) for name in found if some and name.endswith(some)]
    if before and all(before[0] + name in found for name in missing):
        return (
            f"the names of the tensors begin with {before[0]!r}, as parts of another model; save "
            "the language model alone, or rename them"
        )
    if {name.rpartition(".")[2] for name in found} & {
        "qweight",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
    }:
        return (
            "the weights are in few bits, which quantization_config in config.json has to "
            "describe; take config.json from the place of the weights"
        )
    rows = max((found[name][0] for name in tied_names(config) if name in found), default=0)
    if not missing and rows > config.vocab_size:
        return (
            f"if the vocabulary is padded to {rows} tokens, set vocab_size in config.json to that"
        )
    return (
        "config.json and the weights do not belong together: take both from the same place or the "
        "same save, and fetch again what is cut short"
    )
