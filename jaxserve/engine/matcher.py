"""Where one answer stands in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from jaxserve.core.errors import GrammarTooComplexError

_MAX_MESSAGE = 300


@final
class Matcher:
    """Follows the tokens of one answer. One thread at a time uses it.

    Args:
      inner: an `llguidance.LLMatcher` of its own, before the first token.

    Attributes:
      mask_s: seconds that its masks took on a host thread.
    """

    def __init__(self, inner: Any):
        self.inner = inner
        self.mask_s = 0.0
        self._num_tokens = 0

    def follow(self, output: Sequence[int]) -> None:
        """Stand after these tokens: those of the last call and more, or fewer to begin anew."""
        if len(output) < self._num_tokens:
            self.inner.reset()
            self._num_tokens = 0
        if len(output) > self._num_tokens:
            self.inner.consume_tokens(list(output[self._num_tokens :]))
            self._num_tokens = len(output)

    def forced(self) -> list[int]:
        """Return the tokens that must come next, one after the other."""
        return self.inner.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches the grammar, and nothing can follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    def has_mask(self, seconds: float) -> bool:
        """Count the seconds that a mask took; False if there is none because of an error."""
        self.mask_s += seconds
        return not self.inner.is_error()

    @property
    def error(self) -> GrammarTooComplexError | None:
        """Why the answer cannot go on; None if it can."""
        if not self.inner.is_error():
            return None
        return GrammarTooComplexError(
            f"the answer cannot go on after {self._num_tokens} tokens, since its grammar needs "
            "more time or memory than is allowed, or tokens that the model does not have: "
            f"{first_line(self.inner.get_error())}. Pass a simpler one"
        )


def first_line(message: str) -> str:
    """Return what a message of llguidance says as one line, without its dump of the grammar."""
    if message.startswith("NoExtension"):
        return "no text matches it"
    said = " ".join(message.partition("<non-verbose")[0].split())
    return said.rstrip(".;, ")[:_MAX_MESSAGE]
