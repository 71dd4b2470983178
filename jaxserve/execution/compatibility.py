"""Checks that refuse incompatible features before anything is allocated."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.errors import DeviceMemoryError, InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.memory_plan import free_device_bytes
from jaxserve.models.linear import RowKernels, without_row_kernels
from jaxserve.models.quantised import QuantisedWeight
from jaxserve.steps.step_function import Placement
from pallas_kernels import build, dispatch
from sharding import DeviceGroups, StagePlan
from sharding.shards import TENSOR


def check_adapters(
    model_config: Any, options: RuntimeOptions, params: Any, *, has_mesh: bool, is_quantised: bool
) -> None:
    """Raise InvalidConfigError if the options ask for adapters that the model does not support."""
    if not options.max_adapters:
        return
    has_mesh = has_mesh or Placement.like(jax.tree.leaves(params)[0].sharding).mesh is not None
    hindrances = {
        "a mesh, stages or device groups": has_mesh,
        "an encoder-decoder model": model_config.has_encoder,
        "a model with recurrent layers": model_config.num_recurrent_layers > 0,
        "weights in few bits": is_quantised,
    }
    for name, is_given in hindrances.items():
        if is_given:
            raise InvalidConfigError(
                f"max_adapters={options.max_adapters} is not supported for {name}; omit it, or "
                "serve a decoder with dense weights and attention alone on one device "
                "(docs/adapters.md)"
            )


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


def check_slot_states(
    model_config: Any,
    options: RuntimeOptions,
    *,
    mesh: Mesh | None = None,
    stages: StagePlan | None = None,
    num_processes: int = 1,
    num_device_groups: int = 1,
) -> None:
    """Raise InvalidConfigError if options or devices do not fit a model with recurrent layers."""
    if not model_config.num_recurrent_layers:
        return
    shards = 1 if mesh is None else mesh.shape.get(TENSOR, 1)
    places = {
        "stages": stages is not None,
        f"{num_device_groups} device groups": num_device_groups > 1,
        f"{num_processes} processes": num_processes > 1,
        f"a mesh with tensor={shards}": shards > 1,
    }
    for name, is_given in places.items():
        if is_given:
            raise InvalidConfigError(
                f"{name} for a model with recurrent layers: their states are on one device; omit "
                "mesh, or pass one with a data axis alone"
            )
    # Options for host pages, which have no states.
    given = {
        name: getattr(options, name)
        for name in ("host_memory", "disk_memory", "restore")
        if getattr(options, name) not in (None, 0)
    }
    if given:
        raise InvalidConfigError(
            f"{given} for a model with recurrent layers: its sequences continue from states, which "
            "pages of the host do not have; omit these options"
        )
    if model_config.num_attention_layers:
        return
    for name in ("kv_dtype", "kv_memory"):
        if getattr(options, name) is not None:
            raise InvalidConfigError(
                f"{name}={getattr(options, name)!r} for a model without attention, which has no "
                f"keys and values; omit {name}, and pass max_slots to bound its memory"
            )


def check_speculation(model_config: Any, options: RuntimeOptions) -> None:
    """Raise InvalidConfigError if the options ask for speculation that the model cannot do."""
    if options.speculation is not None and model_config.num_recurrent_layers:
        raise InvalidConfigError(
            f"speculation={options.speculation!r} is not supported for a model with recurrent "
            "layers, whose states cannot go back; omit it, or serve a decoder with attention alone"
        )


def _has_stages(mesh: Mesh | StagePlan | DeviceGroups | None) -> bool:
    groups = mesh.both if isinstance(mesh, DeviceGroups) else (mesh,)
    return any(
        isinstance(group, StagePlan) or (group is not None and group.shape.get("stage", 1) > 1)
        for group in groups
    )


def check_function(options: RuntimeOptions, mesh: Mesh | StagePlan | DeviceGroups | None) -> None:
    """Raise InvalidConfigError if a `FunctionDecoder` lacks what the options or the mesh need."""
    needed = {
        f"quantize={options.quantize!r}": options.quantize is not None,
        f"max_adapters={options.max_adapters}": options.max_adapters > 0,
        "probe": options.probe is not None,
        "deterministic=True": options.deterministic,
        "a mesh with stages": _has_stages(mesh),
    }
    for name, is_given in needed.items():
        if is_given:
            raise InvalidConfigError(
                f"{name} needs a model whose layers and products are known, and a FunctionDecoder "
                "has its own; omit it, or write a family (docs/adding_a_model.md)"
            )


def check_quantised(
    options: RuntimeOptions, mesh: Mesh | StagePlan | DeviceGroups | None, dtype: str
) -> None:
    """Raise InvalidConfigError if quantised weights of a model in `dtype` cannot be served."""
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
    if _has_stages(mesh):
        raise InvalidConfigError(
            f"quantize={options.quantize!r} is not supported for a model that is cut into stages; "
            "pass a mesh without stages (tensor, data), or omit quantize"
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
            "dense layers without adapters, with weights in the model's dtype": bool(parts),
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
