"""Prediction of the output lengths of requests before an engine gets them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import jax

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion, Request
from jaxserve.predictor import Calibration, LengthDistributions
from jaxserve.scheduling.admission import Predicted
from jaxserve.scheduling.policy import Policy
from jaxserve.steps.probing import Probe

if TYPE_CHECKING:
    from jaxserve.predictor import OnlineLearner

# Receives a prediction that comes after its request was submitted.
Late = Callable[[LengthPrediction], None]

_log = logging.getLogger(__name__)

# Seconds for which the thread collects requests after the first of a batch; maximum batch.
_WINDOW_S = 0.002
_MAX_BATCH = 64
# Seconds that a request waits for its prediction before it is submitted.
_PATIENCE_S = 0.01


@final
class AwaitedPrediction:
    """A thread-safe handle of the prediction of one request, which may come at any time.

    The request that `wait` returns has the prediction, or the callback of `submitted` gets it.
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
        """Return the request, with its prediction if that comes within `seconds`."""
        self._is_answered.wait(seconds)
        with self._lock:
            if self._prediction is not None:
                return replace(self.request, prediction=self._prediction)
            self._goes_without = True
            return self.request

    def submitted(self, late: Late) -> None:
        """Register a callback for a prediction that comes after `wait`; it runs on any thread."""
        with self._lock:
            self._late = late
            prediction = self._prediction if self._goes_without else None
        if prediction is not None:
            late(prediction)

    def answer(self, prediction: LengthPrediction | None) -> bool:
        """Set the prediction, or None if there is none; return whether it came after `wait`."""
        with self._lock:
            self._prediction = prediction
            self._is_answered.set()
            is_late = self._goes_without and prediction is not None
            late = self._late
        if is_late and late is not None and prediction is not None:
            late(prediction)
        return is_late


class Predictor(Protocol):
    """A length predictor: a `predictor.LengthPredictor`, or an object with its two members."""

    @property
    def calibration(self) -> Calibration | None:
        """Calibration of the distributions; None if they are not calibrated."""
        ...

    def predict(self, prompts: Sequence[str], /) -> LengthDistributions:
        """Return the distribution of each prompt's output length."""
        ...


@final
class Forecaster:
    """Predicts output lengths on a thread, so that no request waits longer than `patience_s`.

    The thread predicts requests in batches of those that come within some milliseconds. A
    prediction that comes after `patience_s` reaches the engine later. If the predictor raises,
    requests continue without predictions, and the first error is logged. The queue never holds a
    request that was refused or has ended.

    Args:
      learner: trains the predictor on ended requests, and is closed by `close`; None for no
        training.
      folder: folder to which `close` saves the trained predictor; None saves nothing.
      device: where a loaded predictor computes; None for the default.

    Attributes:
      num_failed: number of requests without a prediction because the predictor raised.
      num_late: number of predictions that came after their requests were submitted.
      seconds: seconds that the thread spent in predicting.
    """

    def __init__(
        self,
        predictor: Predictor,
        tokenizer: Any,
        learner: OnlineLearner | None = None,
        folder: Path | None = None,
        *,
        device: Any = None,
        patience_s: float = _PATIENCE_S,
    ):
        self._predictor = predictor
        self._tokenizer = tokenizer
        self.learner = learner
        self._folder = folder
        self._device = device
        self._patience_s = patience_s
        self.num_failed = 0
        self.num_late = 0
        self.seconds = 0.0
        # Handles to predict, the oldest first.
        self._asked: dict[AwaitedPrediction, None] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-predictor", daemon=True)

    @classmethod
    def of(cls, options: RuntimeOptions, policy: Policy, tokenizer: Any) -> Forecaster | None:
        """Return the forecaster that the options describe; None without `predictor`.

        It logs a warning if a policy that uses predictions has no predictor, and raises
        InvalidConfigError if `predictor` cannot predict, `learns` cannot train it, or there is no
        tokenizer for the prompts' text.
        """
        given = options.predictor
        if given is None:
            if options.learns:
                raise InvalidConfigError(
                    "learns=True trains a predictor, but none is given; pass predictor="
                )
            if isinstance(policy.admission, Predicted) and options.probe is None:
                _log.warning(
                    "policy %s has no predictor and reserves for the longest answer, as ORCA does; "
                    "pass predictor= (jaxserve predictor train) or probe=",
                    policy.name,
                )
            return None
        if tokenizer is None:
            raise InvalidConfigError(
                "predictor= reads the prompts' text, but this runtime has no tokenizer; pass "
                "tokenizer= to Runtime, or omit the predictor"
            )
        from jaxserve.predictor import LengthPredictor

        folder = Path(given) if isinstance(given, (str, Path)) else None
        # A loaded predictor leaves the accelerator to the model.
        device = None if folder is None else jax.devices("cpu")[0]
        with _on(device):
            predictor, learner = _loaded(given, learns=options.learns)
            if isinstance(predictor, LengthPredictor) and options.warmup:
                predictor.warm_up(progress=options.progress)
        return cls(predictor, tokenizer, learner, folder, device=device)

    def start(self) -> None:
        """Start to predict and to train; `close` must follow."""
        self._thread.start()
        if self.learner is not None:
            self.learner.start()

    def ask(self, requests: Sequence[Request]) -> list[AwaitedPrediction]:
        """Queue requests for prediction. The caller must `drop` the handles it does not need."""
        asked = [AwaitedPrediction(request) for request in requests]
        with self._changed:
            self._asked.update(dict.fromkeys(asked))
            self._changed.notify()
        return asked

    def wait_for(self, asked: Sequence[AwaitedPrediction]) -> list[Request]:
        """Return the requests of `ask`, with the predictions that come within `patience_s`."""
        end_s = time.monotonic() + self._patience_s
        return [each.wait(max(0.0, end_s - time.monotonic())) for each in asked]

    def drop(self, *asked: AwaitedPrediction) -> None:
        """Remove handles from the queue whose requests were refused or have ended."""
        with self._changed:
            for each in asked:
                self._asked.pop(each, None)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            if batch:
                self._predict(batch)

    def _next_batch(self) -> list[AwaitedPrediction] | None:
        """Return the handles that came within `_WINDOW_S` of the first; None when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked or self._is_closing)
            self._changed.wait_for(
                lambda: len(self._asked) >= _MAX_BATCH or self._is_closing, timeout=_WINDOW_S
            )
            if self._is_closing:
                return None
            batch = list(itertools.islice(self._asked, _MAX_BATCH))
            for each in batch:
                del self._asked[each]
        return batch

    def _predict(self, batch: Sequence[AwaitedPrediction]) -> None:
        begin_s = time.perf_counter()
        predictions: list[LengthPrediction | None]
        try:
            prompts = [self._tokenizer.decode(each.request.given_prompt) for each in batch]
            with _on(self._device):
                predicted = self._predictor.predict(prompts)
            calibration = self._predictor.calibration
            predictions = [
                LengthPrediction(predicted.buckets, row, calibration)
                for row in predicted.probabilities
            ]
            if len(predictions) != len(batch):
                raise ValueError(f"{len(predictions)} predictions for {len(batch)} prompts")
        except Exception:
            if not self.num_failed:
                _log.exception("the length predictor failed; requests go on without predictions")
            self.num_failed += len(batch)
            predictions = [None] * len(batch)
        self.seconds += time.perf_counter() - begin_s
        for each, prediction in zip(batch, predictions, strict=True):
            self.num_late += each.answer(prediction)

    def append(self, request: Request, completion: Completion) -> None:
        """Give the learner the lengths of a request's samples (`RequestLog`).

        Cancelled and failed samples are left out. A sample that reached its limit counts with the
        length of the limit, because it will have that length again.
        """
        if self.learner is None:
            return
        ended = [each for each in completion.samples if each.finish_reason in ("stop", "length")]
        prompt = self._tokenizer.decode(request.given_prompt) if ended else ""
        for sample in ended:
            self.learner.observe(prompt, len(sample.token_ids), _likeliest(request))

    def close(self) -> None:
        """Stop predicting and training, and save the trained predictor."""
        if self._thread.is_alive():
            with self._changed:
                self._is_closing = True
                self._changed.notify()
            self._thread.join()
        if self.learner is not None:
            self.learner.close()
            if self._folder is not None:
                self.learner.save(self._folder)


def _on(device: Any) -> AbstractContextManager[None]:
    return nullcontext() if device is None else jax.default_device(device)


def _likeliest(request: Request) -> int | None:
    if request.prediction is None:
        return None
    return int(request.prediction.probabilities.argmax())


def _loaded(given: Any, *, learns: bool) -> tuple[Any, OnlineLearner | None]:
    """Return the predictor, and its learner with `learns`, or raise InvalidConfigError."""
    from jaxserve.predictor import LengthPredictor, OnlineLearner

    if isinstance(given, (str, Path)):
        try:
            if not learns:
                return LengthPredictor.load(given), None
            learner = OnlineLearner.load(given)
        except ValueError as error:
            raise InvalidConfigError(f"predictor={str(given)!r}: {error}") from error
        return learner.predictor, learner
    if not callable(getattr(given, "predict", None)):
        raise InvalidConfigError(
            f"predictor={given!r} has no method `predict`; pass a predictor.LengthPredictor, or "
            "the folder of one"
        )
    if not learns:
        return given, None
    if not isinstance(given, LengthPredictor):
        raise InvalidConfigError(
            f"learns=True cannot train predictor={given!r}; pass a predictor.LengthPredictor, or "
            "learns=False"
        )
    return given, OnlineLearner(given)


def load_probe(given: Any) -> Probe | None:
    """Return the probe of the option `probe`: a probe, the folder of one, or None."""
    if given is None:
        return None
    if not isinstance(given, (str, Path)):
        if getattr(given, "refinement", None) is None:
            raise InvalidConfigError(
                f"probe={given!r} has no `refinement`; pass a predictor.LengthProbe, or the folder "
                "of one"
            )
        return given
    from jaxserve.predictor import LengthProbe

    try:
        return LengthProbe.load(given)
    except ValueError as error:
        raise InvalidConfigError(f"probe={str(given)!r}: {error}") from error
