"""The steps of one stage of a model, and the tokens that the last stage sends to the other stages.

The last stage samples tokens and looks up proposals. Both are sent to the other stages from device
to device, so that no stage waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from jaxserve.core.config import EngineConfig
from jaxserve.kernels.paged_attention import Plan
from jaxserve.models.batch import KVCache
from jaxserve.steps.decode import (
    attention_of,
    block_of,
    choose,
    looked_up,
    room,
    rows_of,
    with_rates,
)
from jaxserve.steps.drafting import merged
from jaxserve.steps.heads import Chosen
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import DecodeWindow, Params, tapped
from jaxserve.steps.proposals import Draft
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.slots import SlotState


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposed:
    """The tokens that the next iteration of a loop computes."""

    live: Bool[Array, " rows"]  # rows that take part
    tokens: Int32[Array, "rows most"]  # proposals after the newest token of each row, `num` of them
    num: Int32[Array, " rows"]


def decode(
    params: Params,
    cache: KVCache,
    slots: SlotState,
    window: DecodeWindow,
    attention_plan: Plan | None,
    inputs: Float[Array, "tokens embed"] | None,
    proposed: Proposed | None = None,  # see `propose`; None in a loop that does not speculate
    *,
    graphdef: nnx.GraphDef,
    config: EngineConfig,
) -> tuple[KVCache, Float[Array, "tokens hidden"]]:
    """Compute a stage's part of one decode iteration, of the previous stage's output as `inputs`.

    Returns the cache, and the residual stream; of the last stage, hidden states.
    """
    model = merged(graphdef, params, config)
    rows = rows_of(slots, window)
    if proposed is None:
        block, tokens = block_of(rows.live(slots.done), None, 0), None
    else:
        tokens = proposed.tokens
        block = block_of(proposed.live, proposed.num, tokens.shape[1])
    inputs, batch = attention_of(slots, rows, block, inputs, attention_plan, config, tokens)
    hidden, cache, _ = tapped(model, inputs, batch, cache, None)
    return cache, hidden


def propose(
    slots: SlotState, window: DecodeWindow, num_tokens: Int32[Array, " rows"], *, num_proposed: int
) -> tuple[Draft, Proposed]:
    """Return the last stage's proposals for the next iteration of a loop, and its rows.

    All of them are computed, since no device decides for all stages whether that pays. `num_tokens`
    is what each row has got in the loop so far; `num_proposed` is static, of all rows together.
    """
    rows = rows_of(slots, window)
    left = room(rows, slots.done, num_tokens)
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

    Returns the slots, outputs, appended tokens, and the results of `propose` for the next
    iteration.
    """
    model = merged(graphdef, params, config)
    rows = rows_of(slots, window)
    num_proposed = proposed.tokens.shape[1]
    choice = choose(
        model.logits(hidden),
        rows,
        block_of(proposed.live, proposed.num, num_proposed),
        slots,
        outputs,
        proposed.live,
        draft,
        proposed.num,
        looks_up=True,
        variant=variant,
        config=config,
    )
    now, after = with_rates(choice, rows, proposed.live, draft, proposed.num)
    place = outputs.num_tokens[:, None] + jnp.arange(1 + num_proposed)
    tokens = jnp.take_along_axis(after.tokens, jnp.minimum(place, after.tokens.shape[1] - 1), 1)
    more = propose(now, window, after.num_tokens, num_proposed=num_proposed)
    chosen = Chosen(tokens, after.num_tokens - outputs.num_tokens, rows.part(now.done))
    return now, after, chosen, *more


def append(
    slots: SlotState,
    index: Int32[Array, " rows"],  # slots of the rows; the number of slots skips one
    chosen: Chosen,
    num_proposed: Int32[Array, " rows"] | None = None,
) -> SlotState:
    """Append the last stage's tokens to the slots of a stage that did not sample.

    They replace the `num_proposed` newest tokens of each row's slot, proposed by the host, if any.
    """
    num_slots = slots.done.shape[0]
    length = slots.length[jnp.minimum(index, num_slots - 1)]
    if num_proposed is not None:
        length -= num_proposed
    place = jnp.arange(chosen.tokens.shape[1])
    slot = jnp.where(place < chosen.num[:, None], index[:, None], num_slots)
    position = length[:, None] + place
    ended = jnp.where(chosen.ended, index, num_slots)
    return replace(
        slots,
        tokens=slots.tokens.at[slot, position].set(chosen.tokens, mode="drop"),
        length=slots.length.at[index].set(length + chosen.num, mode="drop"),
        done=slots.done.at[ended].set(True, mode="drop"),
    )
