"""Prediction of the output lengths of requests before an engine gets them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion, Request
from jaxserve.scheduling.admission.predicted import Predicted
from jaxserve.scheduling.policy import Policy
from jaxserve.steps.probing import Probe
from predictor import Calibration, LengthDistributions

if TYPE_CHECKING:
    from predictor import OnlineLearner

_log = logging.getLogger(__name__)


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
    """A forecaster that predicts all prompts of a batch at once, on the calling thread.

    It is thread-safe. If the predictor raises, requests go on without predictions, and the first
    error is logged.

    Args:
      tokenizer: tokenizer that decodes the prompts to text for the predictor.
      learner: trainer of the predictor on requests that have ended; `close` closes it. None for a
        predictor that is not trained.
      folder: folder to which `close` saves the trained predictor; None saves nothing.

    Attributes:
      learner: the argument `learner`.
      num_failed: number of requests without a prediction because the predictor raised.
      seconds: seconds spent in predicting, over all threads.
    """

    def __init__(
        self,
        predictor: Predictor,
        tokenizer: Any,
        learner: OnlineLearner | None = None,
        folder: Path | None = None,
    ):
        self._predictor = predictor
        self._tokenizer = tokenizer
        self.learner = learner
        self._folder = folder
        self.num_failed = 0
        self.seconds = 0.0

    @classmethod
    def of(cls, options: RuntimeOptions, policy: Policy, tokenizer: Any) -> Forecaster | None:
        """Return the forecaster that the options describe; None without `predictor`.

        It logs a warning if a policy that uses predictions has no predictor.

        Raises:
          InvalidConfigError: `predictor` cannot predict, or `learns` cannot train it, or there is
            no tokenizer for the prompts' text.
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
        from predictor import LengthPredictor

        predictor, learner = _loaded(given, learns=options.learns)
        if isinstance(predictor, LengthPredictor) and options.warmup:
            predictor.warm_up(progress=options.progress)
        folder = Path(given) if isinstance(given, (str, Path)) else None
        return cls(predictor, tokenizer, learner, folder)

    def start(self) -> None:
        """Start to train. The caller must call `close` afterwards."""
        if self.learner is not None:
            self.learner.start()

    def with_predictions(self, requests: Sequence[Request]) -> list[Request]:
        """Return the same requests, each with its prediction."""
        if not requests:
            return []
        begin_s = time.perf_counter()
        try:
            prompts = [self._tokenizer.decode(request.given_prompt) for request in requests]
            predicted = self._predictor.predict(prompts)
            calibration = self._predictor.calibration
            return [
                replace(
                    request,
                    prediction=LengthPrediction(predicted.buckets, row, calibration),
                )
                for request, row in zip(requests, predicted.probabilities, strict=True)
            ]
        except Exception:
            if not self.num_failed:
                _log.exception("the length predictor failed; requests go on without predictions")
            self.num_failed += len(requests)
            return list(requests)
        finally:
            self.seconds += time.perf_counter() - begin_s

    def append(self, request: Request, completion: Completion) -> None:
        """Give the learner the lengths of a request's samples; see `RequestLog`.

        Cancelled and failed samples are left out. A sample that reached its limit counts with the
        length of the limit, because it will have that length again.
        """
        if self.learner is None:
            return
        for sample in completion.samples:
            if sample.finish_reason in ("stop", "length"):
                prompt = self._tokenizer.decode(request.given_prompt)
                self.learner.observe(prompt, len(sample.token_ids), _likeliest(request))

    def close(self) -> None:
        """Stop training, and save the trained predictor."""
        if self.learner is not None:
            self.learner.close()
            if self._folder is not None:
                self.learner.save(self._folder)


def _likeliest(request: Request) -> int | None:
    """Return the bucket with the highest predicted probability."""
    if request.prediction is None:
        return None
    return int(request.prediction.probabilities.argmax())


def _loaded(given: Any, *, learns: bool) -> tuple[Any, OnlineLearner | None]:
    """Return the predictor, and the learner that trains it with `learns`.

    Raises:
      InvalidConfigError: `given` cannot predict, or cannot be trained.
    """
    from predictor import LengthPredictor, OnlineLearner

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
    """Return the probe of the option `probe`: a probe, the folder of one, or None.

    Raises:
      InvalidConfigError: `given` is none of these.
    """
    if given is None:
        return None
    if not isinstance(given, (str, Path)):
        if getattr(given, "refinement", None) is None:
            raise InvalidConfigError(
                f"probe={given!r} has no `refinement`; pass a predictor.LengthProbe, or the folder "
                "of one"
            )
        return given
    from predictor import LengthProbe

    try:
        return LengthProbe.load(given)
    except ValueError as error:
        raise InvalidConfigError(f"probe={str(given)!r}: {error}") from error
