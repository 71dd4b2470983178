"""Sizes of an executor: the platform's defaults, the engine's configuration, the page cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig, fine_slot_buckets, fine_token_buckets
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.sizes import parse_bytes
from jaxserve.execution.compatibility import row_kernels_of
from jaxserve.execution.memory_plan import PoolSize, plan_host_pages, plan_pool
from jaxserve.memory.page_pool import MIN_PAGES
from jaxserve.models.batch import empty_cache
from jaxserve.models.decoder import LayerLayout
from jaxserve.steps.drafting import Drafter, united
from jaxserve.steps.slots import empty_slots
from jaxserve.steps.step_function import Placement, Shelf, StepFunction
from pallas_kernels.zeros import zeros


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
    model_config: Any, options: RuntimeOptions, *, num_pages: int, num_host_pages: int = 0
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
        num_host_pages=num_host_pages,
        kv_dtype=options.kv_dtype,
        restore="on_admission" if has_states else options.restore or defaults.restore,
        has_encoder=model_config.has_encoder,
        has_slot_state=has_states,
        max_adapters=options.max_adapters,
        pooling=model_config.pooling.kind if model_config.labels is None else "labels",
    )


@final
@dataclass(frozen=True)
class CachePlan:
    """A planner and allocator of the page cache of a model or of one stage."""

    model_config: Any
    options: RuntimeOptions
    layer_layout: LayerLayout
    place: Placement
    drafter: Drafter | None = None

    @property
    def page_bytes(self) -> int:
        """Size of a page in all layers, on one device."""
        return nbytes(self.abstract(2).pages) // 2 // self.place.num_shards

    def plan(self, *, step_bytes: int) -> PoolSize:
        """Return the pool's size if the largest step needs `step_bytes` of temporaries."""
        draft = engine_config(self.model_config, self.options, num_pages=MIN_PAGES)
        kv_memory = self.options.kv_memory
        return plan_pool(
            next(iter(self.place.whole.addressable_devices)),
            page_bytes=self.page_bytes,
            step_bytes=step_bytes,
            state_bytes=nbytes(self.abstract(2).states),
            slot_bytes=nbytes(jax.eval_shape(partial(empty_slots, draft))),
            wanted_pages=1 + draft.max_slots * draft.max_pages_per_sequence,
            min_pages=MIN_PAGES,
            kv_bytes=None if kv_memory is None else parse_bytes(kv_memory),
        )

    def abstract(self, num_pages: int) -> Any:
        return jax.eval_shape(partial(_empty, self._sizes(num_pages)))

    def new(self, num_pages: int, shelf: Shelf) -> Any:
        """Return a cache of zeros on its devices."""
        with self.place.in_force():
            return self.maker(num_pages, shelf)()

    def maker(self, num_pages: int, shelf: Shelf) -> StepFunction:
        """Return the function without arguments that makes the cache."""
        sizes = self._sizes(num_pages)
        make = partial(_empty, sizes, zeros=zeros)
        return shelf.function("empty_cache", make, *sizes, out_shardings=self.place.pages)

    def _sizes(self, num_pages: int) -> tuple[Any, ...]:
        """Return the arguments of `empty_cache`, for each model that has keys and values."""
        models = [(self.model_config, self.layer_layout)]
        if self.drafter is not None:
            models.append((self.drafter.config, self.drafter.layer_layout))
        return tuple(
            (
                config,
                num_pages,
                self.options.page_size,
                self.options.kv_dtype or config.dtype,
                layout,
                self.place.num_shards,
                engine_config(self.model_config, self.options, num_pages=num_pages).max_slots,
            )
            for config, layout in models
        )


def plan_host(model_config: Any, options: RuntimeOptions, page_bytes: int, num_pages: int) -> int:
    """Return the number of host pages for a pool; `page_bytes` counts all devices of this host."""
    wanted = options.host_memory
    if model_config.num_recurrent_layers:
        return 0
    wanted_bytes = None if wanted is None else 0 if wanted == 0 else parse_bytes(wanted)
    return plan_host_pages(page_bytes, num_pages - 1, wanted_bytes)


def _empty(sizes: tuple[tuple[Any, ...], ...], **options: Any) -> Any:
    return reduce(united, [empty_cache(*each, **options) for each in sizes])


def nbytes(tree: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
