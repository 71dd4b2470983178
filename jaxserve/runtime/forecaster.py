"""Requests get a prediction of their answers' lengths on their way in."""

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
    """What a runtime asks for lengths: a `predictor.LengthPredictor`, or anything like it."""

    @property
    def calibration(self) -> Calibration | None:
        """What promises are kept with."""
        ...

    def predict(self, prompts: Sequence[str], /) -> LengthDistributions:
        """The distribution of each prompt's output length."""
        ...


@final
class Forecaster:
    """Predicts on the thread that asks, all prompts of a batch at once. Thread-safe.

    A predictor that raises leaves its requests without predictions, which policies can do with;
    the first time is logged.

    Args:
      learner: is told of answers that have ended, and is closed with this. None learns nothing.
      folder: where what was learned is saved then; None for nowhere.

    Attributes:
      learner: as given.
      num_failed: requests that got none for that reason.
      seconds: spent in predicting, over all threads.
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
        """From `predictor` and `learns`; a policy that does without is warned of.

        Raises:
          InvalidConfigError: no predictor, or no tokenizer to show it prompts with.
        """
        given = options.predictor
        if given is None:
            if options.learns:
                raise InvalidConfigError(
                    "learns=True needs a predictor to go on training; give predictor="
                )
            if isinstance(policy.admission, Predicted):
                _log.warning(
                    "policy %s has no predictor and reserves for the longest answer, as ORCA does; "
                    "give predictor= (jaxserve predictor train)",
                    policy.name,
                )
            return None
        if tokenizer is None:
            raise InvalidConfigError(
                "predictor= reads the prompts' text, and this runtime has no tokenizer; pass "
                "tokenizer= to Runtime, or leave the predictor out"
            )
        from predictor import LengthPredictor

        predictor, learner = _loaded(given, learns=options.learns)
        if isinstance(predictor, LengthPredictor) and options.warmup:
            predictor.warm_up(progress=options.progress)
        folder = Path(given) if isinstance(given, (str, Path)) else None
        return cls(predictor, tokenizer, learner, folder)

    def start(self) -> None:
        """Begin to learn; to be closed from then on."""
        if self.learner is not None:
            self.learner.start()

    def with_predictions(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests, each with its prediction."""
        if not requests:
            return []
        begin_s = time.perf_counter()
        try:
            prompts = [self._tokenizer.decode(request.prompt) for request in requests]
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
                _log.exception("the length predictor fails; requests go on without predictions")
            self.num_failed += len(requests)
            return list(requests)
        finally:
            self.seconds += time.perf_counter() - begin_s

    def append(self, request: Request, completion: Completion) -> None:
        """Let the learner know how long a request's answers were; a `RequestLog`.

        Answers that were cancelled or failed say nothing. One that reached its limit would have
        been longer, and is learned as long as that: so long it will be again.
        """
        if self.learner is None:
            return
        for sample in completion.samples:
            if sample.finish_reason in ("stop", "length"):
                prompt = self._tokenizer.decode(request.prompt)
                self.learner.observe(prompt, len(sample.token_ids), _likeliest(request))

    def close(self) -> None:
        """Stop learning, and save what was learned."""
        if self.learner is not None:
            self.learner.close()
            if self._folder is not None:
                self.learner.save(self._folder)


def _likeliest(request: Request) -> int | None:
    """The bucket that was thought likeliest."""
    if request.prediction is None:
        return None
    return int(request.prediction.probabilities.argmax())


def _loaded(given: Any, *, learns: bool) -> tuple[Any, OnlineLearner | None]:
    """The predictor itself, and what goes on training it.

    Raises:
      InvalidConfigError: it cannot predict, or not learn.
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
    if not hasattr(given, "predict"):
        raise InvalidConfigError(
            f"predictor={given!r} cannot predict; give a predictor.LengthPredictor or a folder"
        )
    if not learns:
        return given, None
    if not isinstance(given, LengthPredictor):
        raise InvalidConfigError(
            f"learns=True trains a predictor.LengthPredictor, and predictor={given!r} is none"
        )
    return given, OnlineLearner(given)


def load_probe(given: Any) -> Probe | None:
    """What `probe=` names: a probe, the folder of one, or None.

    Raises:
      InvalidConfigError: there is none.
    """
    if given is None or hasattr(given, "refinement"):
        return given
    if not isinstance(given, (str, Path)):
        raise InvalidConfigError(
            f"probe={given!r} is none; give a predictor.LengthProbe or the folder of one"
        )
    from predictor import LengthProbe

    try:
        return LengthProbe.load(given)
    except ValueError as error:
        raise InvalidConfigError(f"probe={str(given)!r}: {error}") from error
