"""What is believed of running answers' lengths, kept up to date by a probe's readings."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import final

import numpy as np

from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.scheduling.plan import StepPlan, StepResult
from jaxserve.scheduling.sequence import Phase, Sequence
from predictor import LengthDistributions, Refinement

_log = logging.getLogger(__name__)


@final
class Beliefs:
    """Sets the predictions of sequences: at first from their requests, then from readings.

    Readings can be wrong in any way: those that are not numbers change nothing, and the first that
    cannot be used at all is logged and is the last.

    Args:
      refinement: how readings change beliefs; None where there are none, and predictions stay.

    Attributes:
      num_refined: predictions that a reading has changed.
    """

    def __init__(self, refinement: Refinement | None):
        self.num_refined = 0
        self._refinement = refinement
        self._has_failed = False

    def first(self, request: Request) -> LengthPrediction | None:
        """What is believed before any token, on the probe's buckets where there is a probe."""
        given, refinement = request.prediction, self._refinement
        if refinement is None:
            return given
        predicted = None
        if given is not None:
            predicted = LengthDistributions(given.buckets, given.probabilities[None])
        return LengthPrediction(refinement.buckets, refinement.first(predicted)[0])

    def take_in(self, plan: StepPlan, result: StepResult, rows: Seq[tuple[int, Sequence]]) -> None:
        """The readings of a step whose tokens were appended.

        Args:
          rows: their indices in the plan, and whose they are.
        """
        refinement, logits = self._refinement, result.remaining
        if refinement is None or logits is None or self._has_failed:
            return
        read = [
            (index, sequence)
            for index, sequence in rows
            if sequence.phase in (Phase.RUNNING, Phase.WAITING)
            and plan.rows[index].samples
            and result.num_tokens[index]
            and _is_due(sequence, refinement.interval)
            and np.isfinite(logits[index]).all()
        ]
        if not read:
            return
        try:
            self._refine(
                refinement, [sequence for _, sequence in read], logits[[i for i, _ in read]]
            )
        except Exception:
            self._has_failed = True
            _log.exception("the probe's readings cannot be used; predictions are refined no more")

    def _refine(self, refinement: Refinement, sequences: Seq[Sequence], logits: np.ndarray) -> None:
        beliefs = [each.prediction.probabilities for each in sequences if each.prediction]
        now = np.asarray([_read_at(sequence) for sequence in sequences])
        passed = now - [sequence.predicted_at for sequence in sequences]
        refined = refinement.refined(np.stack(beliefs), passed, logits)
        for sequence, at, row in zip(sequences, now.tolist(), refined, strict=True):
            sequence.prediction = LengthPrediction(refinement.buckets, row)
            sequence.predicted_at = at
            sequence.is_refined = True
        self.num_refined += len(sequences)


def _is_due(sequence: Sequence, interval: int) -> bool:
    return not sequence.is_refined or _read_at(sequence) - sequence.predicted_at >= interval


def _read_at(sequence: Sequence) -> int:
    """Output tokens that had come: a reading is of before the token that was chosen with it."""
    return len(sequence.output) - 1
