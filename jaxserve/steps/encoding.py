"""Steps of encoder-decoder models: prompts through the encoder, and the decoder's rows.

A slot's prompt has `SlotState.encoded` tokens, and padding up to a whole page; the decoder's
positions follow (see `models.encoder_decoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.kernels import Rows
from jaxserve.models.attention import bidirectional_rows, causal_rows, cross_rows
from jaxserve.models.batch import KVCache
from jaxserve.models.encoder_decoder import EncoderBatch
from jaxserve.steps.packing import (
    MixedBatch,
    Params,
    attention_batch,
    positions_and_slots,
    token_pages,
)
from jaxserve.steps.slots import SlotState


def decoder_start(encoded: Int32[Array, " rows"], page_size: int) -> Int32[Array, " rows"]:
    """Return the position at which decoders begin, after prompts of `encoded` tokens."""
    return -(-encoded // page_size) * page_size


def counted_from(
    encoded: Int32[Array, " rows"] | None, page_size: int
) -> Int32[Array, " rows"] | None:
    """Return the first position that penalties count, the decoder's; None to count all."""
    return None if encoded is None else decoder_start(encoded, page_size)


def visible_rows(
    config: EngineConfig,
    encoded: Int32[Array, " rows"] | None,
    *,
    query_start: Int32[Array, " rows"],
    query_length: Int32[Array, " rows"],
    first_position: Int32[Array, " rows"],
    page_table: Int32[Array, "rows row_pages"],
) -> tuple[Rows, Rows | None]:
    """Return the rows of a decoder's self-attention, and those of its cross attention.

    The decoder's own keys begin with a page, so its self-attention is that of a sequence whose page
    table and positions begin there. Without an encoder (`encoded` is None) there is no cross
    attention.
    """
    if encoded is None:
        rows = causal_rows(
            query_start=query_start,
            query_length=query_length,
            first_position=first_position,
            page_table=page_table,
        )
        return rows, None
    start = decoder_start(encoded, config.page_size)
    index = jnp.arange(page_table.shape[1]) + start[:, None] // config.page_size
    index = jnp.minimum(index, page_table.shape[1] - 1)
    own = causal_rows(
        query_start=query_start,
        query_length=query_length,
        first_position=jnp.maximum(first_position - start, 0),
        page_table=jnp.take_along_axis(page_table, index, axis=1),
    )
    cross = cross_rows(
        query_start=query_start,
        query_length=query_length,
        encoded_length=encoded,
        encoded_page_table=page_table,
    )
    return own, cross


def prompts_of(slots: SlotState, batch: MixedBatch) -> EncoderBatch:
    """Return whole prompts from their slots, as a batch of the encoder."""
    positions, slot = positions_and_slots(batch)
    return EncoderBatch(slots.tokens[slot, positions], batch.token_row, positions)


def encode(
    params: Params, batch: EncoderBatch, *, graphdef: nnx.GraphDef
) -> Float[Array, "tokens embed"]:
    return nnx.merge(graphdef, params).encode(batch)


def write_encoded(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    batch: MixedBatch,
    encoded: Float[Array, "tokens embed"],
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> KVCache:
    """Return the cache with the cross-attention keys and values of the encoder's output."""
    positions, slot = positions_and_slots(batch)
    valid = batch.token_row < config.max_slots
    rows = bidirectional_rows(
        query_start=batch.query_start,
        length=batch.query_length,
        page_table=slots.page_table[batch.slot],
    )
    attention = attention_batch(
        config,
        positions=positions,
        pages=token_pages(config, slots.page_table, slot, positions),
        valid=valid & ~slots.done[slot],
        rows=rows,
        plan=None,
    )
    return nnx.merge(graphdef, params).write_encoded(encoded, attention, cache)


def pack_prompts(config: EngineConfig, prompts: Sequence[Sequence[int]]) -> EncoderBatch:
    """Return prompts of at most `max_step_tokens` tokens together as one batch (NumPy arrays)."""
    lengths = [len(prompt) for prompt in prompts]
    size = bucket(max(1, sum(lengths)), config.token_buckets)
    tokens, positions = np.zeros((2, size), np.int32)
    prompt = np.full(size, len(prompts), np.int32)
    used = sum(lengths)
    tokens[:used] = np.concatenate([np.asarray(each, np.int32) for each in prompts])
    positions[:used] = np.concatenate([np.arange(length) for length in lengths])
    prompt[:used] = np.repeat(np.arange(len(prompts)), lengths)
    batch: Any = EncoderBatch(tokens, prompt, positions)  # pyrefly: ignore[bad-argument-type]
    return batch
