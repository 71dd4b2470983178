"""Per-slot state on the device, and the edits that plans make to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int32, Shaped

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.kernels import move_pages
from jaxserve.scheduling.plan import Admission, Extension
from jaxserve.sharding.shards import over_tensor
from jaxserve.steps.proposals import Answers, Lookup
from jaxserve.steps.sampling.sampler import SlotSampling, empty_sampling, pack_sampling

# Limits of one call: rows of `admit`, of `extend` (and tokens of each of them) and of `move`, and
# entries of `edit`; more take several calls.
ADMISSIONS_A_CALL = 4
EXTENSIONS_A_CALL, TOKENS_AN_EXTENSION = 16, 16
MOVES_A_CALL = 16
PAGE_UPDATES_A_CALL = 256


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """The state of all slots on the device.

    The token at position p of a slot is `tokens[slot, p]`, prompt and output alike: a prefill
    chunk and the newest sampled token are looked up in the same way, so the host plans
    a step without the values of the tokens that the step consumes.
    """

    tokens: Int32[Array, "slots max_context"]
    length: Int32[Array, " slots"]  # valid tokens
    max_length: Int32[Array, " slots"]  # the slot ends when it has this many
    done: Bool[Array, " slots"]  # inert: writes to the null page and delivers nothing
    # By number, see `PageLayout`.
    page_table: Int32[Array, "slots row_pages"]
    sampling: SlotSampling
    # Tokens of the prompt that the encoder reads, without padding; None for a model without an
    # encoder.
    encoded: Int32[Array, " slots"] | None = None
    # Adapter of the sequence, -1 for none; None for a model without adapters.
    adapter: Int32[Array, " slots"] | None = None
    # Index of proposals in each slot; None in a runtime that does not speculate.
    lookup: Lookup | None = None
    # Index of proposals for all slots; None in a runtime that does not speculate.
    answers: Answers | None = None


def empty_slots(config: EngineConfig, *, looks_up: bool = True) -> SlotState:
    """Return inert slots; `looks_up` enables proposals by lookup, if the runtime speculates."""
    num, looks_up = config.max_slots, looks_up and config.num_proposed > 0
    # A draft model makes the proposals, so nothing is looked up.
    num_indexed = 1 if config.drafts else config.max_context

    def full(
        value: float, dtype: jax.typing.DTypeLike, *shape: int
    ) -> Shaped[Array, " slots *shape"]:
        return jnp.full((num, *shape), value, dtype)

    return SlotState(
        tokens=full(0, jnp.int32, config.max_context),
        length=full(1, jnp.int32),
        max_length=full(1, jnp.int32),
        done=full(True, jnp.bool_),
        page_table=full(0, jnp.int32, config.max_pages_per_table * config.page_layout.num_tables),
        sampling=empty_sampling(num),
        encoded=full(1, jnp.int32) if config.has_encoder else None,
        adapter=full(-1, jnp.int32) if config.max_adapters else None,
        lookup=Lookup.empty(num, num_indexed) if looks_up else None,
        answers=Answers.empty(config.max_context) if looks_up else None,
    )


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotEdits:
    """Slots that end, and entries of page tables."""

    released: Bool[Array, " slots"]
    # Slot (the number of slots skips one), index in its page table, page.
    page_updates: Int32[Array, "page_updates 3"]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admitted:
    """What slots begin with, except their tokens, which are concatenated in one array."""

    index: Int32[Array, " admissions"]  # slots; the number of slots skips one
    # Where the tokens of each begin in the array, rising; past its end to skip.
    start: Int32[Array, " admissions"]
    # length, max_length, sampling, encoded, adapter: see `SlotState`.
    length: Int32[Array, " admissions"]
    max_length: Int32[Array, " admissions"]
    sampling: SlotSampling
    encoded: Int32[Array, " admissions"] | None
    adapter: Int32[Array, " admissions"] | None


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Extensions:
    """Tokens to append to slots; a slot with many tokens has several entries."""

    index: Int32[Array, " extensions"]  # slots; the number of slots skips one
    start: Int32[Array, " extensions"]  # position of the first token; `count` of them are valid
    count: Int32[Array, " extensions"]
    tokens: Int32[Array, "extensions num"]


def edit(slots: SlotState, edits: SlotEdits) -> SlotState:
    """Make released slots inert and set page-table entries."""
    slot, index, page = edits.page_updates.T
    return replace(
        slots,
        done=slots.done | edits.released,
        page_table=slots.page_table.at[slot, index].set(page, mode="drop"),
    )


def move(
    slots: SlotState, source: Int32[Array, " moves"], target: Int32[Array, " moves"]
) -> SlotState:
    """Copy slots to targets, none of which is also a source; the sources become inert.

    A move to the number of slots is skipped.
    """
    num = slots.done.shape[0]
    own = replace(slots, answers=None)
    moved = over_tensor(_moved, in_specs=P(), out_specs=P())(own, source, target)
    vacated = jnp.where(target < num, source, num)
    done = moved.done.at[vacated].set(True, mode="drop")
    return replace(moved, done=done, answers=slots.answers)


def _moved(
    slots: SlotState, source: Int32[Array, " moves"], target: Int32[Array, " moves"]
) -> SlotState:
    # A leaf as one layer, in which a slot is a page.
    layer = jax.tree.map(lambda leaf: leaf[None], slots)
    return jax.tree.map(lambda leaf: leaf[0], move_pages(layer, source, target))


def move_states(
    states: Any,  # `KVCache.states`
    source: Int32[Array, " moves"],
    target: Int32[Array, " moves"],
    *,
    places: Mapping[str, jax.sharding.Sharding],  # of the arrays of each name
) -> Any:
    """Copy the states of recurrent layers between slots, as `move` does with the slots."""
    specs = {
        name: place.spec if isinstance(place, jax.sharding.NamedSharding) else P()
        for name, place in places.items()
    }
    moved = over_tensor(move_pages, in_specs=(specs, P(), P()), out_specs=specs)
    return moved(states, source, target)


def copy_entry(
    target: Any,  # a KVCache: states [layers, entries, ...], pages [layers, entries, kv_heads, ...]
    source: Any,  # another one, with other numbers of entries
    target_entry: Int32[Array, " kinds"],  # of the states, of the pages
    source_entry: Int32[Array, " kinds"],
) -> Any:
    """Return `target` with the state of one slot and one page of `source`."""

    def copied(into: Any, out_of: Any, kind: int) -> Any:
        def one(
            to: Shaped[Array, "layers entries ..."], leaf: Shaped[Array, "layers others ..."]
        ) -> Shaped[Array, "layers entries ..."]:
            own = lax.dynamic_slice_in_dim(leaf, source_entry[kind], 1, axis=1)
            return lax.dynamic_update_slice_in_dim(to, own, target_entry[kind], axis=1)

        return jax.tree.map(one, into, out_of)

    pages = copied(target.pages, source.pages, 1)
    return replace(pages, states=copied(target.states, source.states, 0))


def entry_of(
    cache: Any,  # a KVCache whose slots and pages are entries: [layers, entries, ...]
    entry: Int32[Array, ""],
) -> Any:
    """Return a cache with this entry alone."""
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, entry, 1, axis=1), cache)


def admit(slots: SlotState, admitted: Admitted, tokens: Int32[Array, " tokens"]) -> SlotState:
    """Start the admitted slots with their concatenated `tokens`.

    Page tables stay, and so do old tokens past a slot's length.
    """
    place = jnp.arange(tokens.shape[0])
    row = jnp.searchsorted(admitted.start, place, side="right") - 1
    position = place - admitted.start[row]
    is_token = position < admitted.length[row]
    slot = jnp.where(is_token, admitted.index[row], slots.done.shape[0])

    def put(
        leaf: Shaped[Array, " slots *entry"], entries: Shaped[Array, " admissions *entry"]
    ) -> Shaped[Array, " slots *entry"]:
        return leaf.at[admitted.index].set(entries, mode="drop")

    return replace(
        slots,
        tokens=slots.tokens.at[slot, position].set(tokens, mode="drop"),
        length=put(slots.length, admitted.length),
        max_length=put(slots.max_length, admitted.max_length),
        done=slots.done.at[admitted.index].set(False, mode="drop"),
        sampling=jax.tree.map(put, slots.sampling, admitted.sampling),
        encoded=jax.tree.map(put, slots.encoded, admitted.encoded),
        adapter=jax.tree.map(put, slots.adapter, admitted.adapter),
        lookup=None
        if slots.lookup is None or slots.answers is None
        else slots.lookup.admit(slots.answers.rates, admitted.index, tokens, slot, position),
    )


def remember(slots: SlotState, slot: Int32[Array, ""]) -> SlotState:
    """Add the answer of a slot to those in which proposals are looked up for all slots."""
    assert slots.answers is not None, "a runtime that does not speculate"
    prompt_length = slots.sampling.prompt_length[slot]
    answers = slots.answers.remember(slots.tokens[slot], prompt_length, slots.length[slot])
    return replace(slots, answers=answers)


def extend(slots: SlotState, extensions: Extensions) -> SlotState:
    index, start, count = extensions.index, extensions.start, extensions.count
    offset = jnp.arange(extensions.tokens.shape[1])
    slot = jnp.where(offset < count[:, None], index[:, None], slots.done.shape[0])
    position = start[:, None] + offset
    return replace(
        slots,
        tokens=slots.tokens.at[slot, position].set(extensions.tokens, mode="drop"),
        length=slots.length.at[index].max(start + count, mode="drop"),
    )


def forget_answers(slots: SlotState) -> SlotState:
    """Drop the answers in which proposals are looked up for all slots."""
    assert slots.answers is not None, "a runtime that does not speculate"
    empty = Answers.empty(slots.tokens.shape[1])
    return replace(slots, answers=replace(empty, rates=slots.answers.rates))


def append(
    slots: SlotState,
    index: Int32[Array, " rows"],  # the rows' slots; the number of slots skips a row
    live: Bool[Array, " rows"],
    token: Int32[Array, " rows"],
    finite: Bool[Array, " rows"],  # whether there is a token
) -> SlotState:
    """Append each live row's token to its slot, and make the slots that it ends inert."""
    num = slots.done.shape[0]
    accepted = live & finite
    safe = jnp.minimum(index, num - 1)
    length = slots.length[safe]
    new_length = length + accepted.astype(length.dtype)
    stops = (token[:, None] == slots.sampling.stop_ids[safe]).any(1)
    ended = live & (stops | (new_length >= slots.max_length[safe]) | ~finite)
    where = jnp.where(accepted, index, num)
    return replace(
        slots,
        tokens=slots.tokens.at[where, length].set(token, mode="drop"),
        length=slots.length.at[where].set(new_length, mode="drop"),
        done=slots.done.at[jnp.where(ended, index, num)].set(True, mode="drop"),
        lookup=None if slots.lookup is None else slots.lookup.append(slots.tokens, where, length),
    )


def pack_moves(
    config: EngineConfig, moves: Sequence[tuple[int, int]]
) -> Int32[np.ndarray, "2 moves"]:
    """Return arguments of `move` and `move_states` for at most MOVES_A_CALL (from, to) slots."""
    places = np.full((2, MOVES_A_CALL), config.max_slots, np.int32)
    places[0] = 0
    if moves:
        places[:, : len(moves)] = np.transpose(moves)
    return places


def pack_edits(
    config: EngineConfig, released: Sequence[int], page_updates: Sequence[tuple[int, int, int]]
) -> SlotEdits:
    """Return arguments of `edit` for at most PAGE_UPDATES_A_CALL updates, as NumPy arrays."""
    flags: Any = np.zeros(config.max_slots, np.bool_)  # NumPy where fields say Array
    flags[list(released)] = True
    entries: Any = np.full((PAGE_UPDATES_A_CALL, 3), config.max_slots, np.int32)
    if page_updates:
        entries[: len(page_updates)] = page_updates
    return SlotEdits(flags, entries)


def admissions_by_call(
    config: EngineConfig, admissions: Sequence[Admission]
) -> Iterator[Sequence[Admission]]:
    some: list[Admission] = []
    num_tokens = 0
    for new in admissions:
        num_tokens += len(new.tokens)
        if some and (len(some) == ADMISSIONS_A_CALL or num_tokens > config.max_context):
            yield some
            some, num_tokens = [], len(new.tokens)
        some.append(new)
    if some:
        yield some


def pack_admissions(
    config: EngineConfig, admissions: Sequence[Admission], num_tokens: int = 0
) -> tuple[Admitted, Int32[np.ndarray, " tokens"]]:
    """Return arguments of one call of `admit`, as NumPy arrays of at least `num_tokens` tokens."""
    num = ADMISSIONS_A_CALL

    def full(value: int) -> Any:
        return np.full(num, value, np.int32)

    lengths = [len(new.tokens) for new in admissions]
    index, start = full(config.max_slots), full(np.iinfo(np.int32).max)
    length, max_length, encoded = (full(0) for _ in range(3))
    adapter = full(-1)
    tokens = np.zeros(bucket(max(num_tokens, sum(lengths)), config.admission_buckets), np.int32)
    used = 0
    for i, new in enumerate(admissions):
        index[i], start[i], length[i] = new.slot, used, lengths[i]
        tokens[used : used + lengths[i]] = new.tokens
        used += lengths[i]
        encoded[i] = len(new.request.encoder_prompt)
        if new.request.adapter is not None:
            adapter[i] = new.request.adapter.index
        max_length[i] = new.request.end_length(new.max_length, new.sample_index)
    sampling = pack_sampling([(new.request, new.sample_index) for new in admissions], num)
    admitted = Admitted(
        index,
        start,
        length,
        max_length,
        sampling,
        encoded if config.has_encoder else None,
        adapter if config.max_adapters else None,
    )
    return admitted, tokens


def pieces(extensions: Sequence[Extension]) -> list[Extension]:
    """Return the extensions in pieces of at most TOKENS_AN_EXTENSION tokens."""
    num = TOKENS_AN_EXTENSION
    return [
        Extension(each.slot, each.start + i, each.tokens[i : i + num])
        for each in extensions
        for i in range(0, len(each.tokens), num)
    ]


def pack_extensions(config: EngineConfig, extensions: Sequence[Extension]) -> Extensions:
    """Return arguments of `extend` for at most EXTENSIONS_A_CALL pieces, as NumPy arrays."""
    index: Any = np.full(EXTENSIONS_A_CALL, config.max_slots, np.int32)
    start: Any = np.zeros(EXTENSIONS_A_CALL, np.int32)
    count: Any = np.zeros(EXTENSIONS_A_CALL, np.int32)
    tokens: Any = np.zeros((EXTENSIONS_A_CALL, TOKENS_AN_EXTENSION), np.int32)
    for i, each in enumerate(extensions):
        index[i], start[i], count[i] = each.slot, each.start, len(each.tokens)
        tokens[i, : len(each.tokens)] = each.tokens
    return Extensions(index, start, count, tokens)
