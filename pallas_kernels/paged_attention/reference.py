"""The reference of paged attention, dense and slow; all implementations must agree with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.paged_attention.operands import AttentionCall


def paged_attention(call: AttentionCall) -> Float[Array, "tokens q_heads head_dim"]:
    """Implement `api.paged_attention` in NumPy float64, query by query; it cannot be traced."""
    if isinstance(call.q, jax.core.Tracer):
        raise NotImplementedError("the reference runs outside jit only; use implementation='xla'")
    layer, rows = call.layer, call.rows
    queries, keys, values = (
        np.asarray(x, np.float64) for x in (call.q, call.k_pages[layer], call.v_pages[layer])
    )
    if call.k_scales is not None and call.v_scales is not None:
        keys *= np.asarray(call.k_scales, np.float64)[layer][..., None]
        values *= np.asarray(call.v_scales, np.float64)[layer][..., None]
    tables = np.asarray(rows.page_table)
    starts, lengths, positions, contexts = (
        np.asarray(each).tolist()
        for each in (rows.query_start, rows.query_length, rows.first_position, rows.context_length)
    )
    slopes = None if call.alibi_slopes is None else np.asarray(call.alibi_slopes, np.float64)
    biases = None if call.distance_bias is None else np.asarray(call.distance_bias, np.float64)
    sinks = None if call.sinks is None else np.asarray(call.sinks, np.float64)
    window, soft_cap = call.sliding_window, call.soft_cap
    page_size = keys.shape[2]
    group = queries.shape[1] // keys.shape[1]
    out = np.zeros(queries.shape)
    for row in range(tables.shape[0]):
        for i in range(lengths[row]):
            token = starts[row] + i
            position = positions[row] + i
            first = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(first, min(position + 1, contexts[row]))
            if not seen.size:
                continue
            page, offset = tables[row, seen // page_size], seen % page_size
            for head in range(queries.shape[1]):
                # [seen, head_dim]
                k = keys[page, head // group, offset]
                v = values[page, head // group, offset]
                logits = k @ queries[token, head] * call.scale
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                if slopes is not None:
                    logits = logits + slopes[head] * (seen - position)
                if biases is not None:
                    bias = biases[head]
                    logits = logits + bias[np.minimum(position - seen, bias.size - 1)]
                most = logits.max() if sinks is None else max(logits.max(), sinks[head])
                weights = np.exp(logits - most)
                total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - most))
                out[token, head] = (weights / total) @ v
    return jnp.asarray(out, call.q.dtype)
