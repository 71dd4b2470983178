"""The body of a mixed step, of a whole model or a stage: rows of any length, prefill and decode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.kernels.paged_attention import Plan
from jaxserve.models.batch import IncomingPages, KVCache
from jaxserve.steps.drafting import DraftInputs, DraftStructure, merged, serving_model
from jaxserve.steps.encoding import visible_rows
from jaxserve.steps.packing import (
    MixedBatch,
    Params,
    attention_batch,
    positions_and_slots,
    tap,
    tapped,
    token_pages,
    where_slots_are,
)
from jaxserve.steps.probing import Probe
from jaxserve.steps.sampling.logprobs import PromptLogprobs, prompt_logprobs
from jaxserve.steps.sampling.processors import Rows
from jaxserve.steps.sampling.sampler import processed_logprobs
from jaxserve.steps.slots import SlotState


def mixed_body(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    batch: MixedBatch,
    attention_plan: Plan | None,
    inputs: Float[Array, "tokens embed"] | None = None,
    incoming: IncomingPages | None = None,
    draft: DraftInputs | None = None,  # of a draft model that follows; None without one
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
    drafting: DraftStructure | None = None,
) -> tuple[
    KVCache,
    Float[Array, "tokens hidden"],
    Float[Array, "slots hidden"],
    Float32[Array, "slots embed"] | None,
]:
    """Compute every row; `inputs` is the output of the previous stage, None for the first one.

    Returns the cache, with `incoming` pages in it; hidden states; those of row ends; and the
    activations that the probe reads there, None without one.
    """
    model = serving_model(graphdef, params, config, drafting, draft)
    batch, live = where_slots_are(batch, slots)
    positions, slot = positions_and_slots(batch)
    is_padding = batch.token_row >= config.max_slots
    valid = ~is_padding & live[jnp.where(is_padding, 0, batch.token_row)]
    rows, cross_rows = visible_rows(
        config,
        None if slots.encoded is None else slots.encoded[batch.slot],
        query_start=batch.query_start,
        query_length=jnp.where(live, batch.query_length, 0),
        first_position=batch.start,
        page_table=slots.page_table[batch.slot],
    )
    attention = attention_batch(
        config,
        positions=positions,
        pages=token_pages(config, slots.page_table, slot, positions),
        valid=valid,
        rows=rows,
        plan=attention_plan,
        cross_rows=cross_rows,
        slot=batch.slot,
        adapter=None if slots.adapter is None else jnp.where(is_padding, -1, slots.adapter[slot]),
    )
    inputs = slots.tokens[slot, positions] if inputs is None else inputs
    ends = batch.query_start + jnp.maximum(batch.query_length, 1) - 1
    hidden, cache, read = tapped(model, inputs, attention, cache, tap(probe, ends), incoming)
    return cache, hidden, hidden[ends], read


def pool_rows(
    hidden: Float[Array, "tokens hidden"],
    batch: MixedBatch,
    num_pooled: Int32[Array, " slots"],  # the last tokens of each row that count
) -> Float32[Array, "slots hidden"]:
    """Return the sum of the hidden states of each row's last tokens."""
    num_rows = num_pooled.shape[0]
    end = jnp.append(batch.query_start + batch.query_length, 0)[batch.token_row]
    num = jnp.append(num_pooled, 0)[batch.token_row]  # none of padding, which is in no row
    counts = jnp.arange(hidden.shape[0]) >= end - num
    counts &= batch.token_row < num_rows
    each = jnp.where(counts[:, None], hidden.astype(jnp.float32), 0.0)
    return jax.ops.segment_sum(each, batch.token_row, num_rows)


def score_labels(
    params: Params,
    row_hidden: Float[Array, "slots hidden"],
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> Float32[Array, "slots labels"]:
    """Return the logits of the model's labels."""
    return merged(graphdef, params, config).label_logits(row_hidden)


def score_prompts(
    params: Params,
    slots: SlotState,
    hidden: Float[Array, "tokens hidden"],
    batch: MixedBatch,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> PromptLogprobs:
    """Return `prompt_logprobs` of each token's successor; processors apply to random slots."""
    model = merged(graphdef, params, config)
    batch, _ = where_slots_are(batch, slots)
    positions, slot = positions_and_slots(batch)
    successors = jnp.minimum(positions + 1, config.max_context - 1)

    def process(
        logits: Float32[Array, "chunk vocab"],
        target: Int32[Array, " chunk"],
        index: Int32[Array, " chunk"],
    ) -> Float32[Array, " chunk"]:
        own = slot[index]
        sampling = jax.tree.map(lambda leaf: leaf[own], slots.sampling)
        text = (slots.tokens, own, positions[index] + 1)
        rows = Rows(*text, sampling.prompt_length)
        return processed_logprobs(logits, target, sampling, rows)

    targets, is_random = slots.tokens[slot, successors], slots.sampling.is_random[slot]
    return prompt_logprobs(model.logits, hidden, targets, is_random, process)
