"""The prediction that one request awaits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import final

from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request


@final
class AwaitedPrediction:
    """A thread-safe handle of the prediction of one request, which may come at any time.

    It is in the request that `wait` returns, or it is told to `late`, or it never comes. Before
    `submitted` nothing is told, since the engines do not know the request yet.

    Args:
      late: called once with the request's id and a prediction that came after `wait`.
    """

    def __init__(self, request: Request, late: Callable[[str, LengthPrediction], None]):
        self.request = request
        self._late = late
        self._lock = threading.Lock()
        self._is_answered = threading.Event()
        self._prediction: LengthPrediction | None = None
        self._goes_without = False
        self._is_submitted = False

    def wait(self, seconds: float) -> Request:
        """Return the request, with its prediction if that comes within so many seconds."""
        self._is_answered.wait(seconds)
        with self._lock:
            if self._prediction is not None:
                return replace(self.request, prediction=self._prediction)
            self._goes_without = True
            return self.request

    def submitted(self) -> None:
        """Note that the engines have the request that `wait` returned."""
        with self._lock:
            self._is_submitted = True
            prediction = self._prediction if self._goes_without else None
        if prediction is not None:
            self._late(self.request.id, prediction)

    def answer(self, prediction: LengthPrediction | None) -> bool:
        """Give the prediction, None for none; return whether it came late."""
        with self._lock:
            self._prediction = prediction
            self._is_answered.set()
            is_late = self._goes_without and prediction is not None
            tells = is_late and self._is_submitted
        if tells and prediction is not None:
            self._late(self.request.id, prediction)
        return is_late
