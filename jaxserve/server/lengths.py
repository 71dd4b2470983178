"""Predicted lengths of streamed answers, as comments between the events."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from typing import Any, final

from jaxserve.engine.answers import Piece
from jaxserve.scheduling.lengths import LengthEstimate

# Seconds between two comments on one sample; another estimate has its own at once.
_INTERVAL_S = 0.5
# Parts of the distribution that a comment names.
_LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)


@final
class LengthComments:
    """The comments of one stream: a first one with each sample's first piece, then others.

    A comment is JSON, with the number of tokens that the answer is expected to have
    (`predicted_tokens`), the lengths that 10, 25, 50, 75 and 90 % of such answers do not outgrow
    (`percentiles`), the tokens that have come (`num_tokens`) and the seconds until the end
    (`ends_in_s`): in the first one at `pace_s`, and later at the pace of the stream so far.

    Args:
      max_tokens: limit of each sample; None for the context's.
      pace_s: seconds of a token of other answers lately; None if there were none.

    Attributes:
      predicted: the first `predicted_tokens` of each sample, by the index of its choice.
    """

    def __init__(self, max_tokens: int | None, pace_s: float | None):
        self._most = math.inf if max_tokens is None else max_tokens
        self._pace_s = pace_s
        self._samples: dict[int, _Sample] = {}
        self.predicted: dict[int, int] = {}

    def of(self, pieces: Iterable[tuple[int, Piece]]) -> list[str]:
        """Return the comments that go before pieces, each with the index of its choice."""
        now_s = time.monotonic()
        found = [self._next(index, piece, now_s) for index, piece in pieces]
        return [comment for comment in found if comment is not None]

    def _next(self, index: int, piece: Piece, now_s: float) -> str | None:
        sample = self._samples.get(index)
        if sample is None:
            if piece.estimate is None:
                return None
            sample = self._samples[index] = _Sample(piece.estimate, now_s, len(piece.token_ids))
            return self._comment(index, sample, 0, self._pace_s)
        pace_s = sample.add(piece, now_s)
        is_due = piece.estimate is not None or now_s >= sample.told_s + _INTERVAL_S
        if not is_due or piece.finish_reason is not None:
            return None
        sample.told_s = now_s
        return self._comment(index, sample, sample.num_tokens, pace_s)

    def _comment(self, index: int, sample: _Sample, num_tokens: int, pace_s: float | None) -> str:
        left = min(sample.estimate.expected_remaining(num_tokens), self._most - num_tokens)
        predicted = num_tokens + math.ceil(left)
        self.predicted.setdefault(index, predicted)
        told: dict[str, Any] = {
            "index": index,
            "predicted_tokens": predicted,
            "percentiles": [
                min(sample.estimate.percentile(level, num_tokens), self._most) for level in _LEVELS
            ],
            "num_tokens": num_tokens,
        }
        if pace_s is not None:
            told["ends_in_s"] = round(left * pace_s, 3)
        return json.dumps(told)


@final
class _Sample:
    """What is known of one sample: its estimate, its tokens, and when they came."""

    def __init__(self, estimate: LengthEstimate, now_s: float, num_tokens: int):
        self.estimate = estimate
        self.told_s = self._first_s = now_s
        self.num_tokens = self._num_first = num_tokens

    def add(self, piece: Piece, now_s: float) -> float | None:
        """Take in a later piece; return the seconds of a token, None before they are known."""
        self.estimate = piece.estimate or self.estimate
        self.num_tokens += len(piece.token_ids)
        later = self.num_tokens - self._num_first
        return (now_s - self._first_s) / later if later else None
