"""Sizes of an executor: the platform's defaults and the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig, fine_slot_buckets, fine_token_buckets
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.compatibility import row_kernels_of


@final
@dataclass(frozen=True, kw_only=True)
class PlatformDefaults:
    """Values of the options that the user does not give.

    Attributes:
      dtype: dtype of parameters, activations and, without `kv_dtype`, KV. XLA computes bfloat16
        slower than float32 on CPUs.
      has_fine_sizes: whether decode windows come in `fine_slot_buckets`, mixed steps in
        `fine_token_buckets`, and heads of rows with grammars in more sizes. On a CPU an empty row
        costs as much as a full one from about 16 rows on; a GPU is bound by reading the weights.
    """

    dtype: str
    max_slots: int
    max_step_tokens: int
    max_decode_iterations: int
    has_fine_sizes: bool
    restore: str


# Rows of heads with grammars, in addition to the usual sizes of 4 and 32.
_MASKED_HEADS = (8, 16)
_CPU = PlatformDefaults(
    dtype="float32",
    max_slots=32,
    max_step_tokens=256,
    max_decode_iterations=4,
    has_fine_sizes=True,
    restore="prefetch",
)
_GPU = PlatformDefaults(
    dtype="bfloat16",
    max_slots=256,
    max_step_tokens=2048,
    max_decode_iterations=16,
    has_fine_sizes=False,
    restore="prefetch",
)


def platform_defaults() -> PlatformDefaults:
    return _CPU if jax.default_backend() == "cpu" else _GPU


def served_context(model_config: Any, options: RuntimeOptions) -> int:
    """Return the maximum number of tokens of a sequence."""
    wanted = options.max_context or model_config.default_context
    return min(wanted, model_config.max_position_embeddings)


def engine_config(
    model_config: Any,
    options: RuntimeOptions,
    *,
    num_pages: int,
    num_host_pages: int = 0,
    num_snapshots: int = 0,
    num_host_snapshots: int = 0,
    layer_windows: tuple[int | None, ...] = (),
) -> EngineConfig:
    """Return the sizes of executables and of a page pool of `num_pages` pages."""
    defaults = platform_defaults()
    has_states = model_config.num_recurrent_layers > 0
    max_slots = options.max_slots or defaults.max_slots
    max_step_tokens = options.max_step_tokens or max(defaults.max_step_tokens, max_slots)
    row_kernels = row_kernels_of(options)
    return EngineConfig(
        page_size=options.page_size,
        num_pages=num_pages,
        max_slots=max_slots,
        max_context=served_context(model_config, options),
        max_step_tokens=max_step_tokens,
        max_decode_iterations=options.max_decode_iterations or defaults.max_decode_iterations,
        num_proposed=options.num_proposed,
        drafts=options.speculation == "draft",
        token_buckets=fine_token_buckets(max_step_tokens) if defaults.has_fine_sizes else (),
        masked_head_buckets=_MASKED_HEADS if defaults.has_fine_sizes else (),
        slot_buckets=fine_slot_buckets(max_slots) if defaults.has_fine_sizes else (),
        attention=row_kernels or options.attention,
        row_kernels=row_kernels,
        graph_loops=options.graph_loops,
        num_host_pages=num_host_pages,
        kv_dtype=options.kv_dtype,
        restore=options.restore or defaults.restore,
        has_encoder=model_config.has_encoder,
        has_slot_state=has_states,
        num_snapshots=num_snapshots,
        num_host_snapshots=num_host_snapshots,
        layer_windows=layer_windows,
        max_adapters=options.max_adapters,
        pooling=model_config.pooling.kind if model_config.labels is None else "labels",
    )


def nbytes(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
