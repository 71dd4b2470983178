"""Which queries of a flat batch belong to which sequence, and where its keys lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Rows of a flat ragged batch; several rows may share one page table.

    A row is a run of queries at consecutive positions of one sequence. Keys and values of the
    sequence's token at position p lie in page `page_table[p // page_size]` at offset
    `p % page_size`. Unused rows have `query_length == 0`.

    Attributes:
      query_start: int32 [rows], the row's first query in the flat batch.
      query_length: int32 [rows], number of its queries.
      first_position: int32 [rows], position of its first query.
      context_length: int32 [rows], keys at positions below this exist (this step's included).
      page_table: int32 [rows, pages]; entries past the context are any valid page id.
    """

    query_start: jax.Array
    query_length: jax.Array
    first_position: jax.Array
    context_length: jax.Array
    page_table: jax.Array
