"""The rows of a flat batch: the queries of each sequence, and the pages of its keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
from jaxtyping import Array, Int


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The rows of a flat ragged batch. Several rows may share one page table, but no query: a
    kernel may write the output in the place of the queries.

    A row is a run of queries at consecutive positions of one sequence. The key and value of the
    sequence's token at position p are in page `page_table[p // page_size]` at offset
    `p % page_size`. Unused rows have `query_length == 0`.

    Attributes:
      query_start: index of the row's first query in the flat batch.
      query_length: number of its queries.
      first_position: position of its first query.
      context_length: keys at positions below this exist, with those of this step.
      page_table: entries past the context may be any valid page id.
    """

    query_start: Int[Array, " rows"]
    query_length: Int[Array, " rows"]
    first_position: Int[Array, " rows"]
    context_length: Int[Array, " rows"]
    page_table: Int[Array, "rows row_pages"]
