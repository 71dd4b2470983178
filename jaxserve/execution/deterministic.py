"""Refusals of `deterministic=True` where the bits of a request may depend on its batch."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.models.quantised import QuantisedWeight
from jaxserve.steps.placement import Placement
from pallas_kernels import build
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
    if platform != "cpu":
        return [
            f"on platform {platform!r}, whose products add up as the batch's size says: use a CPU"
        ]
    place = Placement.like(sharding)
    shards = [place.num_shards] if stages is None else [each.num_shards for each in stages.stages]
    dtype, heads = model_config.dtype, model_config.head_dim
    given = {
        "without a C++ compiler: install g++ or clang++": not build.has_compiler(),
        f"in {dtype}: pass dtype='float32'": dtype != "float32",
        f"with tensor={max(shards)}: pass a mesh without a tensor axis": max(shards) > 1,
        f"with head_dim={heads}: serve a model with a multiple of 8": heads % 8 != 0,
        f"with attention={options.attention!r}: omit it": options.attention not in (None, "cpu"),
        "for recurrent layers, which compute prompts in pieces: serve a model without": (
            model_config.num_recurrent_layers > 0
        ),
        "for an encoder, which takes several prompts together: serve a decoder": (
            model_config.has_encoder
        ),
        "with weights in float8: pass quantize='int8' or 'int4'": _has_wide_products(
            graphdef, params
        ),
    }
    return [reason for reason, is_given in given.items() if is_given]


def _has_wide_products(graphdef: nnx.GraphDef, params: Any) -> bool:
    """Return whether XLA multiplies with some of the weights in few bits."""
    modules = (module for _, module in nnx.iter_modules(nnx.merge(graphdef, params)))
    return any(
        isinstance(module, QuantisedWeight)
        and (module.is_float or module.rounds_activations != "groups")
        for module in modules
    )
