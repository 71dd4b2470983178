"""JAX's own attention kernels for GPUs, at the shapes of ours, in the same process.

`jax_paged` is `jax.experimental.pallas.ops.gpu.paged_attention`, for decoding only. `cudnn_dense`
is cuDNN's flash attention through `jax.nn.dot_product_attention`, over dense keys and values,
without page table look-ups. `cudnn_paged` is the same over pages, which JAX has in private. Like
ours, each reads different memory at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common.harness import reason
from benchmarks.kernels.timing import Attention

# (attend, q, given, layers) -> seconds of one `attend(q, layer, given)`.
TimeChain = Callable[[Callable[[jax.Array, int, Any], jax.Array], jax.Array, Any, int], float]


def measure(given: Attention, time_chain: TimeChain) -> dict[str, dict[str, Any]]:
    """Return by peer the `seconds` of a call, or the `reason` why there are none."""
    found: dict[str, dict[str, Any]] = {}
    for name, peer in PEERS.items():
        try:
            if jax.default_backend() != "gpu":
                raise NotImplementedError("there is no GPU")
            found[name] = {"seconds": peer(given, time_chain)}
        except Exception as error:
            found[name] = {"reason": reason(error)}
    return found


def _paged_s(given: Attention, time_chain: TimeChain) -> float:
    shape, q, pages, rows = given.shape, given.q, given.pages, given.rows
    if not shape.is_decode:
        raise NotImplementedError("it has no kernel for more than one query a row")
    from jax.experimental.pallas.ops.gpu import paged_attention as peer

    # A layer: [kv_heads, pages, page_size, head_dim].
    layers = [tuple(jnp.swapaxes(x, 0, 1) for x in kv) for kv in zip(*pages.values(), strict=True)]
    table, num_splits = splittable(rows.page_table)

    def attend(q: jax.Array, layer: int, layers: list[tuple[jax.Array, ...]]) -> jax.Array:
        return peer.paged_attention(
            q, *layers[layer], table, rows.context_length, k_splits=num_splits
        )

    # The peer does not scale the logits.
    scaled = q * jnp.asarray(shape.head_dim**-0.5, q.dtype)
    return time_chain(attend, scaled, layers, len(layers))


def splittable(page_table: jax.Array) -> tuple[jax.Array, int]:
    """Return the table, padded to a width that `jax_paged` can split, and the number of parts.

    `jax_paged` takes parts of equal size that are whole compute blocks of 8 pages.
    """
    width = page_table.shape[1]
    num_splits = min(16, 1 << (width.bit_length() - 1))
    part = -(-width // num_splits)
    part = part if part <= 8 else -(-part // 8) * 8
    return jnp.pad(page_table, ((0, 0), (0, num_splits * part - width))), num_splits


def _cudnn_paged_s(given: Attention, time_chain: TimeChain) -> float:
    shape, q, pages, rows = given.shape, given.q, given.pages, given.rows
    batch, context = len(shape.rows), shape.rows[0][1]
    is_whole = batch == 1 and shape.rows[0][0] == context
    if len(set(shape.rows)) > 1 or not (shape.is_decode or is_whole):
        raise NotImplementedError("it serves contexts of one length here, and whole prompts")
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # cuDNN takes the pages of the table alone, without the null page.
    layers = [tuple(x[1:] for x in kv) for kv in zip(*pages.values(), strict=True)]
    table = (rows.page_table - 1)[:, None, :, None]
    mask = cudnn.MaskType.PADDING if shape.is_decode else cudnn.MaskType.PADDING_CAUSAL

    def attend(q: jax.Array, layer: int, layers: list[tuple[jax.Array, ...]]) -> jax.Array:
        keys, values = layers[layer]
        out: Any = cudnn.paged_attention(
            q,
            keys,
            values,
            rows.query_length,
            rows.context_length,
            table,
            table,
            scale=shape.head_dim**-0.5,
            mask_type=mask,
            qkv_layout="BNTH",
        )
        return out[0] if isinstance(out, list | tuple) else out

    # [batch, heads, queries of each, head_dim]
    each = q.reshape(batch, -1, *q.shape[1:]).swapaxes(1, 2)
    return time_chain(attend, each, layers, len(layers))


def _cudnn_s(given: Attention, time_chain: TimeChain) -> float:
    shape, q, pages, rows = given.shape, given.q, given.pages, given.rows
    batch, longest = len(shape.rows), max(context for _, context in shape.rows)
    is_whole = batch == 1 and shape.rows[0][0] == longest
    if not (shape.is_decode or is_whole):
        raise NotImplementedError("dense: it serves decoding, and a single whole prompt")
    size = (batch, longest, shape.num_kv_heads, shape.head_dim)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    # One array a layer: a slice of an array for all layers would be copied at every call.
    layers = [
        tuple(normal(key, size, q.dtype) for key in jax.random.split(jax.random.key(layer)))
        for layer in range(len(pages["k_pages"]))
    ]
    is_ragged = len(set(shape.rows)) > 1
    attend_dense = partial(
        jax.nn.dot_product_attention,
        is_causal=not shape.is_decode,
        key_value_seq_lengths=rows.context_length if is_ragged else None,
        query_seq_lengths=rows.query_length if is_ragged else None,
        implementation="cudnn",
    )

    def attend(q: jax.Array, layer: int, layers: list[tuple[jax.Array, ...]]) -> jax.Array:
        return attend_dense(q, *layers[layer])

    # [batch, queries of each, heads, head_dim]
    return time_chain(attend, q.reshape(batch, -1, *q.shape[1:]), layers, len(layers))


PEERS = {"jax_paged": _paged_s, "cudnn_dense": _cudnn_s, "cudnn_paged": _cudnn_paged_s}
