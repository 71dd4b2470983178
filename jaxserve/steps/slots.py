"""Per-slot state on the device, and the edits that plans make to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32, Shaped

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.plan import Admission, Extension
from jaxserve.steps.sampling.slot_sampling import SlotSampling, empty_sampling, pack_sampling
from pallas_kernels import move_pages
from sharding.shards import over_tensor

# Rows of one call of `admit`, `extend` (and tokens of each of them) and of `move`, and entries of
# one call of `edit`; more take several calls.
ADMISSIONS_A_CALL = 4
EXTENSIONS_A_CALL, TOKENS_AN_EXTENSION = 16, 16
MOVES_A_CALL = 16
PAGE_UPDATES_A_CALL = 256


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Everything that the device knows of its slots.

    The token at position p of a slot is `tokens[slot, p]`, prompt and output alike: a prefill
    chunk and the newest sampled token are looked up in the same way, so the host plans
    a step without the values of the tokens that the step consumes.

    Attributes:
      length: valid tokens.
      max_length: the slot ends when it has this many.
      done: inert: writes to the null page and delivers nothing.
      encoded: tokens of the prompt that the encoder reads, without padding; None for a model
        without an encoder.
    """

    tokens: Int32[Array, "slots max_context"]
    length: Int32[Array, " slots"]
    max_length: Int32[Array, " slots"]
    done: Bool[Array, " slots"]
    page_table: Int32[Array, "slots row_pages"]
    sampling: SlotSampling
    encoded: Int32[Array, " slots"] | None = None


def empty_slots(config: EngineConfig) -> SlotState:
    """Return slots that are all inert."""
    num = config.max_slots

    def full(value: float, dtype: jnp.dtype, *shape: int) -> Shaped[Array, " slots *shape"]:
        return jnp.full((num, *shape), value, dtype)

    return SlotState(
        tokens=full(0, jnp.int32, config.max_context),
        length=full(1, jnp.int32),
        max_length=full(1, jnp.int32),
        done=full(True, jnp.bool_),
        page_table=full(0, jnp.int32, config.max_pages_per_sequence),
        sampling=empty_sampling(num),
        encoded=full(1, jnp.int32) if config.has_encoder else None,
    )


def edit(
    slots: SlotState,
    released: Bool[Array, " slots"],
    page_updates: Int32[Array, "page_updates 3"],
) -> SlotState:
    """Make released slots inert and set page-table entries.

    Args:
      page_updates: slot (the number of slots to skip), index in its page table, page.
    """
    slot, index, page = page_updates.T
    return replace(
        slots,
        done=slots.done | released,
        page_table=slots.page_table.at[slot, index].set(page, mode="drop"),
    )


def move(
    slots: SlotState,
    source: Int32[Array, " moves"],
    target: Int32[Array, " moves"],
) -> SlotState:
    """Copy slots to others, none of which is a source too; the sources become inert.

    A move to the number of slots is skipped.
    """
    num = slots.done.shape[0]
    moved = over_tensor(_moved, in_specs=P(), out_specs=P())(slots, source, target)
    vacated = jnp.where(target < num, source, num)
    return replace(moved, done=moved.done.at[vacated].set(True, mode="drop"))


def _moved(
    slots: SlotState, source: Int32[Array, " moves"], target: Int32[Array, " moves"]
) -> SlotState:
    # A leaf as one layer, in which a slot is a page.
    layer = jax.tree.map(lambda leaf: leaf[None], slots)
    return jax.tree.map(lambda leaf: leaf[0], move_pages(layer, source, target))


def move_states(
    states: Any,
    source: Int32[Array, " moves"],
    target: Int32[Array, " moves"],
) -> Any:
    """Copy the states of recurrent layers between slots, as `move` does with the slots.

    Args:
      states: `KVCache.states`, [layers, slots, ...] each.
    """
    return move_pages(states, source, target)


def admit(slots: SlotState, index: Int32[Array, " admissions"], rows: SlotState) -> SlotState:
    """Set the slots at `index` (the number of slots to skip); page tables stay."""

    def put(
        leaf: Shaped[Array, " slots *entry"], row: Shaped[Array, " admissions *entry"]
    ) -> Shaped[Array, " slots *entry"]:
        return leaf.at[index].set(row, mode="drop")

    admitted = jax.tree.map(put, replace(slots, page_table=rows.page_table), rows)
    return replace(admitted, page_table=slots.page_table)


def extend(
    slots: SlotState,
    index: Int32[Array, " extensions"],
    start: Int32[Array, " extensions"],
    count: Int32[Array, " extensions"],
    tokens: Int32[Array, "extensions num"],
) -> SlotState:
    """Put tokens behind the newest ones of slots, several times for more of one slot's.

    Args:
      index: slots; the number of slots to skip.
      start: position of the first token; `count` of them are valid.
    """
    offset = jnp.arange(tokens.shape[1])
    slot = jnp.where(offset < count[:, None], index[:, None], slots.done.shape[0])
    return replace(
        slots,
        tokens=slots.tokens.at[slot, start[:, None] + offset].set(tokens, mode="drop"),
        length=slots.length.at[index].max(start + count, mode="drop"),
    )


def append(
    slots: SlotState,
    index: Int32[Array, " rows"],
    live: Bool[Array, " rows"],
    token: Int32[Array, " rows"],
    finite: Bool[Array, " rows"],
) -> SlotState:
    """Append each live row's token to its slot, and make inert the slots that it ends.

    Args:
      index: the rows' slots; the number of slots to skip.
      finite: whether there is a token.
    """
    num = slots.done.shape[0]
    accepted = live & finite
    safe = jnp.minimum(index, num - 1)
    length = slots.length[safe]
    new_length = length + accepted.astype(length.dtype)
    stops = (token[:, None] == slots.sampling.stop_ids[safe]).any(1)
    ended = live & (stops | (new_length >= slots.max_length[safe]) | ~finite)
    return replace(
        slots,
        tokens=slots.tokens.at[jnp.where(accepted, index, num), length].set(token, mode="drop"),
        length=slots.length.at[jnp.where(accepted, index, num)].set(new_length, mode="drop"),
        done=slots.done.at[jnp.where(ended, index, num)].set(True, mode="drop"),
    )


def pack_moves(
    config: EngineConfig, moves: Sequence[tuple[int, int]]
) -> Int32[np.ndarray, "2 moves"]:
    """Arguments of `move` and `move_states` for at most MOVES_A_CALL (from slot, to slot)."""
    places = np.full((2, MOVES_A_CALL), config.max_slots, np.int32)
    places[0] = 0
    if moves:
        places[:, : len(moves)] = np.transpose(moves)
    return places


def pack_admissions(
    config: EngineConfig, admissions: Sequence[Admission]
) -> tuple[Int32[np.ndarray, " admissions"], SlotState]:
    """Arguments of `admit` for at most ADMISSIONS_A_CALL admissions, as NumPy arrays."""
    num = ADMISSIONS_A_CALL

    def full(value: float, dtype: type, *shape: int) -> Any:  # NumPy where fields say Array
        return np.full((num, *shape), value, dtype)

    index = full(config.max_slots, np.int32)
    tokens = full(0, np.int32, config.max_context)
    length, max_length, encoded = (full(0, np.int32) for _ in range(3))
    for i, new in enumerate(admissions):
        index[i] = new.slot
        tokens[i, : len(new.tokens)] = new.tokens
        length[i] = len(new.tokens)
        encoded[i] = len(new.request.encoder_prompt)
        max_length[i] = new.request.end_length(new.max_length, new.sample_index)
    return index, SlotState(
        tokens=tokens,
        length=length,
        max_length=max_length,
        done=full(False, np.bool_),
        page_table=full(0, np.int32, config.max_pages_per_sequence),
        sampling=pack_sampling([(new.request, new.sample_index) for new in admissions], num),
        encoded=encoded if config.has_encoder else None,
    )


def pieces(extensions: Sequence[Extension]) -> list[Extension]:
    """Return the extensions in pieces of at most TOKENS_AN_EXTENSION tokens."""
    num = TOKENS_AN_EXTENSION
    return [
        Extension(each.slot, each.start + i, each.tokens[i : i + num])
        for each in extensions
        for i in range(0, len(each.tokens), num)
    ]


def pack_extensions(
    config: EngineConfig, extensions: Sequence[Extension]
) -> tuple[np.ndarray, ...]:
    """Arguments of `extend` for at most EXTENSIONS_A_CALL pieces: int32 NumPy arrays."""
    index = np.full(EXTENSIONS_A_CALL, config.max_slots, np.int32)
    start, count = np.zeros((2, EXTENSIONS_A_CALL), np.int32)
    tokens = np.zeros((EXTENSIONS_A_CALL, TOKENS_AN_EXTENSION), np.int32)
    for i, each in enumerate(extensions):
        index[i], start[i], count[i] = each.slot, each.start, len(each.tokens)
        tokens[i, : len(each.tokens)] = each.tokens
    return index, start, count, tokens
