"""Proposals for the next tokens of slots: what followed their newest tokens at an earlier place.

Earlier places are found by hashes of the newest 1, 2, 4 and 8 tokens, in the slot's own tokens and
in finished answers. So a lookup costs the same for every context length. A hash collision may
overwrite an entry; the proposed tokens are compared, so a wrong or missing entry costs only a
proposal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

# Numbers of newest tokens that are looked up, best first.
_ORDERS = (8, 4, 2, 1)
_LONGEST = _ORDERS[0]
# For each order, slots' own tokens and finished answers are looked up.
_NUM_SOURCES = 2 * len(_ORDERS)
_FACTORS = tuple(0x9E3779B1 * (2 * i + 1) % 2**32 for i in range(_LONGEST))
# Tokens of finished answers that are kept, and entries of their index.
_ANSWER_TOKENS, _ANSWER_ENTRIES = 1 << 16, 1 << 18
# Last tokens of the prompt that are kept before an answer, so that its beginning can be found.
_LEADING = _LONGEST
# Decay of a source's earlier hits and misses per new proposal, in a slot and in all.
_MEMORY, _LONG_MEMORY = 0.9, 0.99
# A new slot starts from the rates of all slots, weighted as this number of proposals.
_PRIOR = 2.0
_ITERATIONS_TO_FORGIVE = 100
# The least estimated gain in tokens per time for which an iteration computes proposals.
_LEAST_GAIN = 1.04


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lookup:
    """The index of each slot's own tokens, and how often proposals were right."""

    # Hash of some tokens -> position that followed them last; 0 for none.
    index: Int32[Array, "slots entries"]
    rates: Float32[Array, "slots sources 2"]  # hits and misses of each source, weighted by age

    @classmethod
    def empty(cls, num_slots: int, max_context: int) -> Lookup:
        # Twice the entries of a whole context, so that few are overwritten.
        num_entries = 1 << (2 * len(_ORDERS) * max_context - 1).bit_length()
        return cls(
            jnp.zeros((num_slots, num_entries), jnp.int32),
            jnp.ones((num_slots, _NUM_SOURCES, 2), jnp.float32),
        )

    def admit(
        self,
        rates: Float32[Array, "sources 2"],  # hits and misses of each source in all slots
        admitted: Int32[Array, " admissions"],
        tokens: Int32[Array, " tokens"],
        slot: Int32[Array, " tokens"],
        position: Int32[Array, " tokens"],
    ) -> Lookup:
        """Reset the admitted slots and index their tokens, given slot and position of each.

        Tokens of one slot are consecutive; the number of slots skips a token.
        """
        newest = _newest_at_each(jnp.pad(tokens, (_LONGEST, 0)))[: len(tokens)]
        entries = _entries(newest, position, self.index.shape[1])
        index = self.index.at[admitted].set(0, mode="drop")
        index = index.at[slot[:, None], entries].max(position[:, None], mode="drop")
        prior = _PRIOR * rates / rates.sum(1, keepdims=True)
        return Lookup(index, self.rates.at[admitted].set(prior, mode="drop"))

    def append(
        self,
        tokens: Int32[Array, "slots max_context"],
        slot: Int32[Array, " rows"],
        length: Int32[Array, " rows"],
    ) -> Lookup:
        """Index the next tokens of slots, at position `length`; the number of slots skips a row."""
        newest = _newest(tokens, jnp.minimum(slot, tokens.shape[0] - 1), length)
        entries = _entries(newest, length, self.index.shape[1])
        return replace(
            self, index=self.index.at[slot[:, None], entries].set(length[:, None], mode="drop")
        )


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Answers:
    """The newest finished answers, one after another in a ring."""

    tokens: Int32[Array, " tokens"]  # -1 after each answer
    index: Int32[Array, " entries"]  # hash of some tokens -> place that followed them; 0 for none
    end: Int32[Array, ""]  # where the next answer goes
    # Hits and misses of each source in all slots, weighted by age.
    rates: Float32[Array, "sources 2"]

    @classmethod
    def empty(cls, max_context: int) -> Answers:
        num_tokens = max(_ANSWER_TOKENS, 2 * max_context)
        return cls(
            jnp.full(num_tokens, -1, jnp.int32),
            jnp.zeros(_ANSWER_ENTRIES, jnp.int32),
            jnp.int32(0),
            jnp.ones((_NUM_SOURCES, 2), jnp.float32),
        )

    def remember(
        self,
        tokens: Int32[Array, " max_context"],
        prompt_length: Int32[Array, ""],
        length: Int32[Array, ""],
    ) -> Answers:
        most = tokens.shape[0]
        first = jnp.maximum(prompt_length - _LEADING, 0)
        num = jnp.maximum(length - first, 0)
        start = jnp.where(self.end + num >= len(self.tokens), 0, self.end)
        offset = jnp.arange(most + 1)
        place = jnp.where(offset <= num, start + offset, len(self.tokens))
        answer = tokens[jnp.minimum(first + offset, most - 1)]
        answer = jnp.where(offset < num, answer, -1)
        newest = _newest_at_each(jnp.pad(answer, (_LONGEST, 0), constant_values=-1))[: most + 1]
        entries = _entries(newest, offset, len(self.index))
        entries = jnp.where((offset < num)[:, None], entries, len(self.index))
        return Answers(
            self.tokens.at[place].set(answer, mode="drop"),
            self.index.at[entries].set(place[:, None], mode="drop"),
            jnp.where(num > 0, start + num + 1, self.end),
            self.rates,
        )


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """Proposals for each row, and how many of them an iteration computes."""

    tokens: Int32[Array, "rows num"]
    available: Int32[Array, " rows"]  # number of tokens that are proposed for the row
    num: Int32[Array, " rows"]  # number of them to compute, if any are computed
    source: Int32[Array, " rows"]  # where they are from
    is_worth: Bool[Array, ""]  # whether computing them is expected to pay


def learn(
    rates: Float32[Array, "slots sources 2"],
    total: Float32[Array, "sources 2"],
    slot: Int32[Array, " rows"],
    source: Int32[Array, " rows"],
    hits: Int32[Array, " rows"],
    misses: Int32[Array, " rows"],
) -> tuple[Float32[Array, "slots sources 2"], Float32[Array, "sources 2"]]:
    """Return the rates of slots, and of all, after more proposals; other rows are unchanged."""
    found = jnp.stack([hits, misses], axis=1).astype(jnp.float32)
    old = rates[slot, source]
    new = jnp.where(found.sum(1, keepdims=True) > 0, old * _MEMORY + found, old)
    num = jnp.zeros(len(total), jnp.float32).at[source].add(jnp.minimum(found.sum(1), 1.0))
    total = total * _LONG_MEMORY ** num[:, None]
    return rates.at[slot, source].set(new), total.at[source].add(found)


def propose(
    lookup: Lookup,
    answers: Answers,
    tokens: Int32[Array, "slots max_context"],
    slot: Int32[Array, " rows"],
    length: Int32[Array, " rows"],
    room: Int32[Array, " rows"],
    cost: Float32[Array, ""],  # time of an iteration with proposals, in units of one without
    num: int,
) -> Draft:
    """Return what to compute in the next iteration.

    Of `num` proposals in all, each row gets those that are most likely to become output. `room` is
    the number of tokens that the row may still get; 0 for a row that takes no part.
    """
    found, available, source = look_up(lookup, answers, tokens, slot, length, num)
    return _chosen(found, available, source, lookup.rates[slot, source], room, cost, num)


def expect(
    rates: Float32[Array, "slots sources 2"],
    slot: Int32[Array, " rows"],
    room: Int32[Array, " rows"],
    cost: Float32[Array, ""],
    num: int,
) -> Draft:
    """Return what to compute if a draft model makes `num` proposals in all, equally per row.

    The proposals are made when they are needed; here they are zeros. See `propose` for the
    arguments.
    """
    source = jnp.zeros_like(slot)
    each = num // len(slot)
    found = jnp.zeros((len(slot), each), jnp.int32)
    return _chosen(found, jnp.full_like(slot, each), source, rates[slot, source], room, cost, num)


def forgive(
    rates: Float32[Array, "slots sources 2"], slot: Int32[Array, " rows"]
) -> Float32[Array, "slots sources 2"]:
    """Return the rates after an iteration that did not show whether proposals were right.

    They approach those of an unknown draft model, so that it is tried again.
    """
    old = rates[slot]
    return rates.at[slot].set(old + (1.0 - old) / _ITERATIONS_TO_FORGIVE)


def _chosen(
    found: Int32[Array, "rows num"],
    available: Int32[Array, " rows"],
    source: Int32[Array, " rows"],
    rates: Float32[Array, "rows 2"],
    room: Int32[Array, " rows"],
    cost: Float32[Array, ""],
    num: int,
) -> Draft:
    available = jnp.minimum(available, jnp.maximum(room - 1, 0))
    hits, misses = rates.T
    place = jnp.arange(found.shape[1])
    gains = (hits / (hits + misses))[:, None] ** (place + 1).astype(jnp.float32)
    gains = jnp.where(place < available[:, None], gains, 0.0)
    if found.size <= num:
        gained, chosen = gains.sum(), available
    else:
        # Gains of a row decrease, so the selected ones are its first ones.
        best, where = lax.top_k(gains.reshape(-1), num)
        gained = best.sum()
        chosen = jnp.zeros_like(available).at[where // len(place)].add((best > 0).astype(jnp.int32))
    num_live = (room > 0).sum().astype(jnp.float32)
    # Rows that gain nothing wait for those that do: of many rows, the gain is twice the cost.
    least = num_live * (_LEAST_GAIN * cost - 1.0) * (2.0 - 1.0 / jnp.maximum(num_live, 1.0))
    is_worth = gained > least
    return Draft(found, available, chosen, source, is_worth & (gained > 0))


def look_up(
    lookup: Lookup,
    answers: Answers,
    tokens: Int32[Array, "slots max_context"],
    slot: Int32[Array, " rows"],
    length: Int32[Array, " rows"],
    num: int,
) -> tuple[Int32[Array, "rows num"], Int32[Array, " rows"], Int32[Array, " rows"]]:
    """Return what followed the newest tokens of each row before, how much, and its source.

    The longest match wins, then one in the row itself, then the latest. If fewer than `num` tokens
    follow it, they repeat.
    """
    newest = _newest(tokens, slot, length)
    own = lookup.index[slot[:, None], _entries(newest, length, lookup.index.shape[1])]
    other = answers.index[_entries(newest, length, len(answers.index))]
    order, back = jnp.array(_ORDERS), jnp.arange(_LONGEST)

    def is_match(
        found: Int32[Array, "rows orders longest"], place: Int32[Array, "rows orders"]
    ) -> Bool[Array, "rows orders"]:
        same = (found == newest[:, None]) | (back >= order[:, None])
        return same.all(2) & (place >= order) & (length[:, None] >= order)

    before = jnp.maximum(own[..., None] - 1 - back, 0)
    matches = is_match(tokens[slot[:, None, None], before], own) & (own < length[:, None])
    others = is_match(answers.tokens[jnp.maximum(other[..., None] - 1 - back, 0)], other)
    # [rows, sources]: of each order, own ones first
    matches = jnp.stack([matches, others], axis=2).reshape(len(slot), -1)
    places = jnp.stack([own, other], axis=2).reshape(len(slot), -1)
    source = jnp.argmax(matches, axis=1)
    start = jnp.take_along_axis(places, source[:, None], axis=1)
    offset = jnp.arange(num)
    place = start + offset % jnp.maximum(length[:, None] - start, 1)
    from_own = tokens[slot[:, None], jnp.minimum(place, tokens.shape[1] - 1)]
    from_others = answers.tokens[jnp.minimum(start + offset, len(answers.tokens) - 1)]
    found = jnp.where(source[:, None] % 2 == 0, from_own, from_others)
    available = jnp.cumprod(found >= 0, axis=1).sum(1)
    available = jnp.where(matches.any(1), available, 0)
    return jnp.maximum(found, 0), available.astype(jnp.int32), source.astype(jnp.int32)


def _newest_at_each(tokens: Int32[Array, " tokens"]) -> Int32[Array, "places longest"]:
    """Return the newest tokens before each place from `_LONGEST` on, newest first."""
    num = len(tokens) - _LONGEST + 1
    return jnp.stack([tokens[_LONGEST - 1 - i :][:num] for i in range(_LONGEST)], axis=1)


def _newest(
    tokens: Int32[Array, "slots max_context"],
    slot: Int32[Array, " rows"],
    length: Int32[Array, " rows"],
) -> Int32[Array, "rows longest"]:
    place = length[:, None] - 1 - jnp.arange(_LONGEST)
    return tokens[slot[:, None], jnp.maximum(place, 0)]


def _entries(
    newest: Int32[Array, "rows longest"], num_before: Int32[Array, " rows"], size: int
) -> Int32[Array, "rows orders"]:
    """Return the entries of the newest 8, 4, 2 and 1 tokens; `size` if there are too few."""
    order = jnp.array(_ORDERS)
    words = (newest.astype(jnp.uint32) + 1) * jnp.array(_FACTORS, jnp.uint32)
    hashed = jnp.cumsum(words, axis=1)[:, order - 1] + order.astype(jnp.uint32)
    hashed = (hashed ^ (hashed >> 15)) * jnp.uint32(0x2C1B3C6D)
    hashed ^= hashed >> 12
    entry = (hashed & jnp.uint32(size - 1)).astype(jnp.int32)
    return jnp.where(num_before[:, None] >= order, entry, size)
