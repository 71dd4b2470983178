"""Admission by the peak of memory to come, from the lengths of past answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import PreemptionCost
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True)
class PastFuture:
    """Take pages as tokens come; admit by the peak of the memory in use (arXiv:2507.10150).

    The length of every answer is drawn from the newest 1,000 that have ended (the past), given the
    tokens that it has had. With these lengths, the memory in use peaks at one of the ends (the
    future). An admission must leave the peak of the worst of several draws within the pool, less a
    reserve.

    The number of draws, the reserve, and that the limit of the length counts as one more past
    answer are from the authors' code, since only the paper's abstract could be read. Assumed: until
    an answer has ended, each takes its limit; there the code begins with lengths of 512.

    Attributes:
      reserve_share: share of the pool that stays free.
      num_sampled: lengths that are drawn in all, in at most `max_draws` draws.
    """

    reserve_share: float = 0.03
    num_sampled: int = 200
    max_draws: int = 5
    extends = True

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.planned_length + 1

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> SampledPeak:
        return SampledPeak(running, config, lengths, self)


@final
class SampledPeak:
    """A headroom of what the sequences will take until the peak of the memory in use."""

    def __init__(
        self, running: Seq[Sequence], config: EngineConfig, lengths: LengthTracker, how: PastFuture
    ):
        self._sequences = list(running)
        self._page_size, self._layout = config.page_size, config.page_layout
        self._past = np.sort(np.asarray(lengths.past, np.int64))
        num_draws = 1 + how.num_sampled // max(1, len(running))
        self._num_draws = min(num_draws, how.max_draws)
        self._reserve = math.ceil(how.reserve_share * (config.num_pages - 1))
        # The same draws whenever the same sequences have had as many tokens.
        tokens = sum(each.planned_length for each in running)
        self._rng = np.random.default_rng((tokens, len(lengths.past)))
        self._held, self._left = self._drawn(self._sequences)
        self._asked: tuple[Sequence, tuple[np.ndarray, np.ndarray]] | None = None

    def pages(self, sequence: Sequence, following: Callable[[], Iterable[Sequence]] = tuple) -> int:
        if not self._sequences:
            return 0
        if self._asked is None or self._asked[0] is not sequence:
            own_held, own_left = self._drawn([sequence])
            held = np.append(self._held, own_held)
            self._asked = sequence, (held, np.hstack([self._left, own_left]))
        now = sum(each.kv.table.reservation for each in self._sequences)
        now += sequence.kv.table.pages_for(sequence.planned_length + 1)
        held, left = self._asked[1]
        kept = self._layout.kept_tokens(peak_tokens(held, left), len(held))
        peak = math.ceil(kept / self._page_size)
        return self._reserve + max(0, peak - now)

    def admitted(self, sequence: Sequence) -> None:
        self._sequences.append(sequence)
        if self._asked is not None and self._asked[0] is sequence:
            self._held, self._left = self._asked[1]
        else:
            self._held, self._left = self._drawn(self._sequences)
        self._asked = None

    def advanced(self) -> None:
        """Draw the lengths again, given the new tokens."""
        self._held, self._left = self._drawn(self._sequences)
        self._asked = None

    def _drawn(self, sequences: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens that each holds, and those to come [draws, sequences].

        The last page of a sequence is half empty on average.
        """
        had = np.asarray([each.num_planned_outputs for each in sequences], np.int64)
        limits = had + np.asarray([each.num_outputs_left for each in sequences], np.int64)
        longer = np.searchsorted(self._past, had, side="right")
        shape = self._num_draws, len(sequences)
        drawn = self._rng.integers(longer, len(self._past) + 1, shape)
        lengths = np.append(self._past, np.iinfo(np.int64).max)[drawn]
        held = np.asarray([each.planned_length + 1 for each in sequences], np.float64)
        return held + self._page_size / 2, np.maximum(np.minimum(lengths, limits) - had, 1)


def peak_tokens(held: np.ndarray, left: np.ndarray) -> float:
    """Return the most tokens at any time: just before the i-th last end, i of them run on.

    Args:
      held: tokens of each [sequences].
      left: tokens to come of each [draws, sequences].
    """
    last_first = np.argsort(-left, axis=1, kind="stable")
    runs_on = np.cumsum(held[last_first], axis=1)
    grown = np.take_along_axis(left, last_first, axis=1) * np.arange(1, 1 + len(held))
    return float((runs_on + grown).max())
