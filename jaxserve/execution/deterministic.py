"""Refusals of `deterministic=True` where the bits of a request may depend on its batch."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.models.quantised import QuantisedWeight
from jaxserve.models.row_kernels import RowKernels, without_row_kernels
from jaxserve.steps.placement import Placement
from pallas_kernels import build, dispatch
from sharding import StagePlan


def check_deterministic(
    model_config: Any,
    options: RuntimeOptions,
    graphdef: nnx.GraphDef,
    params: Any,
    stages: StagePlan | None = None,
) -> None:
    """Check that no result depends on the batch, if the options ask for it.

    Args:
      graphdef, params: of the whole model.

    Raises:
      InvalidConfigError: naming every reason against it, and what to do.
    """
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
    """Return every reason for which bits of a request may depend on the batch; see above."""
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
    """Return the kernels that keep the bits of a request on a GPU; None without the option.

    None also stands for a CPU, where the platform's choice keeps them, and for kernels of attention
    that do not. "triton_interpreted" asks for the GPU's kernels on a CPU, for tests.
    """
    if not options.deterministic:
        return None
    if options.attention == "triton_interpreted":
        return "triton_interpreted"
    is_gpu = dispatch.target_platform() == "cuda"
    return "triton" if is_gpu and options.attention in (None, "triton") else None


def _has_wide_products(graphdef: nnx.GraphDef, params: Any) -> bool:
    """Return whether XLA multiplies with some of the weights in few bits."""
    modules = (module for _, module in nnx.iter_modules(nnx.merge(graphdef, params)))
    return any(
        isinstance(module, QuantisedWeight)
        and (module.is_float or module.rounds_activations != "groups")
        for module in modules
    )
