"""Decoding on the device: a loop over a whole model, or one iteration of a stage.

A loop may speculate: an iteration computes the newest token of each row and some that are proposed
to follow it (`steps.proposals`), and chooses the next token behind each of them. As long as that is
the one proposed, the choice behind it counts as well. So the tokens are those of a loop that does
not speculate, drawn ones too. Before each iteration the device decides whether that pays.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import KVCache
from jaxserve.models.decoder import Tap
from jaxserve.scheduling.plan import ProposalCount
from jaxserve.steps import proposals
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import DecodeWindow, Params, tap, tapped
from jaxserve.steps.decode_blocks import Block, WindowRows, attention_of, block_of, rows_of
from jaxserve.steps.drafting import DraftInputs, DraftStructure, FollowedModel, serving_model
from jaxserve.steps.encoding import counted_from
from jaxserve.steps.outputs import Outputs, count, no_outputs, record, with_reading
from jaxserve.steps.probing import Probe
from jaxserve.steps.proposals import Answers, Draft, Lookup
from jaxserve.steps.sampling.sampler import sample
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState
from pallas_kernels.paged_attention import Plan


def decode_loop(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window: DecodeWindow,
    attention_plans: tuple[Plan | None, ...],
    probe_params: Params,
    draft_inputs: DraftInputs | None = None,
    *,
    variant: Variant,
    num_proposed: int = 0,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
    probe: Probe | None,
    drafting: DraftStructure | None = None,
) -> tuple[KVCache, SlotState, Outputs]:
    """Decode the slots of a window until its iterations are over or all have ended.

    Args:
      attention_plans: of an iteration without proposals and, if `num_proposed`, of one with them.
      draft_inputs: of a draft model that follows; None without one.
      num_proposed: tokens that an iteration may compute speculatively, of all rows together;
        static. Each iteration computes as many, or none.
    """
    model = serving_model(graphdef, params, drafting, draft_inputs)
    most = window.most
    num_rows = most.shape[0]
    rows = rows_of(slots, window)

    def room(done: Bool[Array, " slots"], outputs: Outputs) -> Int32[Array, " rows"]:
        return jnp.where(rows.live(done), jnp.maximum(most - outputs.num_tokens, 0), 0)

    def propose(slots: SlotState, outputs: Outputs) -> Draft | None:
        if not num_proposed:
            return None
        assert slots.lookup is not None and slots.answers is not None, "slots without lookup"
        if drafting is not None:
            left = room(slots.done, outputs)
            return proposals.expect(
                *(slots.lookup.rates, rows.index, left, window.verify_cost), num_proposed
            )
        return proposals.propose(
            *(slots.lookup, slots.answers, slots.tokens, rows.index, rows.part(slots.length)),
            *(room(slots.done, outputs), window.verify_cost, num_proposed),
        )

    def goes_on(carry: _Carry) -> Bool[Array, ""]:
        is_left = carry.iteration < window.num_iterations
        return is_left & (room(carry.done, carry.outputs) > 0).any()

    def iterate(carry: _Carry, *, is_wide: bool) -> _Carry:
        before = carry.slots(slots)
        draft = carry.draft
        live = room(before.done, carry.outputs) > 0
        proposed = jnp.where(live, draft.num, 0) if is_wide and draft is not None else None
        cache = carry.cache
        if drafting is not None and proposed is not None and draft is not None:
            before, drafted, cache = _drafted(
                *(model, before, rows, proposed, cache, config, variant, draft.tokens.shape[1])
            )
            draft = replace(draft, tokens=drafted)
        block = block_of(live, proposed, num_proposed)
        hidden, cache, read = _decode_once(
            *(model, before, rows, block, cache, None, attention_plans[is_wide], config),
            tap(probe, jnp.arange(block.row.shape[0])),
            None if proposed is None else draft,
        )
        logits = model.logits(hidden)
        if draft is not None:
            computed = jnp.zeros(num_rows, jnp.int32) if proposed is None else proposed
            compared = computed
            if drafting is None:  # one that was looked up can be compared without computing it
                compared = jnp.maximum(computed, jnp.minimum(draft.available, 1))

        def choose(state: _Choice) -> _Choice:
            place, now, outputs = state.place, state.slots, state.outputs
            at = jnp.minimum(block.start + place, logits.shape[0] - 1)
            sampled = sample(
                *(logits if proposed is None else logits[at], rows.sampling, now.tokens),
                rows.part(now.length),
                slot=rows.index,
                variant=variant,
                first=counted_from(rows.encoded, config.page_size),
            )
            now = slot_edits.append(now, rows.index, state.goes_on, sampled.token, sampled.finite)
            outputs = record(outputs, state.goes_on, sampled)
            if draft is None:
                return _Choice(place, now, outputs, live, state.hits, state.misses)
            tried = state.goes_on & (place < compared)
            hits = tried & (sampled.token == draft.tokens[:, place])
            accepted = hits & (place < computed)
            if proposed is not None:
                outputs = count(outputs, len(ProposalCount) + place, accepted)
            return _Choice(
                *(place + 1, now, outputs, accepted & rows.live(now.done)),
                state.hits + hits.astype(jnp.int32),
                state.misses + (tried & ~hits).astype(jnp.int32),
            )

        nothing = jnp.zeros(num_rows, jnp.int32)
        chosen = _Choice(jnp.int32(0), before, carry.outputs, live, nothing, nothing)
        if proposed is None:
            chosen = choose(chosen)
        else:
            chosen = lax.while_loop(lambda state: state.goes_on.any(), choose, chosen)
            if read is not None:
                num_new = rows.part(chosen.slots.length) - rows.part(before.length)
                read = read[block.start + jnp.maximum(num_new, 1) - 1]
        now, outputs = chosen.slots, chosen.outputs
        if draft is not None and now.lookup is not None and now.answers is not None:
            outputs = count(outputs, ProposalCount.ITERATIONS, live)
            if proposed is not None:
                outputs = count(outputs, ProposalCount.WIDE, live)
                outputs = count(outputs, ProposalCount.DRAFTS, proposed > 0)
                outputs = count(outputs, ProposalCount.PROPOSED, proposed)
            rates, total = proposals.learn(
                *(now.lookup.rates, now.answers.rates, rows.index, draft.source),
                *(chosen.hits, chosen.misses),
            )
            if drafting is not None and proposed is None:
                rates = proposals.forgive(rates, rows.index)
            now = replace(
                now,
                lookup=replace(now.lookup, rates=rates),
                answers=replace(now.answers, rates=total),
            )
        return _Carry(
            *(carry.iteration + 1, cache, now.tokens, now.length, now.done, now.lookup),
            *(now.answers, outputs, read, propose(now, outputs)),
        )

    def is_worth(carry: _Carry) -> Bool[Array, ""]:
        return jnp.bool_(False) if carry.draft is None else carry.draft.is_worth

    def stays(carry: _Carry, *, is_wide: bool) -> Bool[Array, ""]:
        return goes_on(carry) & (is_worth(carry) == is_wide)

    def go_through(carry: _Carry) -> _Carry:
        """Iterate without proposals until computing some is worth it, and then with them."""
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
        *(jnp.int32(0), cache, slots.tokens, slots.length, slots.done, slots.lookup),
        *(slots.answers, nothing, unread, propose(slots, nothing)),
    )
    # Loops within a loop, since the branches of a conditional would get copies of the cache.
    body = go_through if num_proposed else partial(iterate, is_wide=False)
    end = lax.while_loop(goes_on, body, start)
    return end.cache, end.slots(slots), with_reading(end.outputs, end.tapped, probe, probe_params)


class _Carry(NamedTuple):
    """What goes from one iteration of a decode loop to the next.

    Tokens are those of all slots, to which an iteration appends in place; a window's own would be a
    copy as wide as the context.
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
        """Return the slots as they are now, given how they were before the loop."""
        return replace(
            before,
            tokens=self.tokens,
            length=self.length,
            done=self.done,
            lookup=self.lookup,
            answers=self.answers,
        )


class _Choice(NamedTuple):
    """The tokens of an iteration, as far as they have been chosen.

    Attributes:
      place: behind the newest token of each row.
      goes_on: rows in which the token at this place counts.
      hits, misses: proposals that were the token chosen, and those that were not.
    """

    place: Int32[Array, ""]
    slots: SlotState
    outputs: Outputs
    goes_on: Bool[Array, " rows"]
    hits: Int32[Array, " rows"]
    misses: Int32[Array, " rows"]


def stage_decode(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window: DecodeWindow,
    attention_plan: Plan | None,
    inputs: Float[Array, "rows embed"] | None,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, Float[Array, "rows hidden"]]:
    """Compute a stage's part of one decode iteration.

    Args:
      inputs: what the stage before this one returned; None for the first stage.

    Returns:
      The cache, and the residual stream; of the last stage, hidden states.
    """
    model = nnx.merge(graphdef, params)
    rows = rows_of(slots, window)
    block = block_of(rows.live(slots.done), None, 0)
    hidden, cache, _ = _decode_once(
        model, slots, rows, block, cache, inputs, attention_plan, config, None
    )
    return cache, hidden


def stage_append(
    slots: SlotState,
    index: Int32[Array, " rows"],
    token: Int32[Array, " rows"],
    finite: Bool[Array, " rows"],
) -> SlotState:
    """Do to the slots what `stage_head` did, on a stage that did not sample."""
    num_slots = slots.done.shape[0]
    live = (index < num_slots) & ~slots.done[jnp.minimum(index, num_slots - 1)]
    return slot_edits.append(slots, index, live, token, finite)


def _decode_once(
    model: Any,
    slots: SlotState,
    window: WindowRows,
    block: Block,
    cache: KVCache,
    inputs: Float[Array, "rows embed"] | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    where: Tap | None,
    draft: Draft | None = None,
) -> tuple[Float[Array, "tokens hidden"], KVCache, Float32[Array, "tokens embed"] | None]:
    """Compute each slot's newest token, and what is proposed behind it.

    Args:
      draft: what is proposed; None for a block without proposals.

    Returns:
      Hidden states, the cache, and what is tapped.
    """
    inputs, attention = attention_of(
        slots,
        window,
        block,
        inputs,
        attention_plan,
        config,
        None if draft is None else draft.tokens,
    )
    return tapped(model, inputs, attention, cache, where)


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
    """Have a draft model choose `num` tokens of each row, `most` at most, one after the other.

    It chooses as the served model does, with the same random numbers, so that it is right often
    where the two models agree.

    Returns:
      The slots, in which the tokens stand behind the valid ones; the tokens; and the cache.
    """
    num_slots, row = slots.done.shape[0], jnp.arange(num.shape[0])
    length = window.part(slots.length)

    def step(
        place: int, state: tuple[Int32[Array, "slots max_context"], KVCache, Any]
    ) -> tuple[Int32[Array, "slots max_context"], KVCache, Any]:
        tokens, cache, drafted = state
        live = place < num
        now = replace(slots, tokens=tokens, length=slots.length + place)
        block = Block(row, jnp.zeros_like(row), live, row, live.astype(jnp.int32))
        inputs, attention = attention_of(now, window, block, None, None, config, None)
        logits, cache = model.draft_logits(inputs, attention, cache)
        sampled = sample(
            *(logits, window.sampling, tokens, length + place),
            slot=window.index,
            variant=variant,
        )
        slot = jnp.where(live, window.index, num_slots)
        tokens = tokens.at[slot, length + place].set(sampled.token, mode="drop")
        return tokens, cache, drafted.at[:, place].set(sampled.token)

    drafted = jnp.zeros((num.shape[0], most), jnp.int32)
    tokens, cache, drafted = lax.fori_loop(0, most, step, (slots.tokens, cache, drafted))
    return replace(slots, tokens=tokens), drafted, cache
