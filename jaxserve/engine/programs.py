"""The executables: pure functions of parameters, cache, slots and a step's few arrays.

Bodies are keyed by token count and heads by request count, so compiled sizes add up instead of
multiplying.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.engine import slots as slot_edits
from jaxserve.engine.placement import Placement
from jaxserve.engine.prompt_logprobs import prompt_logprobs
from jaxserve.engine.sampler import Sampled, SamplingNeeds, sample
from jaxserve.engine.slots import SlotState
from jaxserve.memory.page_pool import NULL_PAGE
from jaxserve.models.batch import AttentionBatch, KVCache
from pallas_kernels import Rows

Params = Any


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedBatch:
    """Rows of a mixed step, the sampling ones first; unused rows have length 0.

    Attributes:
      token_row: int32 [T], row of each token; S for padding.
      slot, start, query_start, query_length: int32 [S].
      num_sampling: int32 scalar.
    """

    token_row: jax.Array
    slot: jax.Array
    start: jax.Array
    query_start: jax.Array
    query_length: jax.Array
    num_sampling: jax.Array


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outputs:
    """What a step delivers, for R rows and N iterations.

    tokens i32 [R, N], num_tokens i32 [R], finite bool [R], logprobs f32 [R, N],
    top_ids i32 and top_logprobs f32 [R, N, MAX_LOGPROBS].
    """

    tokens: jax.Array
    num_tokens: jax.Array
    finite: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@final
class Programs:
    """The jitted functions of one model and one configuration.

    Args:
      graphdef: static part of a decoder: `model(tokens, batch, cache) -> hidden, cache` and
        `model.logits(hidden)`.
      place: where parameters, cache and slots live.
    """

    def __init__(self, graphdef: nnx.GraphDef, config: EngineConfig, place: Placement):
        self.config = config
        self.place = place
        bind = partial(partial, graphdef=graphdef, config=config)
        whole, pages = place.whole, place.pages
        edit = partial(jax.jit, donate_argnums=0, out_shardings=whole)
        self.edit = edit(slot_edits.edit)
        self.move = edit(slot_edits.move)
        self.admit = edit(slot_edits.admit)
        self.copy_pages = jax.jit(_copy_pages, out_shardings=pages)
        self.mixed_body = jax.jit(
            bind(_mixed_body), donate_argnames="cache", out_shardings=(pages, whole, whole)
        )
        self.mixed_head = jax.jit(
            bind(_mixed_head),
            donate_argnames="slots",
            static_argnames="num_rows",
            out_shardings=whole,
        )
        self.decode_loop = jax.jit(
            bind(_decode_loop),
            donate_argnames=("cache", "slots"),
            static_argnames="num_rows",
            out_shardings=(pages, whole, whole),
        )
        self.prompt_logprobs = jax.jit(bind(_prompt_logprobs), out_shardings=whole)

    def largest_step_bytes(self, params: Params, cache: KVCache) -> int:
        """Memory that the largest mixed step and decode loop need beside their arguments.

        Compiles both, as they will be called: with an abstract cache and slots.
        """
        config = self.config

        def placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        slots = placed(jax.eval_shape(lambda: slot_edits.empty_slots(config)), self.place.whole)
        cache = placed(cache, self.place.pages)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        flag = jax.ShapeDtypeStruct((), jnp.bool_)
        row = jax.ShapeDtypeStruct((config.max_slots,), jnp.int32)
        tokens = jax.ShapeDtypeStruct((config.max_step_tokens,), jnp.int32)
        batch = MixedBatch(tokens, row, row, row, row, scalar)  # pyright: ignore[reportArgumentType]
        needs = SamplingNeeds(*(flag for _ in fields(SamplingNeeds)))  # pyright: ignore[reportArgumentType]
        with self.place.in_force():
            lowered = (
                self.mixed_body.lower(params, cache, slots, batch),
                self.decode_loop.lower(
                    params, cache, slots, scalar, scalar, needs, num_rows=config.max_slots
                ),
            )
        return max(_extra_bytes(step.compile().memory_analysis()) for step in lowered)


def _mixed_body(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    batch: MixedBatch,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, jax.Array, jax.Array]:
    """Compute every row. Returns the cache, hidden states [T, E], and those of row ends [S, E]."""
    model = nnx.merge(graphdef, params)
    positions, slot = _positions(batch)
    valid = (batch.token_row < config.max_slots) & ~slots.done[slot]
    live = ~slots.done[batch.slot]
    attention = _attention_batch(
        config,
        positions=positions,
        token_pages=slots.page_table[slot, positions // config.page_size],
        valid=valid,
        rows=Rows(
            query_start=batch.query_start,
            query_length=jnp.where(live, batch.query_length, 0),
            first_position=batch.start,
            context_length=batch.start + batch.query_length,
            page_table=slots.page_table[batch.slot],
        ),
    )
    hidden, cache = model(slots.tokens[slot, positions], attention, cache)
    ends = batch.query_start + jnp.maximum(batch.query_length, 1) - 1
    return cache, hidden, hidden[ends]


def _mixed_head(
    params: Params,
    slots: SlotState,
    row_hidden: jax.Array,  # [S, E]
    slot: jax.Array,  # int32 [S], slot of each row, the sampling rows first
    num_sampling: jax.Array,  # int32 scalar
    needs: SamplingNeeds,
    *,
    num_rows: int,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[SlotState, Outputs]:
    """Sample the next token of the first `num_rows` rows and append it to their slots."""
    model = nnx.merge(graphdef, params)
    index = slot[:num_rows]
    live = (jnp.arange(num_rows) < num_sampling) & ~slots.done[index]
    sampled = sample(
        model.logits(row_hidden[:num_rows]),
        jax.tree.map(lambda leaf: leaf[index], slots.sampling),
        slots.tokens[index],
        slots.length[index],
        needs,
    )
    slots = slot_edits.append(slots, index, live, sampled)
    outputs = _record(_no_outputs(num_rows, 1), jnp.int32(0), live, sampled)
    return slots, outputs


def _decode_loop(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window_start: jax.Array,  # int32 scalar
    num_iterations: jax.Array,  # int32 scalar
    needs: SamplingNeeds,
    *,
    num_rows: int,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, SlotState, Outputs]:
    """Decode the slots of a window up to `num_iterations` times, less when all of them end."""
    model = nnx.merge(graphdef, params)
    window = jax.tree.map(
        lambda leaf: lax.dynamic_slice_in_dim(leaf, window_start, num_rows), slots
    )
    index = jnp.arange(num_rows)

    def goes_on(carry: tuple[jax.Array, KVCache, SlotState, Outputs]) -> jax.Array:
        iteration, _, window, _ = carry
        return (iteration < num_iterations) & ~window.done.all()

    def iterate(
        carry: tuple[jax.Array, KVCache, SlotState, Outputs],
    ) -> tuple[jax.Array, KVCache, SlotState, Outputs]:
        iteration, cache, window, outputs = carry
        live = ~window.done
        positions = window.length - 1
        attention = _attention_batch(
            config,
            positions=positions,
            token_pages=window.page_table[index, positions // config.page_size],
            valid=live,
            rows=Rows(
                query_start=index,
                query_length=live.astype(jnp.int32),
                first_position=positions,
                context_length=jnp.where(live, window.length, 0),
                page_table=window.page_table,
            ),
            max_query_length=1,
        )
        hidden, cache = model(window.tokens[index, positions], attention, cache)
        sampled = sample(model.logits(hidden), window.sampling, window.tokens, window.length, needs)
        window = slot_edits.append(window, index, live, sampled)
        return iteration + 1, cache, window, _record(outputs, iteration, live, sampled)

    start = (jnp.int32(0), cache, window, _no_outputs(num_rows, config.max_decode_iterations))
    _, cache, window, outputs = lax.while_loop(goes_on, iterate, start)
    slots = jax.tree.map(
        lambda leaf, new: lax.dynamic_update_slice_in_dim(leaf, new, window_start, 0),
        slots,
        window,
    )
    return cache, slots, outputs


def _prompt_logprobs(
    params: Params,
    slots: SlotState,
    hidden: jax.Array,  # [T, E]
    batch: MixedBatch,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each token's successor in its slot: log-probability, and the likeliest ones'."""
    model = nnx.merge(graphdef, params)
    positions, slot = _positions(batch)
    successors = jnp.minimum(positions + 1, config.max_context - 1)
    return prompt_logprobs(model.logits, hidden, slots.tokens[slot, successors])


def _copy_pages(
    pages: jax.Array,  # [layers, pages, kv_heads, page_size, head_dim]
    source: jax.Array,  # int32 [new pages]
) -> jax.Array:
    """A buffer of the cache whose page i is page `source[i]` of the old one."""
    return pages.at[:, source].get(mode="promise_in_bounds")


def _extra_bytes(analysis: Any) -> int:
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + max(0, outputs)


def _positions(batch: MixedBatch) -> tuple[jax.Array, jax.Array]:
    """Position and slot of every token, int32 [T]; padding has those of row 0's start."""
    is_padding = batch.token_row >= batch.slot.shape[0]
    row = jnp.where(is_padding, 0, batch.token_row)
    offset = jnp.arange(batch.token_row.shape[0]) - batch.query_start[row]
    return batch.start[row] + jnp.where(is_padding, 0, offset), batch.slot[row]


def _attention_batch(
    config: EngineConfig,
    *,
    positions: jax.Array,
    token_pages: jax.Array,
    valid: jax.Array,
    rows: Rows,
    max_query_length: int | None = None,
) -> AttentionBatch:
    return AttentionBatch(
        positions=positions,
        page=jnp.where(valid, token_pages, NULL_PAGE),
        offset=positions % config.page_size,
        rows=rows,
        max_query_length=max_query_length,
    )


def _no_outputs(num_rows: int, num_iterations: int) -> Outputs:
    shape = (num_rows, num_iterations)
    return Outputs(
        tokens=jnp.zeros(shape, jnp.int32),
        num_tokens=jnp.zeros(num_rows, jnp.int32),
        finite=jnp.ones(num_rows, jnp.bool_),
        logprobs=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros((*shape, MAX_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((*shape, MAX_LOGPROBS), jnp.float32),
    )


def _record(out: Outputs, iteration: jax.Array, live: jax.Array, sampled: Sampled) -> Outputs:
    """Outputs with this iteration's tokens; a slot's tokens are contiguous from the first on."""
    return Outputs(
        tokens=out.tokens.at[:, iteration].set(sampled.token),
        num_tokens=out.num_tokens + (live & sampled.finite),
        finite=out.finite & (sampled.finite | ~live),
        logprobs=out.logprobs.at[:, iteration].set(sampled.logprob),
        top_ids=out.top_ids.at[:, iteration].set(sampled.top_ids),
        top_logprobs=out.top_logprobs.at[:, iteration].set(sampled.top_logprobs),
    )
