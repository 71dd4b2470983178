"""The expected length of every sequence."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from jaxserve.core.page_layout import ONE_GROUP, PageLayout
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.predictor import LengthBuckets, LengthDistributions, Recalibration, Refinement
from jaxserve.scheduling.plan import StepPlan, StepResult
from jaxserve.scheduling.sequence import Phase, Sequence

# Number of times at which the use of memory is evaluated.
_NUM_TIMES = 32
_TIMES = np.linspace(0.0, 1.0, _NUM_TIMES) ** 2
_FEWEST_ROWS = 64
# The row of sequences without a prediction.
_UNKNOWN = 0
# Answers whose lengths are remembered.
_NUM_PAST = 1_000
_log = logging.getLogger(__name__)


@final
class LengthEstimate:
    """The expected length of one answer, as of its newest prediction or reading. Immutable.

    Lengths are output tokens, counted from the answer's first one. Results are computed once.

    Args:
      prediction: distribution of the output tokens that were still to come.
      at: output tokens that had come at that time; 0 for a prediction from the prompt.
    """

    def __init__(self, prediction: LengthPrediction, at: int = 0):
        self.prediction = prediction
        self.at = at
        self._quantile: tuple[float, int, int] | None = None

    @cached_property
    def likeliest_length(self) -> int:
        """The longest length of the likeliest bucket (S3, section 3.2)."""
        return self.at + self.prediction.likeliest_length

    @cached_property
    def expected_length(self) -> float:
        """The mean, whatever tokens have come since `at`."""
        return self.at + self.prediction.mean_length

    def percentile(self, level: float, num_outputs: int) -> int:
        """Return the length that a share `level` of answers with `num_outputs` tokens keep to."""
        lengths = self.prediction.distribution
        return self.at + int(lengths.quantile(level, num_outputs - self.at)[0])

    def expected_remaining(self, num_outputs: int) -> float:
        lengths = self.prediction.distribution
        return float(lengths.expected_remaining(num_outputs - self.at)[0])

    def tail_mean(self, tail_share: float) -> float:
        """Return the mean length of the longest `tail_share` of answers, whatever came since `at`.

        It is the conditional value at risk at the level `1 - tail_share`.
        """
        lengths = self.prediction.distribution
        start = lengths.quantile(1.0 - tail_share)
        (share_over,) = lengths.survival(0, start.astype(np.float64))[0]
        over = float(share_over * lengths.expected_remaining(start)[0])
        return self.at + float(start[0]) + over / tail_share

    def quantile(self, miss_rate: float, num_outputs: int) -> int:
        """Return a length that at most `miss_rate` of answers outgrow after `num_outputs`."""
        known = self._quantile
        if known is None or known[:2] != (miss_rate, num_outputs):
            length = self.at + self.prediction.quantile(miss_rate, num_outputs - self.at)
            self._quantile = known = (miss_rate, num_outputs, length)
        return known[2]


@final
@dataclass(frozen=True)
class MemoryUse:
    """Tokens in memory at future times [times], over the possible lengths of the sequences."""

    mean: np.ndarray
    variance: np.ndarray

    def plus(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(self.mean + other.mean, self.variance + other.variance)

    def peak(self, margin: float | np.ndarray) -> float:
        """Return the most tokens at any time, plus `margin` deviations.

        An array of margins has those of the first times, and no later ones count.
        """
        num = np.size(margin) if isinstance(margin, np.ndarray) else len(self.mean)
        return float((self.mean[:num] + margin * np.sqrt(self.variance[:num])).max())


def memory_times(longest: float) -> np.ndarray:
    """Return the times of `Forecast.memory`: closer together at first, while most still run."""
    return _TIMES * longest


@final
class Forecast:
    """Survival and memory use of several sequences, given the tokens that each has so far.

    Times are output tokens from now on, for all sequences.

    Args:
      lengths: distribution of the output tokens that were still to come of each [sequences].
      elapsed: output tokens that have come since then, int [sequences].
      left: output tokens up to each one's limit, int [sequences].
    """

    def __init__(self, lengths: LengthDistributions, elapsed: np.ndarray, left: np.ndarray):
        self._lengths = lengths
        self._elapsed = elapsed
        self._left = left

    def expected_remaining(self) -> np.ndarray:
        return np.minimum(self._lengths.expected_remaining(self._elapsed), self._left)

    def survival(self, times: np.ndarray) -> np.ndarray:
        """Return P(still running after `times` more tokens) [sequences, times]."""
        alive = self._lengths.survival(self._elapsed, times)
        # A sequence that is longer than every bucket is assumed to continue to its limit.
        alive[self._elapsed >= self._lengths.buckets.max_length] = 1.0
        alive[:, times <= 0.0] = 1.0
        alive *= times < np.maximum(self._left, 1)[:, None]
        return alive

    def expected_ends(self, times: np.ndarray) -> np.ndarray:
        """Return the mean number of sequences that end within `times` more tokens [times]."""
        return (1.0 - self.survival(times)).sum(0)

    @property
    def longest(self) -> float:
        """The latest time at which the last sequence has ended; at least 1."""
        return float(self.longest_of_each().max())

    def longest_of_each(self) -> np.ndarray:
        """Return the latest time at which each has ended; at least 1 [sequences]."""
        known = np.maximum(self._lengths.buckets.max_length - self._elapsed, 0)
        longest = np.where(known > 0, np.minimum(known, self._left), self._left)
        return np.maximum(longest, 1.0)

    def memory(self, held: np.ndarray, longest: float, layout: PageLayout = ONE_GROUP) -> MemoryUse:
        """Return the memory in use until `longest`, with `held` tokens of each in memory now.

        A sequence that ends frees its memory, so the peak is below the sum of final lengths. A
        token counts once for each page table that keeps it.
        """
        used, free = self._memory(held, longest, layout)
        return MemoryUse(used.sum(0), np.einsum("st,st->t", used, free))

    def memory_of_each(
        self, held: np.ndarray, longest: float, layout: PageLayout = ONE_GROUP
    ) -> list[MemoryUse]:
        """Return the `memory` of each sequence alone, equal to the last bit."""
        used, free = self._memory(held, longest, layout)
        return [MemoryUse(*each) for each in zip(used, used * free, strict=True)]

    def _memory(
        self, held: np.ndarray, longest: float, layout: PageLayout
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean tokens in memory, and those freed, if none ended [sequences, times]."""
        times = memory_times(longest)
        tokens = held[:, None] + times
        if layout.is_grouped:
            tokens = sum(
                group.num_tables * np.minimum(tokens, group.window or np.inf)
                for group in layout.groups
            )
        used = self.survival(times)
        used *= tokens
        return used, tokens - used


@final
class LengthTable:
    """The length distributions of all sequences as one array, on buckets that all rows share.

    A sequence without a row of its own has every length up to the longest with equal probability.
    """

    def __init__(self, buckets: LengthBuckets):
        self._buckets = buckets
        self._recalibration = Recalibration(buckets)
        # As they were set; normalised; and with the two arrays of `LengthDistributions.lines`, so
        # that reading rows computes nothing.
        zeros: np.ndarray = np.zeros((4, _FEWEST_ROWS, buckets.num))
        self._given, self._probabilities, self._rate, self._tail = zeros
        self._set(_UNKNOWN, np.diff(buckets.edges) / buckets.max_length)
        self._at: np.ndarray = np.zeros(_FEWEST_ROWS, np.int64)
        self._row_of: dict[int, int] = {}
        self._free = list(range(_FEWEST_ROWS - 1, _UNKNOWN, -1))

    def put(self, key: int, prediction: LengthPrediction, at: int) -> None:
        """Set the row of a sequence with `at` output tokens, converted from other buckets."""
        row = self._row_of.get(key)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[key] = self._free.pop()
        probabilities = prediction.probabilities
        if prediction.buckets != self._buckets:
            probabilities = prediction.distribution.remaining(0, self._buckets)[0]
        self._set(row, probabilities)
        self._at[row] = at
        if not at:
            self._set_corrected([row], self._probabilities[[row]])

    def note_end(self, key: int, length: int, *, is_whole: bool) -> None:
        """Count an answer whose row was set before it began; see `Recalibration`."""
        row = self._row_of.get(key)
        if row is not None and not self._at[row]:
            predicted = LengthDistributions(self._buckets, self._given[[row]]).probabilities[0]
            self._recalibration.note(predicted, length, is_whole=is_whole)

    @property
    def is_informative(self) -> bool:
        return self._recalibration.is_informative

    @property
    def is_correction_due(self) -> bool:
        return self._recalibration.is_due

    def correct(self, running: Seq[tuple[int, int]]) -> None:
        """Correct the rows that were set before an answer began, by the ends noted so far.

        Args:
          running: keys of sequences that run, and the tokens of each.
        """
        rows = [row for row in self._row_of.values() if not self._at[row]]
        known = LengthDistributions(self._buckets, self._given[rows])
        place = {row: i for i, row in enumerate(rows)}
        read = [
            (place[row], num) for key, num in running if (row := self._row_of.get(key)) in place
        ]
        places = [i for i, _ in read]
        lengths = np.asarray([num for _, num in read], np.int64)
        self._recalibration.update(known.probabilities[places], lengths)
        self._set_corrected(rows, known.probabilities)

    def _set_corrected(self, rows: Seq[int], predicted: np.ndarray) -> None:
        corrected = self._recalibration.corrected(predicted)
        known = LengthDistributions(self._buckets, corrected)
        self._probabilities[rows] = known.probabilities
        self._rate[rows], self._tail[rows] = known.lines

    def drop(self, key: int) -> None:
        row = self._row_of.pop(key, None)
        if row is not None:
            self._free.append(row)

    def rows_of(self, keys: Seq[int]) -> list[int]:
        return [self._row_of.get(key, _UNKNOWN) for key in keys]

    def has_own(self, rows: Seq[int]) -> bool:
        return any(row != _UNKNOWN for row in rows)

    def distributions(self, rows: Seq[int]) -> LengthDistributions:
        lines = self._rate[rows], self._tail[rows]
        return LengthDistributions.known(self._buckets, self._probabilities[rows], lines)

    def probabilities(self, rows: Seq[int]) -> np.ndarray:
        return self._given[rows]

    def at(self, rows: Seq[int]) -> np.ndarray:
        return self._at[rows]

    def _set(self, row: int, probabilities: np.ndarray) -> None:
        known = LengthDistributions(self._buckets, probabilities[None])
        self._given[row], self._probabilities[row] = probabilities, known.probabilities[0]
        (self._rate[row],), (self._tail[row],) = known.lines

    def _grow(self) -> None:
        count = len(self._at)
        self._given, self._probabilities, self._rate, self._tail, self._at = (
            np.concatenate([array, np.zeros_like(array)])
            for array in (self._given, self._probabilities, self._rate, self._tail, self._at)
        )
        self._free = list(range(2 * count - 1, count - 1, -1))


@final
class LengthTracker:
    """Tracks each sequence's expected length, from its submission to its end.

    The first estimate is the request's prediction, or else the distribution of all answers that the
    probe was trained on. Readings of the probe refine it. Without a prediction and without a probe
    a sequence has no estimate.

    A reading that is not finite changes nothing. The first one that raises is logged, and is the
    last.

    Attributes:
      past: output tokens of the newest answers that were not cut short by an error or a
        cancellation; at most 1,000.
      tail: expected tokens of the sequences that `find_tail` found, by their keys.
    """

    def __init__(self, refinement: Refinement | None = None):
        self.num_refined = 0
        self.past: deque[int] = deque(maxlen=_NUM_PAST)
        self.tail: dict[int, float] = {}
        self._refinement = refinement
        self._has_failed = False
        # Sequences that have an estimate.
        self._sequences: dict[int, Sequence] = {}
        self._first: dict[int, LengthEstimate] = {}
        self._newest: dict[int, LengthEstimate] = {}
        # On the buckets of the probe, or else of the first prediction.
        self._table = None if refinement is None else LengthTable(refinement.buckets)

    def __len__(self) -> int:
        return len(self._first)

    # ---- the scheduler's side ----

    def add(self, sequence: Sequence) -> None:
        prediction = first_prediction(sequence.request, self._refinement)
        if prediction is not None:
            self._begin(sequence, prediction)

    def expect(self, sequence: Sequence, prediction: LengthPrediction) -> bool:
        """Set a prediction from the prompt; False, unchanged, if there is an estimate."""
        if sequence.key in self._first:
            return False
        self._begin(sequence, prediction)
        return True

    def _begin(self, sequence: Sequence, prediction: LengthPrediction) -> None:
        self._sequences[sequence.key] = sequence
        self._first[sequence.key] = LengthEstimate(prediction)
        self.restart(sequence)

    def restart(self, sequence: Sequence) -> None:
        """Return to the first estimate, because the answer restarts."""
        first = self._first.get(sequence.key)
        if first is not None:
            self._set(sequence.key, first)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended."""
        if sequence.finish_reason in ("stop", "length") and sequence.output:
            self.past.append(len(sequence.output))
            if self._table is not None:
                is_cut = sequence.num_known >= sequence.max_length
                self._table.note_end(sequence.key, len(sequence.output), is_whole=not is_cut)
        self._first.pop(sequence.key, None)
        self._newest.pop(sequence.key, None)
        self.tail.pop(sequence.key, None)
        self._sequences.pop(sequence.key, None)
        if self._table is not None:
            self._table.drop(sequence.key)
            if self._table.is_correction_due:
                begun = [s for s in self._sequences.values() if s.output]
                self._table.correct([(each.key, len(each.output)) for each in begun])

    def refine(self, plan: StepPlan, result: StepResult, rows: Seq[tuple[int, Sequence]]) -> None:
        """Apply the probe's readings of a step, at these indices of its rows, after its tokens."""
        logits = result.remaining
        if self._refinement is None or logits is None or self._has_failed:
            return
        read = [
            (index, sequence)
            for index, sequence in rows
            if sequence.phase in (Phase.RUNNING, Phase.WAITING)
            and plan.rows[index].samples
            and result.num_tokens[index]
            and self._is_due(sequence, self._refinement.interval)
            and np.isfinite(logits[index]).all()
        ]
        if not read:
            return
        try:
            self._refine(
                self._refinement, [sequence for _, sequence in read], logits[[i for i, _ in read]]
            )
        except Exception:
            self._has_failed = True
            _log.exception("the probe's readings cannot be used; predictions are refined no more")

    # ---- the policies' side ----

    @property
    def are_informative(self) -> bool:
        """Whether estimates say more than the lengths of the newest answers (`Recalibration`).

        Those of a probe are not held against answers.
        """
        return self._table is None or self._refinement is not None or self._table.is_informative

    def estimate(self, sequence: Sequence) -> LengthEstimate | None:
        return self._newest.get(sequence.key)

    def first_estimate(self, sequence: Sequence) -> LengthEstimate | None:
        return self._first.get(sequence.key)

    def forecast(
        self, sequences: Seq[Sequence], *, even_if_unknown: bool = False
    ) -> Forecast | None:
        """Return what is expected of sequences together, given the tokens planned so far.

        One without an estimate counts as having any length up to the longest. The result is None if
        no sequence has an estimate; with `even_if_unknown`, only if none ever had one.
        """
        if self._table is None:
            return None
        rows = self._table.rows_of([sequence.key for sequence in sequences])
        if not (even_if_unknown or self._table.has_own(rows)):
            return None
        planned = np.asarray([sequence.num_planned_outputs for sequence in sequences])
        return Forecast(
            self._table.distributions(rows),
            planned - self._table.at(rows),
            np.asarray([each.max_length - len(each.request.prompt) for each in sequences])
            - planned,
        )

    def expected_tokens(self, sequences: Seq[Sequence]) -> list[float]:
        """Return the expected output tokens still to come of each, or those up to its limit."""
        limits = [float(sequence.num_outputs_left) for sequence in sequences]
        forecast = self.forecast(sequences)
        if forecast is None:
            return limits
        unknown = np.asarray([self.estimate(sequence) is None for sequence in sequences])
        return np.where(unknown, limits, forecast.expected_remaining()).tolist()

    def find_tail(
        self, live: Seq[Sequence], width: int, *, arrivals_an_iteration: float, slack: float
    ) -> bool:
        """Find the sequences that would end last if they waited; return whether `tail` changed.

        `width` sequences at a time share all expected tokens of the `live` ones, so these have
        ended after as many iterations as each of the `width` has tokens. A sequence with an
        estimate that needs at least `1 - slack` of these iterations is in the tail. If a request is
        expected to arrive before all have ended, one has a latency bound, or estimates are not
        informative, there is no tail.
        """
        before, self.tail = self.tail, {}
        if not (width and arrivals_an_iteration < 1.0 and self.are_informative):
            return bool(before)
        forecast = self.forecast(live)
        if forecast is None or any(each.request.has_bounds for each in live):
            return bool(before)
        expected = forecast.expected_remaining()
        num_iterations = float(expected.sum()) / width
        if arrivals_an_iteration * num_iterations < 1.0:
            places = np.flatnonzero(expected >= (1.0 - slack) * num_iterations).tolist()
            known = [place for place in places if live[place].key in self._newest]
            self.tail = {live[place].key: float(expected[place]) for place in known}
        return self.tail != before

    def _set(self, key: int, estimate: LengthEstimate) -> None:
        self._newest[key] = estimate
        if self._table is None:
            self._table = LengthTable(estimate.prediction.buckets)
        self._table.put(key, estimate.prediction, estimate.at)

    def _is_due(self, sequence: Sequence, interval: int) -> bool:
        newest = self._newest[sequence.key]
        is_refined = newest is not self._first[sequence.key]
        return not is_refined or _read_at(sequence) - newest.at >= interval

    def _refine(self, refinement: Refinement, sequences: Seq[Sequence], logits: np.ndarray) -> None:
        assert self._table is not None
        rows = self._table.rows_of([sequence.key for sequence in sequences])
        now = np.asarray([_read_at(sequence) for sequence in sequences])
        passed = now - self._table.at(rows)
        refined = refinement.refined(self._table.probabilities(rows), passed, logits)
        for sequence, at, row in zip(sequences, now.tolist(), refined, strict=True):
            self._set(sequence.key, LengthEstimate(LengthPrediction(refinement.buckets, row), at))
        self.num_refined += len(sequences)


def first_prediction(request: Request, refinement: Refinement | None) -> LengthPrediction | None:
    """Return what is known of an answer's length before it begins, as in `LengthTracker`."""
    if request.prediction is not None or refinement is None:
        return request.prediction
    return LengthPrediction(refinement.buckets, refinement.marginal)


def _read_at(sequence: Sequence) -> int:
    """Return the output tokens at a reading: it precedes the token that was chosen with it."""
    return len(sequence.output) - 1
