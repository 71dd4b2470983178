"""Proposes the next tokens of an answer that the host reads token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

# Numbers of newest tokens that are looked up, best first.
_ORDERS = (8, 4, 2)
# Weight of the earlier proposals after one more.
_MEMORY = 0.9
# The most tokens of a prompt's end that are indexed, and the most that one step indexes: each
# takes microseconds of the engine's thread.
_MAX_PROMPT = 8192
_TOKENS_A_STEP = 512
# The least expected tokens for proposals to be made, since a step with them takes longer.
_LEAST_GAIN = 0.3


@final
class HostLookup:
    """Proposes what followed an answer's newest tokens earlier in it or in the prompt's end.

    It does for one answer what `steps.proposals` does on the device.
    """

    def __init__(self, prompt: Sequence[int]):
        prompt = prompt[-_MAX_PROMPT:]
        self._num_prompt = len(prompt)
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}
        self._num_placed = 0
        self._hits = self._misses = 1.0
        self._next: int | None = None
        self._append(prompt)

    def follow(self, output: Sequence[int]) -> None:
        """Set the answer's tokens: those of the last call and more, or fewer to restart."""
        num_known = len(self._tokens) - self._num_prompt
        if len(output) < num_known:
            prompt = self._tokens[: self._num_prompt]
            self._tokens, self._places, self._next = [], {}, None
            self._num_placed = 0
            self._append(prompt)
            num_known = 0
        self._append(output[num_known:])

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens; none if they are not expected to pay."""
        self._next = None
        for order in _ORDERS:
            place = self._places.get(tuple(self._tokens[-order:]))
            if place is not None and len(self._tokens) >= order:
                break
        else:
            return []
        self._next = self._tokens[place]
        rate = self._hits / (self._hits + self._misses)
        if sum(rate**i for i in range(1, most + 1)) < _LEAST_GAIN:
            return []
        num = len(self._tokens) - place
        return [self._tokens[place + i % num] for i in range(most)]

    def learn(self, output: Sequence[int], num_new: int, num_proposed: int) -> None:
        """Learn from the newest tokens of the output whether proposals were right.

        Call it before `follow`. A step gave `num_new` tokens and computed `num_proposed` proposals.
        A lookup counts even if it was not computed.
        """
        if self._next is None or not num_new:
            return
        num_right = num_new - 1 if num_proposed else int(output[-1] == self._next)
        self._hits = self._hits * _MEMORY + num_right
        self._misses = self._misses * _MEMORY + (num_right < max(1, num_proposed))

    def _append(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        known = self._tokens
        most = self._num_placed + len(tokens) + _TOKENS_A_STEP
        if self._num_placed == 0:
            most = _TOKENS_A_STEP
        for place in range(self._num_placed, min(most, len(known))):
            # It follows the tokens before it.
            for order in _ORDERS:
                if place >= order:
                    self._places[tuple(known[place - order : place])] = place
            self._num_placed = place + 1
