"""The operands of paged attention: the rows of a batch, and the arguments of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Real

from jaxserve.kernels.paged_attention.planner import Capacity, Plan, Tiling, plan


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of a flat ragged batch. Several rows may share one page table, but no query, because
    a kernel may write the output over the queries.

    A row is a run of queries at consecutive positions of one sequence. The key and value of the
    sequence's token at position p are in page `page_table[p // page_size]` at offset
    `p % page_size`. Unused rows have `query_length == 0`.

    Attributes:
      query_start: index of the row's first query in the flat batch.
      query_length: number of its queries.
      first_position: position of its first query.
      context_length: keys at positions below this exist, including those of this step.
      page_table: entries past the context may be any valid page id.
    """

    query_start: Int[Array, " rows"]
    query_length: Int[Array, " rows"]
    first_position: Int[Array, " rows"]
    context_length: Int[Array, " rows"]
    page_table: Int[Array, "rows row_pages"]

    def plan(
        self, tiling: Tiling, *, num_tokens: int, max_context: int, is_decode: bool = False
    ) -> Plan:
        """Return a plan of these rows, outside of `jax.jit`."""
        sizes = dict(num_tokens=num_tokens, num_rows=len(self.query_length))
        return plan(
            tiling,
            Capacity.of(tiling, **sizes, max_context=max_context, is_decode=is_decode),
            query_length=np.asarray(self.query_length),
            first_position=np.asarray(self.first_position),
            context_length=np.asarray(self.context_length),
        )


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionCall:
    """The checked arguments of `api.paged_attention`, which documents them."""

    q: Float[Array, "tokens q_heads head_dim"]
    k_pages: Real[Array, "layers pages kv_heads page_size head_dim"]
    v_pages: Real[Array, "layers pages kv_heads page_size head_dim"]
    layer: int | Int[Array, ""]
    rows: Rows
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    alibi_slopes: Float[Array, " q_heads"] | None
    distance_bias: Float[Array, "q_heads distances"] | None
    sinks: Float[Array, " q_heads"] | None
    k_scales: Float32[Array, "layers pages kv_heads page_size"] | None
    v_scales: Float32[Array, "layers pages kv_heads page_size"] | None
    max_query_length: int | None
    plan: Plan | None

    @property
    def is_decode(self) -> bool:
        """Whether token i is the only query of row i."""
        return self.max_query_length == 1
