"""What a stage of a model computes, and what it tells the others.

The last stage samples, and looks up what may follow. The others learn of both with the next work
that they get, so that they never wait for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import KVCache
from jaxserve.steps import slots as slot_edits
from jaxserve.steps.batches import ChoosingRows, DecodeWindow, Params
from jaxserve.steps.choosing import choose, looked_up, room, with_lesson
from jaxserve.steps.decode import decode_once
from jaxserve.steps.decode_blocks import block_of, rows_of
from jaxserve.steps.heads import stage_head
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.sampler import StepArrays
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import SlotState
from jaxserve.steps.verification import verifying_head
from pallas_kernels.paged_attention import Plan


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """The tokens that the last stage has appended to slots.

    Attributes:
      num: tokens of each row, with one that is not finite.
      finite: whether a row's last token is.
    """

    tokens: Int32[Array, "rows most"]
    num: Int32[Array, " rows"]
    finite: Bool[Array, " rows"]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposed:
    """What the next iteration of a loop computes.

    Attributes:
      live: rows that take part.
      tokens: that are proposed behind the newest one of each row, `num` of them.
    """

    live: Bool[Array, " rows"]
    tokens: Int32[Array, "rows most"]
    num: Int32[Array, " rows"]


def decode(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window: DecodeWindow,
    attention_plan: Plan | None,
    inputs: Float[Array, "tokens embed"] | None,
    proposed: Proposed | None = None,
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, Float[Array, "tokens hidden"]]:
    """Compute a stage's part of one decode iteration.

    Args:
      inputs: what the stage before this one returned; None for the first stage.
      proposed: see `propose`; None in a loop that does not speculate.

    Returns:
      The cache, and the residual stream; of the last stage, hidden states.
    """
    model = nnx.merge(graphdef, params)
    rows = rows_of(slots, window)
    if proposed is None:
        block, tokens = block_of(rows.live(slots.done), None, 0), None
    else:
        tokens = proposed.tokens
        block = block_of(proposed.live, proposed.num, tokens.shape[1])
    hidden, cache, _ = decode_once(
        *(model, slots, rows, block, cache, inputs, attention_plan, config, None, tokens)
    )
    return cache, hidden


def head(
    params: Params,
    slots: SlotState,
    hidden: Float[Array, "num hidden"],
    index: Int32[Array, " rows"],
    outputs: Outputs,
    step_arrays: StepArrays | None = None,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[SlotState, Outputs, Chosen]:
    """Sample the next token of each row on the last stage; see `heads.stage_head`."""
    slots, outputs, token, finite = stage_head(
        *(params, slots, hidden, index, outputs, step_arrays),
        variant=variant,
        graphdef=graphdef,
        config=config,
    )
    return slots, outputs, Chosen(token[:, None], jnp.ones_like(token), finite)


def verify(
    params: Params,
    slots: SlotState,
    hidden: Float[Array, "num hidden"],
    rows: ChoosingRows,
    step_arrays: StepArrays,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[SlotState, Outputs, Chosen]:
    """Choose tokens where the host has proposed some, on the last stage; see `verification`."""
    slots, outputs = verifying_head(
        *(params, slots, hidden, rows, None, None, step_arrays),
        variant=variant,
        graphdef=graphdef,
        config=config,
        probe=None,
    )
    num = outputs.num_tokens + (~outputs.finite).astype(jnp.int32)
    return slots, outputs, Chosen(outputs.tokens, num, outputs.finite)


def propose(
    slots: SlotState, window: DecodeWindow, outputs: Outputs, *, num_proposed: int
) -> tuple[Draft, Proposed]:
    """Return what the last stage proposes for the next iteration of a loop, and its rows.

    All of it is computed, since no device decides for the others whether that pays.

    Args:
      outputs: of the loop so far.
      num_proposed: of all rows together; static.
    """
    rows = rows_of(slots, window)
    left = room(rows, slots.done, outputs)
    draft = looked_up(slots, rows, left, num_proposed)
    live = left > 0
    return draft, Proposed(live, draft.tokens, jnp.where(live, draft.num, 0))


def choose_proposed(
    params: Params,
    slots: SlotState,
    window: DecodeWindow,
    hidden: Float[Array, "tokens hidden"],
    outputs: Outputs,
    draft: Draft,
    proposed: Proposed,
    *,
    variant: Variant,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[SlotState, Outputs, Chosen, Draft, Proposed]:
    """Choose the tokens of an iteration that speculates, on the last stage.

    Returns:
      The slots, the outputs, what was appended, and what `propose` returns for the next iteration.
    """
    model = nnx.merge(graphdef, params)
    rows = rows_of(slots, window)
    num_proposed = proposed.tokens.shape[1]
    choice = choose(
        *(model.logits(hidden), rows, block_of(proposed.live, proposed.num, num_proposed)),
        *(slots, outputs, proposed.live, draft, proposed.num),
        looks_up=True,
        variant=variant,
        config=config,
    )
    now, after = with_lesson(choice, rows, proposed.live, draft, proposed.num)
    place = outputs.num_tokens[:, None] + jnp.arange(1 + num_proposed)
    tokens = jnp.take_along_axis(after.tokens, jnp.minimum(place, after.tokens.shape[1] - 1), 1)
    fails = proposed.live & ~after.finite
    num = after.num_tokens - outputs.num_tokens + fails.astype(jnp.int32)
    more = propose(now, window, after, num_proposed=num_proposed)
    return now, after, Chosen(tokens, num, ~fails), *more


def append(
    slots: SlotState,
    index: Int32[Array, " rows"],
    chosen: Chosen,
    num_proposed: Int32[Array, " rows"],
) -> SlotState:
    """Do to the slots what the last stage did, on a stage that did not sample.

    Args:
      index: slots of the rows; the number of slots to skip one.
      num_proposed: newest tokens of each slot that the host has proposed, and that those chosen
        replace.
    """
    num_slots = slots.done.shape[0]
    slots = replace(slots, length=slots.length.at[index].add(-num_proposed, mode="drop"))

    def append_one(place: Int32[Array, ""], slots: SlotState) -> SlotState:
        live = (index < num_slots) & (place < chosen.num)
        live &= ~slots.done[jnp.minimum(index, num_slots - 1)]
        finite = chosen.finite | (place + 1 < chosen.num)
        token = lax.dynamic_index_in_dim(chosen.tokens, place, axis=1, keepdims=False)
        return slot_edits.append(slots, index, live, token, finite)

    most = chosen.tokens.shape[1]
    if most == 1:
        return append_one(jnp.int32(0), slots)
    return lax.fori_loop(0, most, append_one, slots)
