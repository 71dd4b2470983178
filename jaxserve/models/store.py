"""Loads a model by name or path, ready to serve; caches converted GGUF weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.errors import CheckpointError, InvalidConfigError
from jaxserve.core.options import parse_dtype
from jaxserve.models.config import DecoderConfig, check_fits
from jaxserve.models.converted import ConvertedModel
from jaxserve.models.decoder import LayerLayout
from jaxserve.models.families import config_from_hf
from jaxserve.models.hub import TOKENIZER_FILES
from jaxserve.models.linear import replace_weights_at
from jaxserve.models.loading import (
    Hold,
    Progress,
    WeightChange,
    abstract_model,
    changed,
    fitted,
    is_bare,
    load_params,
    random_params,
    timed,
    under_own_names,
)
from jaxserve.models.orbax_folder import checkpoint_in, restore
from jaxserve.models.parts import cut, planned_stages, shardings_over
from jaxserve.models.pooling import pooling_of
from jaxserve.models.quantisation import Quantisation
from jaxserve.models.registry import config_json, resolve
from jaxserve.models.safetensors_source import SafetensorsSource
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.models.tokenizer_files import declared_end_ids
from jaxserve.models.weights import WeightSource
from jaxserve.sharding import DeviceGroups, StagePlan, placed, state_shardings

if TYPE_CHECKING:
    from jaxserve.models.kept_weights import KeptBlocks, KeptMatrices
    from jaxserve.models.quantised_folders.matrix import Method

_log = logging.getLogger(__name__)


# Returns the result of a function, perhaps that of an earlier process for the same values, which
# decide the result.
Remember = Callable[[tuple[Any, ...], Callable[[], Any]], Any]


def made_now(values: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    return make()


@final
@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The parts of a model that the engine needs.

    Attributes:
      graphdef, params: `nnx.merge(graphdef, params)` is the `Decoder`.
      tokenizer: None for a folder or configuration without one; then prompts are token ids.
      eos_token_ids: the tokens that end an answer, the model's own first; may be empty.
      source_path: the folder or file that the model came from; None for a bare configuration.
    """

    name: str
    config: DecoderConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    source_path: Path | None


def load_model(
    name_or_path: str | Path | DecoderConfig,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    load: Literal["auto", "random"] = "auto",
    seed: int = 0,
    layer_layout: LayerLayout = "unrolled",
    mesh: Mesh | StagePlan | DeviceGroups | None = None,
    quantisation: Quantisation | None = None,
    cache: bool = True,
    saves_behind: bool = False,
    huge_pages: bool = True,
    remember: Remember = made_now,
    progress: bool = True,
) -> LoadedModel:
    """Load a model; download it first if it has a name and is not in the cache.

    A folder's weights are safetensors, or parameters of the `Decoder` that Orbax has written.

    Args:
      name_or_path: registered name, Hugging Face folder, GGUF file, name of the Hugging Face Hub
        (`org/name`, `org/name@revision`, `org/name:Q4_K_M` for a GGUF file), or (with
        `load="random"`) a configuration.
      dtype: of the model, as in `parse_dtype`; by default float32, or a bare configuration's.
      load: `random` draws the weights from `seed`; only a config.json is needed then.
      mesh: where the parameters go, by the rules of `sharding`, or stage by stage; None for the
        default device. Of two device groups, the encode group gets them.
      quantisation: how the weights are stored; they are changed one by one while they are read. By
        default all are dense.
      cache: keep the converted form of a GGUF file for the next start; has no effect if the mesh
        spans several processes.
      saves_behind: return before the converted form is written; the process ends after that.
      huge_pages: see `RuntimeOptions`.
      remember: finds the structure of an equal model of an earlier process, which is not traced.
      layer_layout: the layout of layers that are alike; layers that differ, and layers of stages,
        are unrolled. Scanned ones compile in a time that does not grow with their number, but their
        steps take longer: XLA on GPUs first copies the weights of each layer.
      progress: show bars on stderr.

    Raises:
      ModelError: unknown, unsupported or damaged model.
      InvalidConfigError: `load` unknown, or the mesh does not divide the model.
      DownloadError, ModelCacheError: the model cannot be downloaded. A converted form that
        cannot be saved causes a warning only.
    """
    if load not in ("auto", "random"):
        raise InvalidConfigError(f"load={load!r} is unknown; give 'auto' or 'random'")
    groups = mesh.both if isinstance(mesh, DeviceGroups) else (mesh,)
    if any(map(_has_stages, groups)):
        layer_layout = "unrolled"
    mesh = groups[0]
    how = _How(
        dtype=parse_dtype(dtype),
        layer_layout=layer_layout,
        mesh=mesh,
        progress=progress,
        quantisation=quantisation,
        huge_pages=huge_pages,
        remember=remember,
    )
    if isinstance(name_or_path, DecoderConfig):
        if load != "random":
            raise InvalidConfigError(
                "a configuration has no weights; give load='random', or a model's name or path"
            )
        return _random("random", how.configured(name_or_path), seed, how, None, (), None)
    resolved = resolve(name_or_path)
    path = resolved.fetch(weights=load == "auto", progress=progress)
    if resolved.kind == "folder":
        from jaxserve.models.quantised_folders.folder import method_in

        given = config_json(path)
        method = method_in(path, given)
        config = replace(how.read(given), pooling=pooling_of(path, given))
        with timed("tokenizer"):
            tokenizer, ends = _folder_tokenizer(path)
        if load == "random":
            return _random(resolved.name, config, seed, how, tokenizer, ends, path)
        config, graphdef, params = _folder(path, config, how, method)
        return _loaded(resolved.name, config, graphdef, params, tokenizer, ends, path)
    if load == "random":
        from jaxserve.models.gguf import GGUFSource

        source = GGUFSource(path)
        config, tokenizer = how.read(source.config), Tokenizer.from_gguf(source)
        return _random(resolved.name, config, seed, how, tokenizer, tokenizer.eos_token_ids, path)
    return _gguf(resolved.name, path, how, cache, saves_behind)


def load_tokenizer(name_or_path: str, *, progress: bool = True) -> Tokenizer | None:
    """Return the tokenizer that `load_model` would find; None if there is none.

    Raises:
      UnknownModelError, CheckpointError, UnsupportedModelError, DownloadError, ModelCacheError
    """
    resolved = resolve(name_or_path)
    path = resolved.fetch(weights=False, progress=progress)
    return _folder_tokenizer(path)[0] if resolved.kind == "folder" else Tokenizer.from_gguf(path)


def _has_stages(mesh: Mesh | StagePlan | None) -> bool:
    if isinstance(mesh, Mesh):
        return mesh.shape.get("stage", 1) > 1
    return mesh is not None


@final
@dataclass(frozen=True, kw_only=True)
class _How:
    dtype: str | None
    layer_layout: LayerLayout
    mesh: Mesh | StagePlan | None
    progress: bool
    quantisation: Quantisation | None
    huge_pages: bool
    remember: Remember

    @property
    def maps_weights(self) -> bool:
        """Whether weights are mapped from the files of their converted form."""
        return self.mesh is None and not self.huge_pages and jax.default_backend() == "cpu"

    @property
    def change(self) -> WeightChange | None:
        return None if self.quantisation is None else self.quantisation.change

    def configured(self, config: DecoderConfig) -> DecoderConfig:
        return config if self.dtype is None else replace(config, dtype=self.dtype)

    def read(self, given: Mapping[str, Any]) -> DecoderConfig:
        return self.configured(config_from_hf(given))

    def layout_of(self, config: DecoderConfig) -> LayerLayout:
        """Return the requested layout, or `unrolled` for layers that differ."""
        if self.layer_layout == "scanned" and not config.is_uniform:
            _log.info("layers differ, so they are unrolled instead of scanned")
            return "unrolled"
        return self.layer_layout

    def abstract(
        self, config: DecoderConfig, *, dense: bool = False
    ) -> tuple[nnx.GraphDef, nnx.State, nnx.State | None]:
        """Return the graph definition, the abstract parameters, and their shardings.

        With `dense`, they are those of the model before its weights are changed.
        """
        layout = self.layout_of(config)
        change = None if dense else self.change
        graphdef, state = self.remember(
            (config, layout, None if dense else self.quantisation),
            partial(abstract_model, config, layer_layout=layout, change=change),
        )
        stages = planned_stages(self.mesh, config)
        if stages is not None:
            return graphdef, state, shardings_over(cut(config, stages, layout))
        if not isinstance(self.mesh, Mesh):
            return graphdef, state, None
        check_fits(self.mesh, config)
        return graphdef, state, state_shardings(state, self.mesh)


def _gguf(name: str, path: Path, how: _How, cache: bool, saves_behind: bool) -> LoadedModel:
    keeps = how.quantisation is not None and how.quantisation.keeps_blocks
    # Processes on hosts without a shared disk would not all find the entry. Kept blocks are those
    # of the file itself.
    cache = cache and not keeps and not (isinstance(how.mesh, Mesh) and how.mesh.is_multi_process)
    variant = f"{how.dtype or 'float32'}-{how.layer_layout}"
    if how.quantisation is not None:
        variant += f"-{how.quantisation.name}"
    kept = ConvertedModel(name, path, variant) if cache else None
    with timed("tokenizer"):
        header = None if kept is None else kept.read_header()
    if kept is not None and header is not None:
        config, tokenizer = how.read(header.config), header.tokenizer
        with timed("weights"):
            graphdef, abstract, shardings = how.abstract(config)
            params = kept.restore(abstract, shardings, uses_huge_pages=how.huge_pages)
        if params is not None:
            ends = tokenizer.eos_token_ids
            return _loaded(name, config, graphdef, params, tokenizer, ends, path)
    from jaxserve.models.gguf import GGUFSource

    source = GGUFSource(path)
    with timed("tokenizer"):
        config, tokenizer = fitted(how.read(source.config), source), Tokenizer.from_gguf(source)
    if how.quantisation is not None and keeps:
        from jaxserve.models.kept_weights import KeptBlocks

        blocks = KeptBlocks(source, rounds_activations=how.quantisation.rounds_activations)
        graphdef, params = _kept(config, source, how, blocks)
    else:
        hold = None if kept is None or not how.maps_weights else kept.hold
        graphdef, params = _converted(config, source, how, hold)
    if kept is not None:
        save = kept.save_behind if saves_behind else kept.save
        save(source.config, tokenizer, params)
    return _loaded(name, config, graphdef, params, tokenizer, tokenizer.eos_token_ids, path)


def _folder(
    path: Path, config: DecoderConfig, how: _How, method: Method | None
) -> tuple[DecoderConfig, nnx.GraphDef, nnx.State]:
    """Read a folder's weights. Those in few bits keep their stored form."""
    if method is None:
        if how.quantisation is not None and how.quantisation.keeps_blocks:
            raise InvalidConfigError(
                "quantize='keep' needs a GGUF file, or a folder with a quantization_config in "
                f"config.json, and {path} is a folder of dense weights; pass quantize='int8' or "
                "'int4' to round them"
            )
        checkpoint = None if any(path.glob("*.safetensors")) else checkpoint_in(path)
        if checkpoint is not None:
            return config, *_restored(config, checkpoint, how)
        stored = SafetensorsSource(path)
        source = under_own_names(stored, config)
        if is_bare(stored, config) and not config.tie_word_embeddings:
            _log.info("%s has no head: it embeds texts, and generates nothing", path)
            config = config.without_token_head()
        config = fitted(config, source)
        return config, *_converted(config, source, how)
    if how.quantisation is not None and how.quantisation.rounds_weights:
        raise InvalidConfigError(
            f"quantize={how.quantisation.name.partition('-')[0]!r} rounds dense weights, and those "
            f"of {path} are in few bits already; omit quantize to serve them as they are"
        )
    if _has_stages(how.mesh):
        raise InvalidConfigError(
            f"{path} has weights in few bits, which cannot be cut into stages; pass a mesh without "
            "stages (tensor, data), or a checkpoint in 16 or 32 bits"
        )
    from jaxserve.models.kept_weights import KeptMatrices
    from jaxserve.models.quantised_folders.folder import QuantisedFolder

    folder = QuantisedFolder(under_own_names(SafetensorsSource(path), config), method)
    config = fitted(config, folder)
    rounds = (how.quantisation or Quantisation.stored()).rounds_activations
    keeper = KeptMatrices(folder, rounds_activations=rounds)
    return config, *_kept(config, folder, how, keeper, folder.empty_biases())


def _kept(
    config: DecoderConfig,
    source: WeightSource,
    how: _How,
    keeper: KeptBlocks | KeptMatrices,
    spare: Collection[str] = (),
) -> tuple[nnx.GraphDef, nnx.State]:
    dense, abstract, shardings = how.abstract(config, dense=True)
    modules = {}

    def keep(path: tuple[Any, ...], *given: Any) -> Any:
        modules[path] = keeper.weight(*given)
        return modules[path]

    with timed("weights"), _bar("Loading weights", how.progress) as report:
        params = load_params(abstract, config, source, shardings, report, keep=keep, spare=spare)
    model = nnx.merge(dense, abstract)
    replace_weights_at(model, lambda path, weight, axes: modules[path] or weight)
    if isinstance(how.mesh, Mesh):
        params = placed(params, state_shardings(params, how.mesh))
    return nnx.split(model)[0], params


def _converted(
    config: DecoderConfig, source: WeightSource, how: _How, hold: Hold | None = None
) -> tuple[nnx.GraphDef, nnx.State]:
    _, abstract, shardings = how.abstract(config, dense=True)
    with timed("weights"), _bar("Loading weights", how.progress) as report:
        params = load_params(abstract, config, source, shardings, report, how.change, hold=hold)
    graphdef, _, shardings = how.abstract(config)
    return graphdef, params if shardings is None else placed(params, shardings)


def _restored(config: DecoderConfig, checkpoint: Path, how: _How) -> tuple[nnx.GraphDef, nnx.State]:
    _, abstract, shardings = how.abstract(config, dense=True)
    with timed("weights"):
        dense = restore(checkpoint, abstract, shardings)
        flat = [changed(at, weight, how.change) for at, weight in nnx.to_flat_state(dense)]
    graphdef, _, shardings = how.abstract(config)
    params = nnx.from_flat_state(list(chain.from_iterable(flat)))
    return graphdef, params if shardings is None else placed(params, shardings)


def _random(
    name: str,
    config: DecoderConfig,
    seed: int,
    how: _How,
    tokenizer: Tokenizer | None,
    ends: tuple[int, ...],
    path: Path | None,
) -> LoadedModel:
    graphdef, _, shardings = how.abstract(config)
    params = random_params(config, seed, layer_layout=how.layout_of(config), change=how.change)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = placed(params, here if shardings is None else shardings)
    return _loaded(name, config, graphdef, params, tokenizer, ends, path)


def _loaded(
    name: str,
    config: DecoderConfig,
    graphdef: nnx.GraphDef,
    params: nnx.State,
    tokenizer: Tokenizer | None,
    ends: tuple[int, ...],
    path: Path | None,
) -> LoadedModel:
    if tokenizer is not None and tokenizer.num_own_tokens > config.vocab_size:
        raise CheckpointError(
            str(path),
            [f"the tokenizer has {tokenizer.num_own_tokens} tokens, the model {config.vocab_size}"],
            "the tokenizer belongs to another model; use the one the model came with",
        )
    if tokenizer is not None and (unknown := tokenizer.added_from(config.vocab_size)):
        _log.warning(
            "the model has no embeddings of %d tokens that were added to the tokenizer (%s); "
            "prompts with them are refused",
            len(unknown),
            ", ".join(map(repr, list(unknown.values())[:8])),
        )
    return LoadedModel(
        name=name,
        config=config,
        graphdef=graphdef,
        params=params,
        tokenizer=tokenizer,
        eos_token_ids=tuple(i for i in ends if i < config.vocab_size),
        source_path=path,
    )


def _folder_tokenizer(folder: Path) -> tuple[Tokenizer | None, tuple[int, ...]]:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        _log.warning("%s has no tokenizer: prompts must be token ids", folder)
        return None, tuple(declared_end_ids(folder))
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer, tokenizer.eos_token_ids


@contextmanager
def _bar(doing: str, progress: bool) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

    with ProgressBar(console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task(doing)
        yield lambda done, total: bar.update(task, completed=done, total=total)
