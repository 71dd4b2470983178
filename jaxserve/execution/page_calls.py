"""Calls that copy KV pages from a cache and into it, some pages at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec as P

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import KVCache
from jaxserve.scheduling.plan import PageCopies, StepPlan
from pallas_kernels import gather_pages, scatter_pages
from sharding.shards import TENSOR, over_tensor

# A whole cache or one of its buffers.
_Cache = TypeVar("_Cache")

# Pages that one call copies. A call with fewer copies the null page for the rest.
PAGES_A_CALL = 8
# Buffers are split by KV head.
_BUFFERS = P(None, None, TENSOR)


def num_incoming(config: EngineConfig, plan: StepPlan) -> int:
    """Return the number of pages that the mixed step of a plan itself copies from the host.

    0 if one copy call before the step is enough.
    """
    is_one_call = plan.is_decode_loop or len(plan.swaps_in) <= PAGES_A_CALL
    return 0 if is_one_call else min(config.num_incoming_pages, len(plan.swaps_in))


def abstract_pages(cache: KVCache, count: int, **placed: Any) -> Any:
    """Return the shapes of `count` pages in the structure of a cache."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0], count, *leaf.shape[2:]), leaf.dtype, **placed
        ),
        cache,
    )


def by_call(copies: PageCopies) -> Iterator[PageCopies]:
    """Yield the copies of each call."""
    for start in range(0, len(copies), PAGES_A_CALL):
        yield copies[start : start + PAGES_A_CALL]


def gathered(
    cache: _Cache,
    pages: jax.Array,  # int32 [count]
) -> _Cache:
    """Return buffers [layers, count, kv_heads, ...] whose page i is page `pages[i]` of `cache`."""
    return over_tensor(gather_pages, in_specs=(_BUFFERS, P()), out_specs=_BUFFERS)(cache, pages)


def scattered(
    cache: _Cache,
    pages: jax.Array,  # int32 [count]; an id past the end is skipped
    values: _Cache,  # as `gathered` returns
) -> _Cache:
    """Return `cache` with these pages written to it."""
    specs = (_BUFFERS, P(), _BUFFERS)
    return over_tensor(scatter_pages, in_specs=specs, out_specs=_BUFFERS)(cache, pages, values)
