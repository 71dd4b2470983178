"""Decoding on the device: a loop over a whole model.

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
from jaxserve.steps import proposals
from jaxserve.steps.batches import DecodeWindow, Params, tap, tapped
from jaxserve.steps.choosing import choose, looked_up, room, with_rates
from jaxserve.steps.decode_blocks import Block, WindowRows, attention_of, block_of, rows_of
from jaxserve.steps.drafting import DraftInputs, DraftStructure, FollowedModel, serving_model
from jaxserve.steps.outputs import Outputs, no_outputs, with_reading
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
                *(model, before, rows, proposed, cache, config, variant, draft.tokens.shape[1])
            )
            draft = replace(draft, tokens=drafted)
        block = block_of(live, proposed, num_proposed)
        hidden, cache, read = decode_once(
            *(model, before, rows, block, cache, None, attention_plans[is_wide], config),
            tap(probe, jnp.arange(block.row.shape[0])),
            None if proposed is None or draft is None else draft.tokens,
        )
        choice = choose(
            *(model.logits(hidden), rows, block, before, carry.outputs, live, draft, proposed),
            looks_up=drafting is None,
            variant=variant,
            config=config,
        )
        now, outputs = choice.slots, choice.outputs
        if read is not None and proposed is not None:
            num_new = rows.part(now.length) - rows.part(before.length)
            read = read[block.start + jnp.maximum(num_new, 1) - 1]
        if draft is not None:
            forgives = drafting is not None and proposed is None
            now, outputs = with_rates(choice, rows, live, draft, proposed, forgives=forgives)
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


def decode_once(
    model: Any,
    slots: SlotState,
    window: WindowRows,
    block: Block,
    cache: KVCache,
    inputs: Float[Array, "tokens embed"] | None,
    attention_plan: Plan | None,
    config: EngineConfig,
    where: Tap | None,
    proposed: Int32[Array, "rows num"] | None = None,
) -> tuple[Float[Array, "tokens hidden"], KVCache, Float32[Array, "tokens embed"] | None]:
    """Compute each slot's newest token, and what is proposed behind it.

    Args:
      inputs: what the stage before this one returned; None for a whole model or a first stage.
      proposed: what is proposed behind the newest tokens; None for a block without proposals.

    Returns:
      Hidden states, the cache, and what is tapped.
    """
    inputs, attention = attention_of(
        *(slots, window, block, inputs, attention_plan, config, proposed)
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
            slot=window.slot,
            variant=variant,
        )
        slot = jnp.where(live, window.slot, num_slots)
        tokens = tokens.at[slot, length + place].set(sampled.token, mode="drop")
        return tokens, cache, drafted.at[:, place].set(sampled.token)

    drafted = jnp.zeros((num.shape[0], most), jnp.int32)
    tokens, cache, drafted = lax.fori_loop(0, most, step, (slots.tokens, cache, drafted))
    return replace(slots, tokens=tokens), drafted, cache
