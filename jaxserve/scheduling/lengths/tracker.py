"""The owner of what is expected of every sequence's length."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import final

import numpy as np

from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.scheduling.lengths.estimate import LengthEstimate
from jaxserve.scheduling.lengths.forecast import Forecast
from jaxserve.scheduling.lengths.table import LengthTable
from jaxserve.scheduling.plan import StepPlan, StepResult
from jaxserve.scheduling.sequence import Phase, Sequence
from predictor import Refinement

_log = logging.getLogger(__name__)


@final
class LengthTracker:
    """Holds what is expected of each sequence's length, from its submission to its end.

    The first estimate is the request's prediction, or where there is none the distribution of all
    answers that the probe was trained on. Readings of the probe refine it. Without a prediction and
    without a probe a sequence has no estimate.

    A reading can be wrong in any way: one that is not finite changes nothing, and the first one
    that cannot be used at all is logged and is the last.

    Args:
      refinement: how a reading changes an estimate; None without a probe.

    Attributes:
      num_refined: estimates that a reading has changed.
    """

    def __init__(self, refinement: Refinement | None = None):
        self.num_refined = 0
        self._refinement = refinement
        self._has_failed = False
        self._first: dict[int, LengthEstimate] = {}
        self._newest: dict[int, LengthEstimate] = {}
        # On the buckets of the probe, or else of the first prediction.
        self._table = None if refinement is None else LengthTable(refinement.buckets)

    def __len__(self) -> int:
        """Return the number of sequences with an estimate."""
        return len(self._first)

    # ---- the scheduler's side ----

    def add(self, sequence: Sequence) -> None:
        """Begin with a sequence that was submitted."""
        prediction = first_prediction(sequence.request, self._refinement)
        if prediction is not None:
            self._first[sequence.key] = LengthEstimate(prediction)
            self.restart(sequence)

    def expect(self, sequence: Sequence, prediction: LengthPrediction) -> bool:
        """Begin with a prediction from the prompt; False, unchanged, if there is an estimate."""
        if sequence.key in self._first:
            return False
        self._first[sequence.key] = LengthEstimate(prediction)
        self.restart(sequence)
        return True

    def restart(self, sequence: Sequence) -> None:
        """Return to the first estimate, because the answer begins anew."""
        first = self._first.get(sequence.key)
        if first is not None:
            self._set(sequence.key, first)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._first.pop(sequence.key, None)
        self._newest.pop(sequence.key, None)
        if self._table is not None:
            self._table.drop(sequence.key)

    def refine(self, plan: StepPlan, result: StepResult, rows: Seq[tuple[int, Sequence]]) -> None:
        """Take in the readings of a step whose tokens were appended.

        Args:
          rows: indices of rows in the plan, each with its sequence.
        """
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

    def estimate(self, sequence: Sequence) -> LengthEstimate | None:
        """Return the newest estimate; None where nothing is known of the sequence's length."""
        return self._newest.get(sequence.key)

    def first_estimate(self, sequence: Sequence) -> LengthEstimate | None:
        """Return the estimate from before the first token."""
        return self._first.get(sequence.key)

    def forecast(
        self, sequences: Seq[Sequence], *, even_if_unknown: bool = False
    ) -> Forecast | None:
        """Return what is expected of sequences together, given the tokens planned so far.

        One without an estimate counts as having any length up to the longest.

        Args:
          even_if_unknown: False for None where no sequence has an estimate; True for None only
            where none had one yet, of these or of others.
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
        """Return the expected output tokens still to come of each sequence.

        One of whose length nothing is known is taken to go to its limit.
        """
        limits = [float(sequence.num_outputs_left) for sequence in sequences]
        forecast = self.forecast(sequences)
        if forecast is None:
            return limits
        unknown = np.asarray([self.estimate(sequence) is None for sequence in sequences])
        return np.where(unknown, limits, forecast.expected_remaining()).tolist()

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
    """Return what is known of an answer's length before it begins, see `LengthTracker`."""
    if request.prediction is not None or refinement is None:
        return request.prediction
    return LengthPrediction(refinement.buckets, refinement.marginal)


def _read_at(sequence: Sequence) -> int:
    """Output tokens that had come: a reading is from before the token that was chosen with it."""
    return len(sequence.output) - 1
