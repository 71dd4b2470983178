"""The memory that the warpgroups of the tile kernel share, and its work item."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.planner import Warpgroups

# Rows of a warpgroup's matrix products, and the number of warpgroups that attend.
ROWS = 64
ATTENDING = Warpgroups.NUM

# Columns of an item.
ITEM_COLUMNS = ("row", "token", "count", "position", "begin", "end", "context")


@final
@dataclass(frozen=True)
class Memory:
    """A program's references to the arrays of the call and to shared memory."""

    meta: Any  # int32 [2]: number of items, the layer's first page
    items: Any  # int32 [items, len(ITEM_COLUMNS)]
    page_table: Any  # int32 [rows, pages]
    q: Any  # [tokens, q_heads, head_dim]
    k: Any  # [pages * kv_heads * parts, part_keys, head_dim]
    v: Any
    out: Any  # [tokens, q_heads, head_dim]
    arriving_q: Any  # [ATTENDING, ROWS, head_dim]
    leaving: Any  # [ATTENDING, ROWS, head_dim]
    tiled_q: Any  # [ATTENDING, ROWS, head_dim]
    k_blocks: Any  # [stages, block_keys, head_dim]
    v_blocks: Any
    q_is_full: Any  # barriers: [ATTENDING]
    q_is_free: Any
    k_is_full: Any  # [stages]
    v_is_full: Any
    k_is_free: Any
    v_is_free: Any
    turn: Any
    mended: Any


@final
@dataclass(frozen=True)
class Item:
    """The scalars of a work item, and the KV head that the program computes."""

    kv_head: Any
    row: Any
    token: Any
    count: Any
    position: Any
    begin: Any
    end: Any
    context: Any


def rows_of(part: int, size: int) -> Any:
    """Return the slice of rows of an array's part number `part`."""
    return pl.ds(part * size, size)


def ceil_div(x: jax.Array, y: int) -> jax.Array:
    return lax.div(x + (y - 1), y)
