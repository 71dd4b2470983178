"""The tokens that an iteration of decoding chooses, and the rates of proposals after it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.plan import ProposalCount
from jaxserve.steps import proposals
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.decode_blocks import Block, WindowRows
from jaxserve.steps.encoding import counted_from
from jaxserve.steps.outputs import Outputs, count, record
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.sampler import sample
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState


class Choice(NamedTuple):
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


def room(
    rows: WindowRows, done: Bool[Array, " slots"], num_tokens: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Return how many tokens each row of a loop may still get; 0 for one that takes no part.

    Args:
      num_tokens: that it has got.
    """
    return jnp.where(rows.live(done), jnp.maximum(rows.window.most - num_tokens, 0), 0)


def choose(
    logits: Float32[Array, "tokens vocab"],
    rows: WindowRows,
    block: Block,
    before: SlotState,
    outputs: Outputs,
    live: Bool[Array, " rows"],
    draft: Draft | None,
    proposed: Int32[Array, " rows"] | None,
    *,
    looks_up: bool,
    variant: Variant,
    config: EngineConfig,
) -> Choice:
    """Choose the next token of each live row, and one behind each proposal that is right.

    Args:
      logits: of the block's tokens.
      before: the slots before the iteration.
      draft: what was proposed; None in a loop that does not speculate.
      proposed: proposals of each row that the block has; None for a block without any.
      looks_up: whether a proposal that was not computed can be compared with the token, too.
    """
    num_rows = live.shape[0]
    nothing = jnp.zeros(num_rows, jnp.int32)
    computed = compared = nothing if proposed is None else proposed
    if draft is not None and looks_up:
        compared = jnp.maximum(computed, jnp.minimum(draft.available, 1))

    def choose_one(state: Choice) -> Choice:
        place, now, outputs = state.place, state.slots, state.outputs
        at = jnp.minimum(block.start + place, logits.shape[0] - 1)
        sampled = sample(
            *(logits if proposed is None else logits[at], rows.sampling, now.tokens),
            rows.part(now.length),
            slot=rows.slot,
            variant=variant,
            first=counted_from(rows.encoded, config.page_size),
        )
        now = slot_edits.append(now, rows.slot, state.goes_on, sampled.token, sampled.finite)
        outputs = record(outputs, state.goes_on, sampled)
        if draft is None:
            return Choice(place, now, outputs, live, state.hits, state.misses)
        tried = state.goes_on & (place < compared)
        hits = tried & (sampled.token == draft.tokens[:, place])
        accepted = hits & (place < computed)
        if proposed is not None:
            outputs = count(outputs, len(ProposalCount) + place, accepted)
        return Choice(
            *(place + 1, now, outputs, accepted & rows.live(now.done)),
            state.hits + hits.astype(jnp.int32),
            state.misses + (tried & ~hits).astype(jnp.int32),
        )

    first = Choice(jnp.int32(0), before, outputs, live, nothing, nothing)
    if proposed is None:
        return choose_one(first)
    return lax.while_loop(lambda state: state.goes_on.any(), choose_one, first)


def with_rates(
    choice: Choice,
    rows: WindowRows,
    live: Bool[Array, " rows"],
    draft: Draft,
    proposed: Int32[Array, " rows"] | None,
    *,
    forgives: bool = False,
) -> tuple[SlotState, Outputs]:
    """Return the slots after an iteration, with new rates of proposals, and the outputs, counted.

    Args:
      live, proposed: see `choose`.
      forgives: whether no proposal was compared, so that rates approach those of an unknown draft
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
        *(now.lookup.rates, now.answers.rates, rows.slot, draft.source),
        *(choice.hits, choice.misses),
    )
    if forgives:
        rates = proposals.forgive(rates, rows.slot)
    lookup, answers = replace(now.lookup, rates=rates), replace(now.answers, rates=total)
    return replace(now, lookup=lookup, answers=answers), outputs


def looked_up(
    slots: SlotState, rows: WindowRows, left: Int32[Array, " rows"], num_proposed: int
) -> Draft:
    """Return what is proposed to follow the newest tokens of a window's slots.

    Args:
      left: see `room`.
      num_proposed: of all rows together, at most.
    """
    assert slots.lookup is not None and slots.answers is not None, "slots without lookup"
    return proposals.propose(
        *(slots.lookup, slots.answers, slots.tokens, rows.slot, rows.part(slots.length)),
        *(left, rows.window.verify_cost, num_proposed),
    )
