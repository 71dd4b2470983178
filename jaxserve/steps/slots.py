"""Per-slot state on the device, and the edits that plans make to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxserve.scheduling.plan import Admission
from jaxserve.steps.sampling.sampler import SlotSampling
from pallas_kernels import move_pages
from sharding.shards import over_tensor

# Rows of one call of `admit` and of `move`, and entries of one call of `edit`; more take several
# calls.
ADMISSIONS_A_CALL = 4
MOVES_A_CALL = 16
PAGE_UPDATES_A_CALL = 256


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Everything the device knows of its S slots; C is the longest context, P its pages.

    The token at position p of a slot is `tokens[slot, p]`, prompt and output alike: a prefill
    chunk and the newest sampled token are looked up in the same way, so the host never has to
    know a token's value to plan the step that consumes it.

    Attributes:
      tokens: int32 [S, C].
      length: int32 [S], valid tokens.
      max_length: int32 [S], the slot ends when it has this many.
      done: bool [S], inert: writes to the null page and delivers nothing.
      page_table: int32 [S, P].
      sampling: see `SlotSampling`.
    """

    tokens: jax.Array
    length: jax.Array
    max_length: jax.Array
    done: jax.Array
    page_table: jax.Array
    sampling: SlotSampling


def empty_slots(config: EngineConfig) -> SlotState:
    """All slots inert."""
    num = config.max_slots

    def full(value: float, dtype: jnp.dtype, *shape: int) -> jax.Array:
        return jnp.full((num, *shape), value, dtype)

    return SlotState(
        tokens=full(0, jnp.int32, config.max_context),
        length=full(1, jnp.int32),
        max_length=full(1, jnp.int32),
        done=full(True, jnp.bool_),
        page_table=full(0, jnp.int32, config.max_pages_per_sequence),
        sampling=SlotSampling(
            temperature=full(0, jnp.float32),
            top_k=full(0, jnp.int32),
            top_p=full(1, jnp.float32),
            min_p=full(0, jnp.float32),
            repetition_penalty=full(1, jnp.float32),
            presence_penalty=full(0, jnp.float32),
            frequency_penalty=full(0, jnp.float32),
            seed=full(0, jnp.uint32),
            stop_ids=full(-1, jnp.int32, MAX_STOP_TOKEN_IDS),
            min_length=full(0, jnp.int32),
            prompt_length=full(1, jnp.int32),
            bias_ids=full(-1, jnp.int32, MAX_LOGIT_BIAS),
            bias_values=full(0, jnp.float32, MAX_LOGIT_BIAS),
        ),
    )


def edit(
    slots: SlotState,
    released: jax.Array,  # bool [S]
    page_updates: jax.Array,  # int32 [PAGE_UPDATES_A_CALL, 3]: slot (S to skip), index, page
) -> SlotState:
    """Make released slots inert and set page-table entries."""
    slot, index, page = page_updates.T
    return replace(
        slots,
        done=slots.done | released,
        page_table=slots.page_table.at[slot, index].set(page, mode="drop"),
    )


def move(
    slots: SlotState,
    source: jax.Array,  # int32 [MOVES_A_CALL]
    target: jax.Array,  # int32 [MOVES_A_CALL], S to skip
) -> SlotState:
    """Copy slots to others, none of which is a source too; where they were becomes inert."""
    num = slots.done.shape[0]
    moved = over_tensor(_moved, in_specs=P(), out_specs=P())(slots, source, target)
    vacated = jnp.where(target < num, source, num)
    return replace(moved, done=moved.done.at[vacated].set(True, mode="drop"))


def _moved(slots: SlotState, source: jax.Array, target: jax.Array) -> SlotState:
    # A leaf [S, ...] as one layer of S pages.
    layer = jax.tree.map(lambda leaf: leaf[None], slots)
    return jax.tree.map(lambda leaf: leaf[0], move_pages(layer, source, target))


def admit(slots: SlotState, index: jax.Array, rows: SlotState) -> SlotState:
    """Set the slots at `index` (int32 [ADMISSIONS_A_CALL], S to skip); page tables stay."""

    def put(leaf: jax.Array, row: jax.Array) -> jax.Array:
        return leaf.at[index].set(row, mode="drop")

    admitted = jax.tree.map(put, replace(slots, page_table=rows.page_table), rows)
    return replace(admitted, page_table=slots.page_table)


def append(
    slots: SlotState,
    index: jax.Array,  # int32 [R], slots; S to skip
    live: jax.Array,  # bool [R]
    token: jax.Array,  # int32 [R]
    finite: jax.Array,  # bool [R], whether there is a token
) -> SlotState:
    """Append each live row's token to its slot and end the slots that it ends."""
    num = slots.done.shape[0]
    accepted = live & finite
    safe = jnp.minimum(index, num - 1)
    length = slots.length[safe]
    new_length = length + accepted
    stops = (token[:, None] == slots.sampling.stop_ids[safe]).any(1)
    ended = live & (stops | (new_length >= slots.max_length[safe]) | ~finite)
    return replace(
        slots,
        tokens=slots.tokens.at[jnp.where(accepted, index, num), length].set(token, mode="drop"),
        length=slots.length.at[jnp.where(accepted, index, num)].set(new_length, mode="drop"),
        done=slots.done.at[jnp.where(ended, index, num)].set(True, mode="drop"),
    )


def pack_admissions(
    config: EngineConfig, admissions: Sequence[Admission]
) -> tuple[np.ndarray, SlotState]:
    """Arguments of `admit` for at most ADMISSIONS_A_CALL admissions, as NumPy arrays."""
    num = ADMISSIONS_A_CALL

    def full(value: float, dtype: type, *shape: int) -> Any:  # NumPy where fields say jax.Array
        return np.full((num, *shape), value, dtype)

    index = full(config.max_slots, np.int32)
    tokens = full(0, np.int32, config.max_context)
    lengths = {
        name: full(0, np.int32) for name in ("length", "max_length", "min_length", "prompt_length")
    }
    floats = {
        name: full(0, np.float32)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    }
    top_k, seed = full(0, np.int32), full(0, np.uint32)
    stop_ids = full(-1, np.int32, MAX_STOP_TOKEN_IDS)
    bias_ids = full(-1, np.int32, MAX_LOGIT_BIAS)
    bias_values = full(0, np.float32, MAX_LOGIT_BIAS)
    for i, new in enumerate(admissions):
        params = new.request.params
        index[i] = new.slot
        tokens[i, : len(new.tokens)] = new.tokens
        lengths["length"][i] = len(new.tokens)
        lengths["max_length"][i] = new.request.end_length(new.max_length, new.sample_index)
        lengths["min_length"][i] = min(
            len(new.request.prompt) + params.min_tokens, config.max_context
        )
        lengths["prompt_length"][i] = len(new.request.prompt)
        for name, array in floats.items():
            array[i] = getattr(params, name)
        top_k[i] = params.top_k
        seed[i] = sample_seed(new.request.seed, new.sample_index)
        stop_ids[i, : len(new.request.stop_token_ids)] = new.request.stop_token_ids
        for j, (token_id, bias) in enumerate((params.logit_bias or {}).items()):
            bias_ids[i, j], bias_values[i, j] = token_id, bias
    return index, SlotState(
        tokens=tokens,
        length=lengths["length"],
        max_length=lengths["max_length"],
        done=full(False, np.bool_),
        page_table=full(0, np.int32, config.max_pages_per_sequence),
        sampling=SlotSampling(
            top_k=top_k,
            seed=seed,
            stop_ids=stop_ids,
            min_length=lengths["min_length"],
            prompt_length=lengths["prompt_length"],
            bias_ids=bias_ids,
            bias_values=bias_values,
            **floats,
        ),
    )


def sample_seed(seed: int, sample_index: int) -> int:
    """Seed of one of a request's samples; the first one's is the request's own."""
    return (seed + 0x9E3779B9 * sample_index) % 2**32
