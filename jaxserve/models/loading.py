"""Loads checkpoint tensors into the parameters of a decoder, shard by shard.

Tensor names may have the additions of wrappers, be those of a bare model, or lack a tied head.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from jaxserve.core.errors import CheckpointError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.decoder import LayerLayout, Part
from jaxserve.models.families import family_of, weights_of
from jaxserve.models.family import Family
from jaxserve.models.huge_pages import HugePages
from jaxserve.models.linear import WeightAxes, replace_weights
from jaxserve.models.weights import Weight, WeightSource

_log = logging.getLogger(__name__)

# Parts of names that wrappers add.
_ANYWHERE = r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."
_IN_FRONT = ("module.", "base_model.model.", "language_model.")
_HEADS = ("lm_head.", "embed_out.", "score.")
# Tensors of models of images and text that their text model lacks.
_IMAGES = re.compile(
    r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|image_newline|"
    r"audio_tower|embed_vision|embed_audio)(?:\.|$)"
)
# Numbers of two tensors that are compared at a time.
_COMPARED = 1 << 22


def under_own_names(source: WeightSource, config: DecoderConfig) -> WeightSource:
    """Return the source with its tensors under the family's own names for them.

    Wrappers' parts of names are dropped: those of `torch.compile`, FSDP and checkpointing anywhere,
    those of DDP, PEFT and models of images and text if all names begin with them. Tensors for
    images are left out, and those that the family ignores. A bare model gets its family's prefix,
    and a head alone is the embedding if both are tied.
    """
    family = family_of(config)
    prefix, ignored = prefix_of(config), family.ignored_of(config)
    whole = {own: re.sub(_ANYWHERE, "", own) for own in source.shapes()}
    names = {own: name for own, name in whole.items() if not ignored.fullmatch(name)}
    texts = {own: name for own, name in names.items() if not _IMAGES.match(name)}
    if 0 < len(texts) < len(names):
        _log.warning(
            "%s reads images, too: its text model is served, and %d tensors for images are ignored",
            source.where,
            len(names) - len(texts),
        )
        names = texts
    if len(names) < len(whole):
        source = _Renamed(source, {own: own for own in names})
    while begin := next((each for each in _IN_FRONT if _all_begin(names, each)), None):
        names = {own: name.removeprefix(begin) for own, name in names.items()}
    inner = f"{prefix}language_model."
    if _all_begin(names, inner, *_HEADS):
        names = {own: name.replace(inner, prefix, 1) for own, name in names.items()}
    source = _renamed(source, names)
    embedding, head = tied_names(config)
    if embedding.removeprefix(prefix) in source.shapes():
        source = with_prefix(source, prefix)
    if not config.tie_word_embeddings or embedding in source.shapes():
        return source
    return _renamed(source, {n: embedding if n == head else n for n in source.shapes()})


def prefix_of(config: DecoderConfig) -> str:
    """Return the family's prefix; an empty one for a member of it whose names lack it."""
    given, embedding = family_of(config).prefix, tied_names(config)[0]
    prefixes = (given,) if isinstance(given, str) else given
    return next((prefix for prefix in prefixes if embedding.startswith(prefix)), "")


def with_prefix(source: WeightSource, prefix: str) -> WeightSource:
    """Return the source, with `prefix` before its names if it holds the bare model.

    It replaces `model.`, which transformers 5 has in memory where Nemotron-H's files have
    `backbone.`, and so PEFT has in adapters.
    """
    names = source.shapes()
    if any(name.startswith(prefix) for name in names):
        return source
    return _renamed(
        source,
        {n: n if n.startswith(_HEADS) else prefix + n.removeprefix("model.") for n in names},
    )


def is_bare(source: WeightSource, config: DecoderConfig) -> bool:
    """Return whether a checkpoint is of the model without any head, by the names of its tensors."""
    names = [re.sub(_ANYWHERE, "", name) for name in source.shapes()]
    return not any(name.startswith((prefix_of(config), *_HEADS)) for name in names)


def fitted(config: DecoderConfig, source: WeightSource) -> DecoderConfig:
    """Return the configuration corrected by these tensors, under their own names.

    A separate head counts if it differs from the embedding, regardless of `tie_word_embeddings`, as
    in transformers 5.
    """
    config = config.fitted_to(source.shapes())
    embedding, head = tied_names(config)
    if config.tie_word_embeddings and not _are_equal(source, embedding, head):
        _log.warning(
            "%s ties %s to %s in config.json and has both, which differ: each is used as it is",
            source.where,
            head,
            embedding,
        )
        return replace(config, tie_word_embeddings=False)
    return config


def _all_begin(names: Mapping[str, str], *begins: str) -> bool:
    """Return whether all names begin with one of these, and one with the first."""
    values = names.values()
    return any(map(methodcaller("startswith", begins[0]), values)) and all(
        map(methodcaller("startswith", begins), values)
    )


def _renamed(source: WeightSource, names: Mapping[str, str]) -> WeightSource:
    """Return the source with other names; itself if they stay or two would be one."""
    if all(own == name for own, name in names.items()) or len(set(names.values())) < len(names):
        return source
    return _Renamed(source, {name: own for own, name in names.items()})


def tied_names(config: DecoderConfig) -> tuple[str, str]:
    weights = weights_of(config)
    return weights["embedding"].tensors[0].name, weights["lm_head"].tensors[0].name


def _are_equal(source: WeightSource, one: str, other: str) -> bool:
    """Return whether two tensors have the same numbers, if both exist."""
    shapes = source.shapes()
    if one not in shapes or other not in shapes:
        return True
    num_rows, width = shapes[one]
    step = max(1, _COMPARED // max(1, width))
    parts = (slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step))
    return shapes[one] == shapes[other] and all(
        np.array_equal(source.read(one, (part,)), source.read(other, (part,))) for part in parts
    )


@final
class _Renamed:
    """A `WeightSource` under other names; `names` has the source's own name of each tensor."""

    def __init__(self, source: WeightSource, names: Mapping[str, str]):
        self.where = source.where
        self._source = source
        self._names = names

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._source.shapes()
        return {name: shapes[own] for name, own in self._names.items()}

    def dtypes(self) -> Mapping[str, str]:
        dtypes = self._source.dtypes()
        return {name: dtypes[own] for name, own in self._names.items()}

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        return self._source.read(self._names.get(name, name), index)


Progress = Callable[[int, int], None]
Path = tuple[Any, ...]
# Returns the replacement of a dense weight: a module, or the weight itself.
WeightChange = Callable[[nnx.Param, WeightAxes], Any]
# Returns the array to hold in place of one that was made, by its path.
Hold = Callable[[Path, jax.Array], jax.Array]
# Makes a weight from its path, its dense form, the names of its tensors, and a function that reads
# it from a source in a dtype, or in another shape; see `kept_weights.KeptBlocks.weight`.
KeepWeight = Callable[[Path, nnx.Variable, WeightAxes, list[str], Callable[..., jax.Array]], Any]


def load_params(
    abstract_state: nnx.State,  # shapes and dtypes, from `abstract_model`
    config: DecoderConfig,
    source: WeightSource,  # tensors under Hugging Face names
    shardings: nnx.State | None = None,
    progress: Progress | None = None,  # called with (parameters done, parameters in all)
    change: WeightChange | None = None,
    keep: KeepWeight | None = None,
    hold: Hold | None = None,
    spare: Collection[str] = (),  # tensors that the checkpoint may have and the model does not need
) -> nnx.State:
    """Read the parameters of a decoder from a checkpoint straight onto their shards.

    The host holds one shard of one parameter at a time.

    Args:
      shardings: from `sharding.state_shardings`; None for the default device.
      change: applied to each dense weight after it is read, before the next is; by default none.
      keep: makes a weight in the checkpoint's own form; None if it cannot. By default all are read
        as dense ones.
      hold: takes each array before the next is read. By default, large ones on one CPU are moved to
        huge pages if the system has them.

    Raises:
      CheckpointError: every missing, surplus and misshapen tensor together, before data is read;
        or a tensor whose data cannot be read.
    """
    family = family_of(config)
    source = under_own_names(source, config)
    flat = nnx.to_flat_state(abstract_state)
    table = weights_of(config)
    plan = {path: Parameter(path, variable, table) for path, variable in flat}
    _check(plan, source, family, config, spare)
    places = None if shardings is None else dict(nnx.to_flat_state(shardings))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    memory = HugePages()
    held = hold or (lambda _, array: memory.copied(array))
    loaded: list[tuple[Path, nnx.Variable]] = []
    # The largest first: while it is converted, its copies are held beside what is loaded.
    largest = sorted(flat, key=lambda each: each[1].get_value().size, reverse=True)
    for done, (path, variable) in enumerate(largest):
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
            dense = plan[path].load(source, kind, place=place)
            own = changed(path, variable.replace(dense), change)
            del dense
        for at, made in own:
            array = made.get_value()
            own_copy = held(at, array)
            if own_copy is not array:
                array.delete()  # its module is in a cycle, which Python collects much later
            loaded.append((at, made.replace(own_copy)))
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

    Every matrix is drawn in the configuration's dtype, so bfloat16 never has a float32 copy. For
    `change` see `load_params`; here all weights are drawn first.
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

    `part` is None for the whole model. For `change` see `load_params`.
    """
    decoder = family_of(config).decoder

    def built() -> nnx.Module:
        model = decoder(config, rngs=None, layer_layout=layer_layout, part=part)
        if change is not None:
            replace_weights(model, change)
        return model

    return nnx.split(nnx.eval_shape(built))


def changed(
    path: Path, dense: nnx.Variable, change: WeightChange | None
) -> list[tuple[Path, nnx.Variable]]:
    """Return the parameters that replace one parameter, with their paths."""
    axes = dense.get_metadata().get("weight_axes")
    if change is None or axes is None:
        return [(path, dense)]
    weight = change(nnx.Param(dense.get_value(), **dense.get_metadata()), axes)
    if not isinstance(weight, nnx.Module):
        return [(path, dense)]
    return _inside(path, weight)


def _inside(path: Path, weight: nnx.Module) -> list[tuple[Path, nnx.Variable]]:
    return [((*path, *inner), v) for inner, v in nnx.to_flat_state(nnx.state(weight))]


@final
class Parameter:
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
        shape = self.shape[1:] if self._stacked else self.shape
        for layer in self._layers:
            yield from self.weight.needed(shape, **_place(layer))

    def write(
        self, array: np.ndarray, tensor_at: Callable[[str, tuple[int, ...]], np.ndarray]
    ) -> None:
        """Fill the tensors, which `tensor_at` returns by name and shape, from the array."""
        parts = array if self._stacked else (array,)
        for layer, part in zip(self._layers, parts, strict=True):
            self.weight.write(part, tensor_at, **_place(layer))

    def load(
        self,
        source: WeightSource,
        dtype: np.dtype,
        shape: tuple[int, ...] | None = None,
        *,
        place: jax.sharding.Sharding,
    ) -> jax.Array:
        """Return the array; each shard is read on its own, and equal shards once.

        `shape` is that of the parameter in this source; by default its own. If the mesh does not
        divide it, each device has the whole array.
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
    """Return the sharding, or one of a whole array on each device if it does not divide."""
    try:
        place.shard_shape(shape)
    except ValueError:
        assert isinstance(place, jax.sharding.NamedSharding)
        return jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return place


def _place(layer: int | None) -> dict[str, int]:
    return {} if layer is None else {"layer": layer}


def _check(
    plan: Mapping[Path, Parameter],
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
    constants = family.constants_of(config)
    for name in sorted(constants.keys() & found):
        number = float(source.read(name).item())
        if not math.isclose(number, constants[name], rel_tol=0.01):  # as bfloat16 rounds it
            problems.append(f"tensor {name} is {number:g}, and only {constants[name]:g} is served")
    # A second copy of tied embeddings, and tensors that the family does not need.
    tied = r"lm_head\.weight|embed_out\.weight" if config.tie_word_embeddings else "(?!)"
    ignored = re.compile(f"{tied}|{family.ignored_of(config).pattern}")
    problems += [
        f"surplus tensor {name} {tuple(found[name])}"
        for name in sorted(found.keys() - wanted - constants.keys() - set(spare))
        if not ignored.fullmatch(name)
        and not (family.predicts_several and _layer_of(name) >= config.num_layers)
    ]
    if problems:
        raise CheckpointError(source.where, problems, _remedy(wanted, found, config))


def _layer_of(name: str) -> int:
    """Return the number of the layer in a tensor's name; -1 for a tensor outside the layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _remedy(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    config: DecoderConfig,
) -> str:
    """Return the remedy for tensors that do not match the configuration."""
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


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Record the seconds of the block with `jax.monitoring`, as "/jaxserve/start/PART"."""
    begin_s = time.perf_counter()
    try:
        yield
    finally:
        passed_s = time.perf_counter() - begin_s
        jax.monitoring.record_event_duration_secs(f"/jaxserve/start/{part}", passed_s)
