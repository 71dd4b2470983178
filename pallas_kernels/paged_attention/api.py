"""The public signature of paged attention, and which implementation serves it."""

from __future__ import annotations

from typing import Literal

import jax

from pallas_kernels.paged_attention.rows import Rows

Implementation = Literal["reference", "xla"]


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    layer: int | jax.Array,
    rows: Rows,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: jax.Array | None = None,
    max_query_length: int | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal grouped-query attention of a flat ragged batch over paged keys and values.

    A query at position p sees the keys at positions <= p of its sequence, whatever row they came
    from; with a sliding window w, only those at positions > p - w. Softmax in float32.

    Args:
      q: [tokens, q_heads, head_dim]; query head h reads KV head h // (q_heads // kv_heads).
      k_pages, v_pages: [layers, pages, kv_heads, page_size, head_dim].
      layer: which layer of the cache; may be traced.
      rows: see `Rows`. Tokens that belong to no row have undefined (finite) output.
      scale: of the logits; 1 / sqrt(head_dim) by default.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap).
      alibi_slopes: float32 [q_heads]; adds slope * (key position - query position).
      max_query_length: static bound on `rows.query_length`. 1 promises a decode batch: token i
        is the only query of row i.
      implementation: overrides the platform's choice.

    Returns:
      [tokens, q_heads, head_dim] in q's dtype.

    Raises:
      NotImplementedError: the implementation asked for cannot serve this case; says why.
    """
    raise NotImplementedError
