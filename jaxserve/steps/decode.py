"""Decoding on the device: a loop over a whole model.

A loop may speculate: an iteration computes the newest token of each row and some proposals for the
tokens after it (`steps.proposals`), and chooses the next token after each of them. While a choice
equals the proposal, the choice after it counts as well. So greedy and drawn tokens are those of a
loop that does not speculate. Before each iteration the device decides whether proposals pay.
Recurrent layers advance by the tokens that count once these are chosen (`Decoder.with_states`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from jaxserve.core.config import EngineConfig
from jaxserve.kernels.dispatch import only_rows
from jaxserve.kernels.paged_attention import Plan
from jaxserve.models.batch import AttentionBatch, KVCache
from jaxserve.scheduling.plan import ProposalCount
from jaxserve.steps import proposals
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.drafting import DraftInputs, DraftStructure, FollowedModel, serving_model
from jaxserve.steps.encoding import counted_from, visible_rows
from jaxserve.steps.outputs import Outputs, count, no_outputs, record, with_reading
from jaxserve.steps.packing import DecodeWindow, Params, attention_batch, tap, tapped, token_pages
from jaxserve.steps.probing import Probe
from jaxserve.steps.proposals import Answers, Draft, Lookup
from jaxserve.steps.sampling.sampler import SlotSampling, Variant, sample
from jaxserve.steps.slots import SlotState


class IterationTokens(NamedTuple):
    """The tokens of an iteration, row after row: the newest one, then its proposals."""

    # row, place: of each token; `place` counts from the row's newest token.
    row: Int32[Array, " tokens"]
    place: Int32[Array, " tokens"]
    valid: Bool[Array, " tokens"]  # False for padding
    # start, length: where the tokens of each row are; length 0 for an inert row.
    start: Int32[Array, " rows"]
    length: Int32[Array, " rows"]


def block_of(
    live: Bool[Array, " rows"], proposed: Int32[Array, " rows"] | None, num_proposed: int
) -> IterationTokens:
    """Return the tokens of the live rows, and at most `num_proposed` proposals in all."""
    num_rows = live.shape[0]
    length = live.astype(jnp.int32)
    if proposed is None:
        row = jnp.arange(num_rows)
        return IterationTokens(row, jnp.zeros(num_rows, jnp.int32), live, row, length)
    length += proposed
    end = jnp.cumsum(length)
    index = jnp.arange(num_rows + num_proposed)
    row = jnp.minimum(jnp.searchsorted(end, index, side="right"), num_rows - 1)
    start = end - length
    valid = index < end[-1]
    return IterationTokens(row, jnp.where(valid, index - start[row], 0), valid, start, length)


class WindowRows(NamedTuple):
    """What an iteration reads of a window's slots and does not change."""

    window: DecodeWindow
    page_table: Int32[Array, "rows row_pages"]
    sampling: SlotSampling
    encoded: Int32[Array, " rows"] | None
    adapter: Int32[Array, " rows"] | None

    @property
    def slot(self) -> Int32[Array, " rows"]:
        return self.window.start + jnp.arange(self.window.most.shape[0])

    def part(self, leaf: Shaped[Array, " slots *entry"]) -> Shaped[Array, " rows *entry"]:
        """Return the window's part of an array of all slots."""
        return lax.dynamic_slice_in_dim(leaf, self.window.start, self.window.most.shape[0])

    def live(self, done: Bool[Array, " slots"]) -> Bool[Array, " rows"]:
        return (self.window.most > 0) & ~self.part(done)


def rows_of(slots: SlotState, window: DecodeWindow) -> WindowRows:
    start, size = window.start, window.most.shape[0]
    read = slots.page_table, slots.sampling, slots.encoded, slots.adapter
    return WindowRows(
        window, *jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, size), read)
    )


def attention_of(
    slots: SlotState,
    window: WindowRows,
    block: IterationTokens,
    inputs: Float[Array, "tokens embed"] | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    proposed: Int32[Array, "rows num"] | None,
) -> tuple[Int32[Array, " tokens"] | Float[Array, "tokens embed"], AttentionBatch]:
    """Return a model's inputs for a block and its `proposed` tokens, and the attention batch."""
    newest = window.part(slots.length) - 1
    positions = jnp.minimum(newest[block.row] + block.place, config.max_context - 1)
    rows, cross_rows = visible_rows(
        config,
        window.encoded,
        query_start=block.start,
        query_length=block.length,
        first_position=jnp.where(block.length > 0, newest, 0),
        page_table=window.page_table,
    )
    attention = attention_batch(
        config,
        positions=positions,
        pages=token_pages(config, window.page_table, block.row, positions),
        valid=block.valid,
        rows=rows,
        plan=attention_plan,
        max_query_length=1 if proposed is None else 1 + proposed.shape[1],
        cross_rows=cross_rows,
        slot=window.slot,
        adapter=None if window.adapter is None else window.adapter[block.row],
        is_proposed=proposed is not None,
    )
    if inputs is None:
        inputs = slots.tokens[window.slot, newest][block.row]
        if proposed is not None:
            others = proposed[block.row, jnp.maximum(block.place - 1, 0)]
            inputs = jnp.where(block.place > 0, others, inputs)
    return inputs, attention


class LoopChoice(NamedTuple):
    """The tokens that an iteration has chosen so far."""

    place: Int32[Array, ""]  # counts from the newest token of each row
    slots: SlotState
    outputs: Outputs
    goes_on: Bool[Array, " rows"]  # rows in which the token at this place counts
    # hits, misses: proposals that equal the chosen token, and those that do not.
    hits: Int32[Array, " rows"]
    misses: Int32[Array, " rows"]


def room(
    rows: WindowRows, done: Bool[Array, " slots"], num_tokens: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Return how many tokens each row may still get after `num_tokens`; 0 if it takes no part."""
    return jnp.where(rows.live(done), jnp.maximum(rows.window.most - num_tokens, 0), 0)


def choose(
    logits: Float32[Array, "tokens vocab"],
    rows: WindowRows,
    block: IterationTokens,
    before: SlotState,  # the slots before the iteration
    outputs: Outputs,
    live: Bool[Array, " rows"],
    draft: Draft | None,  # the proposals; None in a loop that does not speculate
    proposed: Int32[Array, " rows"] | None,
    *,
    looks_up: bool,  # whether to also compare the token with a proposal that was not computed
    variant: Variant,
    config: EngineConfig,
) -> LoopChoice:
    """Choose the next token of each live row, and one after each right proposal of the block."""
    num_rows = live.shape[0]
    nothing = jnp.zeros(num_rows, jnp.int32)
    computed = compared = nothing if proposed is None else proposed
    if draft is not None and looks_up:
        compared = jnp.maximum(computed, jnp.minimum(draft.available, 1))

    def choose_one(state: LoopChoice) -> LoopChoice:
        place, now, outputs = state.place, state.slots, state.outputs
        at = jnp.minimum(block.start + place, logits.shape[0] - 1)
        sampled = sample(
            logits if proposed is None else logits[at],
            rows.sampling,
            now.tokens,
            rows.part(now.length),
            slot=rows.slot,
            variant=variant,
            first=counted_from(rows.encoded, config.page_size),
        )
        now = slot_edits.append(now, rows.slot, state.goes_on, sampled.token, sampled.finite)
        outputs = record(outputs, state.goes_on, sampled)
        if draft is None:
            return LoopChoice(place, now, outputs, live, state.hits, state.misses)
        tried = state.goes_on & (place < compared)
        hits = tried & (sampled.token == draft.tokens[:, place])
        accepted = hits & (place < computed)
        if proposed is not None:
            outputs = count(outputs, len(ProposalCount) + place, accepted)
        return LoopChoice(
            place + 1,
            now,
            outputs,
            accepted & rows.live(now.done),
            state.hits + hits.astype(jnp.int32),
            state.misses + (tried & ~hits).astype(jnp.int32),
        )

    first = LoopChoice(jnp.int32(0), before, outputs, live, nothing, nothing)
    if proposed is None:
        return choose_one(first)
    return lax.while_loop(lambda state: state.goes_on.any(), choose_one, first)


def with_rates(
    choice: LoopChoice,
    rows: WindowRows,
    live: Bool[Array, " rows"],
    draft: Draft,
    proposed: Int32[Array, " rows"] | None,
    *,
    forgives: bool = False,
) -> tuple[SlotState, Outputs]:
    """Return the slots with new rates of proposals, and the outputs with their counts.

    `forgives` is set if no proposal was compared, so that rates approach those of an unknown draft
    model (`proposals.forgive`).
    """
    now, outputs = choice.slots, choice.outputs
    assert now.lookup is not None and now.answers is not None, "slots without lookup"
    outputs = count(outputs, ProposalCount.ITERATIONS, live)
    if proposed is not None:
        outputs = count(outputs, ProposalCount.WIDE, live)
        outputs = count(outputs, ProposalCount.DRAFTS, proposed > 0)
        outputs = count(outputs, ProposalCount.PROPOSED, proposed)
    rates, total = proposals.learn(
        now.lookup.rates, now.answers.rates, rows.slot, draft.source, choice.hits, choice.misses
    )
    if forgives:
        rates = proposals.forgive(rates, rows.slot)
    lookup, answers = replace(now.lookup, rates=rates), replace(now.answers, rates=total)
    return replace(now, lookup=lookup, answers=answers), outputs


def looked_up(
    slots: SlotState, rows: WindowRows, left: Int32[Array, " rows"], num_proposed: int
) -> Draft:
    """Return the proposals for a window's slots, at most `num_proposed` of all rows together."""
    assert slots.lookup is not None and slots.answers is not None, "slots without lookup"
    return proposals.propose(
        slots.lookup,
        slots.answers,
        slots.tokens,
        rows.slot,
        rows.part(slots.length),
        left,
        rows.window.verify_cost,
        num_proposed,
    )


def decode_loop(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window: DecodeWindow,
    attention_plans: tuple[Plan | None, ...],
    probe_params: Params,
    draft_inputs: DraftInputs | None = None,  # of a draft model that follows; None without one
    *,
    variant: Variant,
    num_proposed: int = 0,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
    drafting: DraftStructure | None = None,
) -> tuple[KVCache, SlotState, Outputs]:
    """Decode the slots of a window until its iterations are over or all slots have ended.

    Args:
      attention_plans: of an iteration without proposals and, if `num_proposed`, of one with them.
      num_proposed: tokens that an iteration may compute speculatively, of all rows together;
        static. Each iteration computes this number, or none.
    """
    model = serving_model(graphdef, params, config, drafting, draft_inputs)
    num_rows = window.most.shape[0]
    rows = rows_of(slots, window)

    def propose(slots: SlotState, outputs: Outputs) -> Draft | None:
        if not num_proposed:
            return None
        left = room(rows, slots.done, outputs.num_tokens)
        if drafting is None:
            return looked_up(slots, rows, left, num_proposed)
        assert slots.lookup is not None, "slots without rates"
        rates = slots.lookup.rates
        return proposals.expect(rates, rows.slot, left, window.verify_cost, num_proposed)

    def goes_on(carry: _Carry) -> Bool[Array, ""]:
        is_left = carry.iteration < window.num_iterations
        return is_left & (room(rows, carry.done, carry.outputs.num_tokens) > 0).any()

    def iterate(carry: _Carry, *, is_wide: bool) -> _Carry:
        before = carry.slots(slots)
        draft = carry.draft
        live = room(rows, before.done, carry.outputs.num_tokens) > 0
        proposed = jnp.where(live, draft.num, 0) if is_wide and draft is not None else None
        cache = carry.cache
        if drafting is not None and proposed is not None and draft is not None:
            before, drafted, cache = _drafted(
                model, before, rows, proposed, cache, config, variant, draft.tokens.shape[1]
            )
            draft = replace(draft, tokens=drafted)
        block = block_of(live, proposed, num_proposed)
        tokens = None if proposed is None or draft is None else draft.tokens
        inputs, batch = attention_of(
            before, rows, block, None, attention_plans[is_wide], config, tokens
        )
        where = tap(probe, jnp.arange(block.row.shape[0]))
        hidden, cache, read = tapped(model, inputs, batch, cache, where)
        with only_rows(block.valid):
            logits = model.logits(hidden)
        choice = choose(
            logits,
            rows,
            block,
            before,
            carry.outputs,
            live,
            draft,
            proposed,
            looks_up=drafting is None,
            variant=variant,
            config=config,
        )
        now, outputs = choice.slots, choice.outputs
        num_new = rows.part(now.length) - rows.part(before.length)
        if read is not None and proposed is not None:
            read = read[block.start + jnp.maximum(num_new, 1) - 1]
        if config.has_slot_state and proposed is not None:
            # The newest token and the accepted ones, whose number is that of the chosen ones.
            counted = replace(batch.rows, query_length=num_new)
            cache = model.with_states(replace(batch, rows=counted), cache)
        if draft is not None:
            forgives = drafting is not None and proposed is None
            now, outputs = with_rates(choice, rows, live, draft, proposed, forgives=forgives)
        return _Carry(
            carry.iteration + 1,
            cache,
            now.tokens,
            now.length,
            now.done,
            now.lookup,
            now.answers,
            outputs,
            read,
            propose(now, outputs),
        )

    def is_worth(carry: _Carry) -> Bool[Array, ""]:
        return jnp.bool_(False) if carry.draft is None else carry.draft.is_worth

    def stays(carry: _Carry, *, is_wide: bool) -> Bool[Array, ""]:
        return goes_on(carry) & (is_worth(carry) == is_wide)

    def go_through(carry: _Carry) -> _Carry:
        """Iterate without proposals until they are expected to pay, and then with them."""
        for is_wide in (False, True):
            way = partial(stays, is_wide=is_wide), partial(iterate, is_wide=is_wide)
            carry = lax.while_loop(*way, carry)
        return carry

    nothing = no_outputs(
        num_rows,
        config.max_decode_iterations * (1 + num_proposed),
        variant,
        num_proposed=num_proposed,
    )
    unread = None if probe is None else jnp.zeros((num_rows, probe.width))
    start = _Carry(
        jnp.int32(0),
        cache,
        slots.tokens,
        slots.length,
        slots.done,
        slots.lookup,
        slots.answers,
        nothing,
        unread,
        propose(slots, nothing),
    )
    # Nested loops, because the branches of a conditional would get copies of the cache.
    body = go_through if num_proposed else partial(iterate, is_wide=False)
    end = lax.while_loop(goes_on, body, start)
    return end.cache, end.slots(slots), with_reading(end.outputs, end.tapped, probe, probe_params)


class _Carry(NamedTuple):
    """The values that one iteration of a decode loop passes to the next.

    Tokens are those of all slots, appended in place; the window's own would be a copy as wide as
    the context.
    """

    iteration: Int32[Array, ""]
    cache: KVCache
    tokens: Int32[Array, "slots max_context"]
    length: Int32[Array, " slots"]
    done: Bool[Array, " slots"]
    lookup: Lookup | None
    answers: Answers | None
    outputs: Outputs
    tapped: Float32[Array, "rows embed"] | None
    draft: Draft | None

    def slots(self, before: SlotState) -> SlotState:
        """Return the current slots, given the slots before the loop."""
        return replace(
            before,
            tokens=self.tokens,
            length=self.length,
            done=self.done,
            lookup=self.lookup,
            answers=self.answers,
        )


def _drafted(
    model: FollowedModel,
    slots: SlotState,
    window: WindowRows,
    num: Int32[Array, " rows"],
    cache: KVCache,
    config: EngineConfig,
    variant: Variant,
    most: int,
) -> tuple[SlotState, Int32[Array, "rows most"], KVCache]:
    """Draft `num` tokens of each row (`most` at most) with the draft model, one by one.

    It chooses as the served model does, with the same random numbers, so that its proposals are
    often right where the two models agree. Returns slots with the drafts appended, the drafts, and
    the cache.
    """
    num_slots, row = slots.done.shape[0], jnp.arange(num.shape[0])
    length = window.part(slots.length)

    def step(
        place: int, state: tuple[Int32[Array, "slots max_context"], KVCache, Any]
    ) -> tuple[Int32[Array, "slots max_context"], KVCache, Any]:
        tokens, cache, drafted = state
        live = place < num
        now = replace(slots, tokens=tokens, length=slots.length + place)
        block = IterationTokens(row, jnp.zeros_like(row), live, row, live.astype(jnp.int32))
        inputs, attention = attention_of(now, window, block, None, None, config, None)
        logits, cache = model.draft_logits(inputs, attention, cache)
        sampled = sample(
            logits, window.sampling, tokens, length + place, slot=window.slot, variant=variant
        )
        slot = jnp.where(live, window.slot, num_slots)
        tokens = tokens.at[slot, length + place].set(sampled.token, mode="drop")
        return tokens, cache, drafted.at[:, place].set(sampled.token)

    drafted = jnp.zeros((num.shape[0], most), jnp.int32)
    tokens, cache, drafted = lax.fori_loop(0, most, step, (slots.tokens, cache, drafted))
    return replace(slots, tokens=tokens), drafted, cache
