"""Checks that refuse incompatible features before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.errors import DeviceMemoryError, InvalidConfigError
from jaxserve.core.options import DTYPES, RuntimeOptions
from jaxserve.core.page_layout import page_layout
from jaxserve.execution.memory_plan import free_device_bytes
from jaxserve.kernels import build, dispatch
from jaxserve.models.function import FunctionConfig
from jaxserve.models.linear import RowKernels, without_row_kernels
from jaxserve.models.quantised import QuantisedWeight
from jaxserve.sharding import DeviceGroups, StagePlan
from jaxserve.sharding.shards import TENSOR
from jaxserve.steps.step_function import Placement


@final
@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is served, and on what.

    Attributes:
      model_config: None while the model is not known.
      is_function: whether the model is a `FunctionDecoder`.
      is_placed: whether the parameters are on a mesh already.
      is_quantised: whether the weights are in few bits.
    """

    options: RuntimeOptions
    model_config: Any = None
    mesh: Mesh | StagePlan | DeviceGroups | None = None
    num_processes: int = 1
    has_probe: bool = False
    is_function: bool = False
    is_placed: bool = False
    is_quantised: bool = False

    def columns(self) -> dict[str, str]:
        """Return the columns of `TABLE` that apply, and how an error calls each."""
        groups = self.mesh.both if isinstance(self.mesh, DeviceGroups) else (self.mesh,)
        axes = [each.shape for each in groups if isinstance(each, Mesh)]
        has_stages = any(isinstance(each, StagePlan) for each in groups)
        has_stages = has_stages or any(each.get("stage", 1) > 1 for each in axes)
        num_shards = max((each.get(TENSOR, 1) for each in axes), default=1)
        options, config = self.options, self.model_config
        a_mesh = "a mesh, stages or device groups"
        columns = {
            "mesh": (self.mesh is not None, a_mesh),
            "placed": (self.is_placed, a_mesh),
            "stages": (has_stages, "stages"),
            "mesh of stages": (has_stages, "a mesh with stages"),
            "groups": (len(groups) > 1, f"{len(groups)} device groups"),
            "processes": (self.num_processes > 1, f"{self.num_processes} processes"),
            "tensor": (num_shards > 1, f"a mesh with tensor={num_shards}"),
            "encoder": (config and config.has_encoder, "an encoder-decoder model"),
            "recurrent": (config and config.num_recurrent_layers, "a model with recurrent layers"),
            "quantised": (self.is_quantised, "weights in few bits"),
            "quantize": (options.quantize is not None, f"quantize={options.quantize!r}"),
            "adapters": (options.max_adapters > 0, f"max_adapters={options.max_adapters}"),
            "probe": (options.probe is not None, "probe"),
            "deterministic": (options.deterministic, "deterministic=True"),
        }
        return {column: name for column, (applies, name) in columns.items() if applies}


def _has_states(setting: Setting) -> bool:
    return bool(setting.model_config and setting.model_config.num_recurrent_layers)


@final
@dataclass(frozen=True)
class Exclusion:
    """A row of `TABLE`: a feature, and the columns of `Setting` that it does not go with.

    `error` is a format of the column's name, and of the options.
    """

    is_asked: Callable[[Setting], Any]
    excludes: Sequence[str]
    error: str


# What does not go with what, apart from sizes, devices' kinds and policies.
TABLE = (
    Exclusion(
        lambda setting: setting.is_function,
        ("quantize", "adapters", "probe", "deterministic", "mesh of stages"),
        "{name} needs a model whose layers and products are known, and a FunctionDecoder has its "
        "own; omit it, or write a family (docs/adding_a_model.md)",
    ),
    Exclusion(
        lambda setting: setting.options.max_adapters,
        ("mesh", "placed", "encoder", "quantised"),
        "max_adapters={options.max_adapters} is not supported for {name}; omit it, or serve a "
        "decoder with dense weights on one device (docs/adapters.md)",
    ),
    Exclusion(
        lambda setting: setting.options.draft_model is not None,
        ("mesh",),
        "draft_model= with {name}: the draft model is on one device; omit mesh, or pass "
        "speculation='lookup' without draft_model",
    ),
    Exclusion(
        lambda setting: setting.options.speculation and _has_states(setting),
        ("stages",),
        "speculation={options.speculation!r} is not supported for a model with recurrent layers "
        "that is cut into {name}; omit it, or pass a mesh without stages",
    ),
    Exclusion(
        lambda setting: setting.options.quantize is not None,
        ("stages",),
        "quantize={options.quantize!r} is not supported for a model that is cut into {name}; pass "
        "a mesh without stages (tensor, data), or omit quantize",
    ),
    Exclusion(
        lambda setting: setting.options.disk_memory is not None,
        ("processes",),
        "disk_memory={options.disk_memory!r}, but several processes serve the model, and each has "
        "only a part of every page; pass no disk_memory, or a mesh of one process's devices",
    ),
    Exclusion(
        lambda setting: setting.has_probe,
        ("stages", "processes"),
        "probe= needs a model that is whole in one process, but this one is cut into stages or "
        "served by several processes; omit the probe",
    ),
    Exclusion(
        lambda setting: _has_states(setting),
        ("groups",),
        "{name} for a model with recurrent layers, whose states are not handed over; omit mesh, or "
        "pass one for both prompts and answers",
    ),
)


def check_together(setting: Setting) -> None:
    """Raise InvalidConfigError for the first row of `TABLE` that a setting contradicts."""
    columns, options = setting.columns(), setting.options
    for row in TABLE:
        found = [columns[each] for each in row.excludes if each in columns]
        if found and row.is_asked(setting):
            raise InvalidConfigError(row.error.format(name=found[0], options=options))


def grouped_windows(setting: Setting) -> tuple[int | None, ...]:
    """Return `EngineConfig.layer_windows`: the window of each layer if pages are grouped by it.

    Pages are in one group, so that none is freed before its sequence ends, for a model whose layers
    see the same positions, for layers without keys and values of their own in pages, and with what
    groups do not go with yet: the disk, pages that come layer by layer, a draft model, stages,
    device groups, and several processes (docs/decisions/12_pages_are_grouped_by_window.md).
    """
    options, config, columns = setting.options, setting.model_config, setting.columns()
    others = {"stages", "groups", "processes", "encoder", "recurrent"} & columns.keys()
    # The others read values before a window, which may be those of another sequence.
    default = "cpu" if jax.default_backend() == "cpu" else "triton"
    is_exact = set((options.attention or default).split(",")) <= {"cpu", "xla"}
    is_plain = set(config.layer_kinds) == {"attention"} and not (
        isinstance(config, FunctionConfig)
        or any(config.attention_chunks)
        or any(source is not None for source in config.kv_sources)
    )
    comes_by_layer = options.restore in ("per_layer", "both")
    is_more = comes_by_layer or options.disk_memory is not None or options.draft_model is not None
    if is_more or others or not (is_exact and is_plain):
        return ()
    windows = config.sliding_windows
    return windows if page_layout(windows).is_grouped else ()


def check_adapters_fit(num_bytes: int, options: RuntimeOptions, params: Any) -> None:
    """Raise DeviceMemoryError if the adapters' arrays, of `num_bytes`, do not fit on the device."""
    device = next(iter(jax.tree.leaves(params)[0].devices()))
    free = free_device_bytes(device)
    if num_bytes > free:
        raise DeviceMemoryError(
            f"max_adapters={options.max_adapters} of max_adapter_rank={options.adapter_rank} need "
            f"{num_bytes:,} bytes, and {free:,} are free on {device}; pass fewer adapters or a "
            "lower max_adapter_rank"
        )


def check_slot_options(model_config: Any, options: RuntimeOptions) -> None:
    """Raise InvalidConfigError for options of KV that a model with recurrent layers has not."""
    if not model_config.num_recurrent_layers:
        if options.state_memory is not None:
            raise InvalidConfigError(
                f"state_memory={options.state_memory!r} for a model without recurrent layers, "
                "which has no states; omit it"
            )
        return
    if options.restore not in (None, "on_admission", "prefetch"):
        raise InvalidConfigError(
            f"restore={options.restore!r} for a model with recurrent layers, whose pages do not "
            "come layer by layer; omit restore, or pass 'on_admission' or 'prefetch'"
        )
    for name in ("host_memory", "disk_memory"):
        if options.state_memory == 0 and getattr(options, name):
            raise InvalidConfigError(
                f"{name}={getattr(options, name)!r} with state_memory=0 for a model with recurrent "
                "layers: states go there from the device's memory for states; omit state_memory"
            )
    if model_config.num_attention_layers:
        return
    for name in ("kv_dtype", "kv_memory"):
        if getattr(options, name) is not None:
            raise InvalidConfigError(
                f"{name}={getattr(options, name)!r} for a model without attention, which has no "
                f"keys and values; omit {name}, and pass max_slots to bound its memory"
            )


def check_storage(
    options: RuntimeOptions, mesh: Mesh | StagePlan | DeviceGroups | None, dtype: str
) -> None:
    """Raise InvalidConfigError if a model in `dtype` cannot have these weights, keys and values."""
    platform = jax.default_backend()
    of_floats = {dtype, "bfloat16"} if (platform, dtype) == ("cpu", "float32") else {dtype}
    if options.kv_dtype in set(DTYPES) - of_floats:
        raise InvalidConfigError(
            f"kv_dtype={options.kv_dtype!r} is for models in it, and 'bfloat16' for float32 on "
            f"CPUs; this one is in {dtype} on {platform!r}; omit kv_dtype, or pass 'int8'"
        )
    is_alone = mesh is None and jax.default_backend() == "cpu"
    if options.quantize == "bf16" and not (is_alone and dtype == "float32"):
        raise InvalidConfigError(
            "quantize='bf16' stores the weights of a float32 model in 16 bits for the kernel of "
            f"one CPU, and this model is in {dtype} on {jax.default_backend()!r}"
            + ("" if mesh is None else " with a mesh")
            + "; pass dtype='bfloat16' for weights and activations in 16 bits"
        )
    if options.quantize == "bf16" and not build.has_compiler():
        raise InvalidConfigError(
            "quantize='bf16' needs a C++ compiler for its kernel, and there is none; install g++ "
            "or clang++, or omit quantize"
        )


def check_deterministic(
    model_config: Any,
    options: RuntimeOptions,
    graphdef: nnx.GraphDef,
    params: Any,
    stages: StagePlan | None = None,
) -> None:
    """If the options ask for determinism, raise InvalidConfigError with every reason against it."""
    if not options.deterministic:
        return
    found = _obstacles(model_config, options, graphdef, params, stages)
    if found:
        raise InvalidConfigError(
            f"deterministic=True is not possible {'; and not '.join(found)}; or omit it "
            "(docs/batch_invariance.md)"
        )


def _obstacles(
    model_config: Any,
    options: RuntimeOptions,
    graphdef: nnx.GraphDef,
    params: Any,
    stages: StagePlan | None = None,
) -> list[str]:
    """Return every reason for which a request's bits may depend on the batch."""
    sharding = jax.tree.leaves(params)[0].sharding
    platform = next(iter(sharding.device_set)).platform
    kernels = row_kernels_of(options)
    if platform not in ("cpu", "gpu") or (kernels is None and platform != "cpu"):
        return [
            f"on platform {platform!r} with attention={options.attention!r}, whose sums may depend "
            "on the batch's size: use a CPU or an NVIDIA GPU, and omit attention="
        ]
    place = Placement.like(sharding)
    shards = [place.num_shards] if stages is None else [each.num_shards for each in stages.stages]
    heads = model_config.head_dim
    given = {
        f"with tensor={max(shards)}: pass a mesh without a tensor axis": max(shards) > 1,
        "for recurrent layers, which compute prompts in pieces: serve a model without": (
            model_config.num_recurrent_layers > 0
        ),
        "for an encoder, which takes several prompts together: serve a decoder": (
            model_config.has_encoder
        ),
    }
    if kernels is not None:
        parts = without_row_kernels(nnx.merge(graphdef, params))
        given |= {
            f"with head_dim={heads} on a GPU: serve a model of at most 256": heads > 256,
            f"with {' and '.join(parts)} on a GPU, whose sums have no fixed order there: serve "
            "layers without adapters, with weights in the model's dtype": bool(parts),
        }
    else:
        dtype = model_config.dtype
        given |= {
            "without a C++ compiler: install g++ or clang++": not build.has_compiler(),
            f"in {dtype}: pass dtype='float32'": dtype != "float32",
            f"with head_dim={heads}: serve a model with a multiple of 8": heads % 8 != 0,
            f"with attention={options.attention!r}: omit it": (
                options.attention not in (None, "cpu")
            ),
            "with weights in float8: pass quantize='int8' or 'int4'": _has_wide_products(
                graphdef, params
            ),
        }
    return [reason for reason, is_given in given.items() if is_given]


def row_kernels_of(options: RuntimeOptions) -> RowKernels | None:
    """Return the kernels that keep the bits of a request on a GPU.

    None without the option, on a CPU, where the platform's choice keeps the bits, and for kernels
    of attention that do not keep them. "triton_interpreted" asks for the GPU's kernels on a CPU,
    for tests.
    """
    if not options.deterministic:
        return None
    if options.attention == "triton_interpreted":
        return "triton_interpreted"
    is_gpu = dispatch.target_platform() == "cuda"
    return "triton" if is_gpu and options.attention in (None, "triton") else None


def _has_wide_products(graphdef: nnx.GraphDef, params: Any) -> bool:
    """Return whether XLA, and no kernel, multiplies with some quantised weights."""
    modules = (module for _, module in nnx.iter_modules(nnx.merge(graphdef, params)))
    return any(
        isinstance(module, QuantisedWeight)
        and (module.is_float or module.rounds_activations != "groups")
        for module in modules
    )
