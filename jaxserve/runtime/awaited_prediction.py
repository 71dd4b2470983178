"""The prediction that one request awaits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import final

from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request

# Takes a prediction that comes after its request was submitted.
Late = Callable[[LengthPrediction], None]


@final
class AwaitedPrediction:
    """A thread-safe handle of the prediction of one request, which may come at any time.

    It is in the request that `wait` returns, or `submitted` has it told, or it never comes.
    """

    def __init__(self, request: Request):
        self.request = request
        self._lock = threading.Lock()
        self._is_answered = threading.Event()
        self._prediction: LengthPrediction | None = None
        self._goes_without = False
        # None until the engines know the request.
        self._late: Late | None = None

    def wait(self, seconds: float) -> Request:
        """Return the request, with its prediction if that comes within so many seconds."""
        self._is_answered.wait(seconds)
        with self._lock:
            if self._prediction is not None:
                return replace(self.request, prediction=self._prediction)
            self._goes_without = True
            return self.request

    def submitted(self, late: Late) -> None:
        """Note that the engines have the request that `wait` returned.

        Args:
          late: called once with a prediction that came after `wait`, on any thread.
        """
        with self._lock:
            self._late = late
            prediction = self._prediction if self._goes_without else None
        if prediction is not None:
            late(prediction)

    def answer(self, prediction: LengthPrediction | None) -> bool:
        """Give the prediction, None for none; return whether it came late."""
        with self._lock:
            self._prediction = prediction
            self._is_answered.set()
            is_late = self._goes_without and prediction is not None
            late = self._late
        if is_late and late is not None and prediction is not None:
            late(prediction)
        return is_late
