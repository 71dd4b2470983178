"""Tokens to text as they come, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final


class StreamDecoder(Protocol):
    """Incremental detokenizer: the pieces joined are the text of all tokens."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


@final
class TextAssembler:
    """The text of one sample so far, and how much of it may be shown.

    Text that could still become a stop string is held back.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str]):
        self.text = ""
        self._decoder = decoder
        self._stops = stops
        self._num_shown = 0

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take tokens in, one by one.

        Returns:
          How many of them were used up when a stop string was complete (the text now ends before
          it), or None when none was.
        """
        if not self._stops:
            self.text += self._decoder.push(token_ids)
            return None
        for used, token_id in enumerate(token_ids, 1):
            searched = max(0, len(self.text) - max(map(len, self._stops)) + 1)
            self.text += self._decoder.push([token_id])
            found = [at for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
            if found:
                self.text = self.text[: min(found)]
                return used
        return None

    def finish(self) -> None:
        """No more tokens: take in what the decoder held back, unless a stop string cut it off."""
        self.text += self._decoder.flush()

    def take(self, *, is_final: bool) -> str:
        """Text not taken before that is certain to be part of the answer."""
        end = len(self.text) if is_final else len(self.text) - self._num_held_back()
        piece = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return piece

    def _num_held_back(self) -> int:
        """Length of the longest ending that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
