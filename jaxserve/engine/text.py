"""Incremental conversion of tokens to text, and detection of stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final


class StreamDecoder(Protocol):
    """An incremental detokenizer: the joined pieces are the text of all tokens."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def kept(self) -> str:
        """Return the complete characters of the tokens that `push` has returned no text of yet."""
        ...

    def flush(self) -> str: ...


@final
class TextAssembler:
    """The text of one sample so far, and the part of it that may be delivered.

    Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str]):
        self.text = ""
        self._decoder = decoder
        self._stops = stops
        self._num_shown = 0

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens to the text.

        Returns:
          The number of tokens that complete a stop string, before which the text now ends; None if
          no stop string is complete.
        """
        if not self._stops:
            self.text += self._decoder.push(token_ids)
            return None
        for used, token_id in enumerate(token_ids, 1):
            searched = max(0, len(self.text) - max(map(len, self._stops)) + 1)
            self.text += self._decoder.push([token_id])
            # A stop string ends the answer at its own last token, although the decoder may still
            # wait for a byte that changes how the last bytes are shown.
            known = self.text + self._decoder.kept()
            found = [at for stop in self._stops if (at := known.find(stop, searched)) >= 0]
            if found:
                self.text = known[: min(found)]
                return used
        return None

    def whole(self) -> str:
        """Return the text of all tokens so far, with what the decoder has held back."""
        return self.text + self._decoder.kept()

    def finish(self) -> None:
        """Append the text that the decoder held back, unless a stop string has ended the text."""
        self.text += self._decoder.flush()

    def take(self, *, is_final: bool) -> str:
        """Return the new text that is certain to be part of the answer."""
        end = len(self.text) if is_final else len(self.text) - self._num_held_back()
        piece = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return piece

    def _num_held_back(self) -> int:
        """Return the length of the longest suffix of the text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
