"""Converts tokens to text incrementally, and detects stop strings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol, final


class Detokenizer(Protocol):
    """An incremental detokenizer: the joined pieces are the text of all tokens."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def kept(self) -> str:
        """Return the complete characters of tokens of which `push` has returned no text yet."""
        ...

    def hidden(self, token_id: int) -> str:
        """Return the text of a control token that `push` leaves out; "" for other tokens."""
        ...

    def flush(self) -> str: ...


@final
class TextAssembler:
    """The text of one sample so far, and the part of it that may be delivered.

    Text that may be the beginning of a stop string is held back.

    Args:
      stops: strings that end the text. A control token that the text leaves out is searched for
        too, if one of them contains its text.
      min_tokens: a stop string that ends within this many tokens does not count, as in vLLM.
    """

    def __init__(self, decoder: Detokenizer, stops: Sequence[str], min_tokens: int = 0):
        self.text = ""
        self._decoder = decoder
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_shown = 0
        # The end of the searched text, and for each of its characters its place in the text. Those
        # of a control token that the text leaves out have the place of what follows them.
        self._tail = ""
        self._places: list[int] = []
        self._num_known = 0

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens; return how many complete a stop string, which the text ends before."""
        if not self._stops:
            self.text += self._decoder.push(token_ids)
            return None
        for used, token_id in enumerate(token_ids, 1):
            self.text += self._decoder.push([token_id])
            # A stop string ends the answer at its own last token, although the decoder may still
            # wait for a byte that changes how the last bytes are shown.
            known = self.text + self._decoder.kept()
            num_searched = self._extend_tail(known, self._decoder.hidden(token_id))
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                continue
            starts = [(stop, max(0, num_searched - len(stop) + 1)) for stop in self._stops]
            found = [at for stop, start in starts if (at := self._tail.find(stop, start)) >= 0]
            if found:
                self.text = known[: self._places[min(found)]]
                return used
        return None

    def whole(self) -> str:
        return self.text + self._decoder.kept()

    def finish(self) -> None:
        """Append the text that the decoder held back, unless a stop string has ended the text."""
        self.text += self._decoder.flush()

    def take(self, *, is_final: bool) -> str:
        """Return the new text that is certain to be part of the answer."""
        end = len(self.text) if is_final else self._num_certain()
        piece = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return piece

    def _extend_tail(self, known: str, hidden: str) -> int:
        """Append what a token adds to what is searched; return the length of the tail before."""
        most = max(map(len, self._stops)) - 1
        num_searched = min(len(self._tail), most)
        self._tail = self._tail[len(self._tail) - num_searched :] + known[self._num_known :]
        self._places = self._places[len(self._places) - num_searched :]
        self._places += range(self._num_known, len(known))
        self._num_known = max(self._num_known, len(known))
        if hidden and any(hidden in stop for stop in self._stops):
            self._tail += hidden
            self._places += [len(known)] * len(hidden)
        return num_searched

    def _num_certain(self) -> int:
        """Return the length of the text before the longest suffix that begins a stop string."""
        end, longest = bisect_left(self._places, len(self.text)), 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, end), longest, -1):
                if self._tail.endswith(stop[:length], 0, end):
                    longest = length
                    break
        return self._places[end - longest] if longest else len(self.text)
