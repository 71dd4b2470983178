"""A runtime with a length predictor has the same answers for any prediction."""

from __future__ import annotations

import logging
import threading
from functools import partial

import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError, QueueFullError, RuntimeClosedError
from jaxserve.predictor import LengthBuckets, LengthDistributions
from jaxserve.testing import FreeCopiesExecutor, SlowExecutor
from jaxserve.testing.tiny import OPTIONS, letter_tokenizer, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.common.waiting import until
from tests.predictor.tiny import tiny_predictor

BUCKETS = LengthBuckets.equal_width(40, 4)
PROMPTS = random_prompts(16, longest=20)
PARAMS = [SamplingParams(max_tokens=None, forced_length=3 + 5 * (i % 7)) for i in range(16)]
# The pool holds about two of the longest requests at the same time.
MEMORY = {"kv_memory": 12 * 2 * 2 * 2 * 8 * 8 * 4}


def _runtime(**options):
    return Runtime(tiny_llama(), tokenizer=letter_tokenizer(), **OPTIONS | options)


class Fixed:
    """A predictor with the same prediction for every prompt."""

    calibration = None

    def __init__(self, probabilities):
        self._probabilities = probabilities

    def predict(self, prompts, /):
        return LengthDistributions(BUCKETS, np.tile(self._probabilities, (len(prompts), 1)))


class Broken:
    """A predictor that raises."""

    calibration = None

    def predict(self, prompts, /):
        raise RuntimeError("no idea")


class Late:
    """A predictor that waits until it may predict, and keeps the sizes of its batches."""

    calibration = None

    def __init__(self):
        self.may_predict = threading.Event()
        self.batches = []

    def predict(self, prompts, /):
        self.batches.append(len(prompts))
        assert self.may_predict.wait(30)
        return LengthDistributions(BUCKETS, np.tile([0, 1.0, 0, 0], (len(prompts), 1)))


PREDICTORS = {
    "zero": Fixed([1.0, 0, 0, 0]),
    "maximum": Fixed([0, 0, 0, 1.0]),
    "unsure": Fixed([0.25] * 4),
    "not numbers": Fixed([np.nan] * 4),
    "broken": Broken(),
}


@pytest.fixture(scope="module")
def expected():
    """Every prompt's answer alone, with enough memory."""
    with _runtime() as rt:
        return [rt.generate(p, params).token_ids for p, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("policy", some(["s3", "auto"], 1))
@pytest.mark.parametrize("name", some(PREDICTORS))
def test_wrong_predictions_cost_time_and_never_tokens(expected, policy, name):
    """Predictions are too short, too long, undecided, NaN, or raise."""
    given = MEMORY | {"policy": policy, "predictor": PREDICTORS[name]}
    with _runtime(wrap_executor=FreeCopiesExecutor, **given) as rt:
        done = rt.generate(PROMPTS, PARAMS)
        stats = rt.stats()
    assert [each.token_ids for each in done] == expected
    if policy == "s3":
        # Requests that need more than 20 tokens of prompt and 10 of the answer outgrow.
        assert (stats.num_outgrown > 0) == (name in ("zero", "unsure", "not numbers"))
        assert stats.num_pages_out == stats.num_pages_in
        assert bool(stats.num_pages_out) == bool(stats.num_outgrown)
    assert stats.predicting_s > 0


def test_a_broken_predictor_is_reported_once(caplog):
    """The log has the traceback; requests go on without predictions."""
    with caplog.at_level(logging.ERROR), _runtime(predictor=Broken()) as rt:
        for prompt in PROMPTS[:3]:
            assert rt.generate(prompt, SamplingParams(max_tokens=2)).error is None
    assert caplog.text.count("the length predictor failed") == 1 and "no idea" in caplog.text


@pytest.mark.parametrize("given", ["/nowhere", 5])
def test_what_is_no_predictor_is_refused(given):
    """The error comes before anything is built, and says what to pass."""
    with pytest.raises(InvalidConfigError, match="predictor"):
        _runtime(predictor=given)


def test_what_is_expected_of_running_requests():
    """The expected length is the predicted one; ended requests are not listed."""
    with _runtime(predictor=PREDICTORS["maximum"], wrap_executor=SlowExecutor) as rt:
        params = SamplingParams(max_tokens=None, forced_length=40)
        pending = rt.submit(PROMPTS[0], params)
        assert rt.outlook()[pending.request_id].num_tokens > 20
        pending.result()
        assert rt.outlook() == {}
    with pytest.raises(RuntimeClosedError):
        rt.outlook()


def test_a_late_prediction_delays_nothing():
    """A request is answered without its prediction; what runs still gets it when it comes."""
    late = Late()
    with _runtime(predictor=late, wrap_executor=SlowExecutor) as rt:
        assert rt.generate(PROMPTS[0], SamplingParams(max_tokens=4)).error is None
        running = rt.submit(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
        assert rt.outlook()[running.request_id].num_tokens > 50  # nothing is known of its length
        late.may_predict.set()
        until(lambda: rt.outlook()[running.request_id].num_tokens <= 30)
        assert not running.future.done()
        running.cancel()
        assert rt.stats().predicting_s > 0


@pytest.mark.release
def test_requests_that_come_together_are_predicted_together():
    """While one batch is predicted, others wait for the next one, and not one by one."""
    late = Late()
    slow = partial(SlowExecutor, step_s=0.05)  # none has ended before it is predicted
    with _runtime(predictor=late, wrap_executor=slow) as rt:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        pending = [rt.submit(PROMPTS[0], params)]
        until(lambda: late.batches)
        pending += [rt.submit(prompt, params) for prompt in PROMPTS[1:]]
        late.may_predict.set()
        until(lambda: sum(late.batches) == len(PROMPTS))
        for each in pending:
            each.cancel()
            assert each.result(30).error is None
    assert len(late.batches) == 2 and late.batches[0] == 1


def test_what_is_refused_is_not_predicted():
    """The queue has room for two requests; a call with three asks the predictor nothing."""
    late = Late()
    with _runtime(predictor=late, max_waiting=2) as rt:
        with pytest.raises(QueueFullError):
            rt.generate(PROMPTS[:3])
        late.may_predict.set()
        assert rt.generate(PROMPTS[0], SamplingParams(max_tokens=2)).error is None
    assert late.batches == [1]


@pytest.mark.release
def test_what_has_ended_is_not_predicted():
    """The predictor is slow with the first request; of the later ones the last still runs."""
    late = Late()
    with _runtime(predictor=late, wrap_executor=SlowExecutor) as rt:
        for prompt in PROMPTS[:6]:
            assert rt.generate(prompt, SamplingParams(max_tokens=2)).predicted_tokens is None
        last = rt.submit(PROMPTS[6], SamplingParams(max_tokens=100, ignore_eos=True))
        late.may_predict.set()
        until(lambda: len(late.batches) == 2)
        assert last.result(30).predicted_tokens == 16
    assert late.batches == [1, 1]


@pytest.mark.release
def test_requests_that_end_go_on_training_the_predictor():
    """Cancelled requests do not train it; closing the runtime ends the training."""
    predictor = tiny_predictor()
    with _runtime(predictor=predictor, learns=True) as rt:
        learner = rt.learner
        assert learner.is_learning
        rt.generate(PROMPTS[:5], SamplingParams(max_tokens=4))
        pending = rt.submit(PROMPTS[5], SamplingParams(max_tokens=100))
        pending.cancel()
        pending.result()
        assert learner.counters.observed == 5
    assert not learner.is_learning


@pytest.mark.release
def test_what_was_learned_survives_a_restart(tmp_path):
    """It is saved beside the predictor when the runtime closes, and loaded by the next one."""
    tiny_predictor().save(tmp_path)
    for total in (5, 10):
        with _runtime(predictor=tmp_path, learns=True) as rt:
            rt.generate(PROMPTS[:5], SamplingParams(max_tokens=4))
            assert rt.learner.counters.observed == total


def test_learning_needs_a_predictor_that_can_learn():
    for given in (None, PREDICTORS["zero"]):
        with pytest.raises(InvalidConfigError, match="learns=True"):
            _runtime(predictor=given, learns=True)


def test_s3_without_a_predictor_says_what_it_does_instead(caplog):
    """It serves as ORCA does, and logs that."""
    with _runtime(policy="s3") as rt:
        assert rt.generate(PROMPTS[0], SamplingParams(max_tokens=2)).error is None
    assert "policy s3 has no predictor" in caplog.text


def test_a_predictor_needs_a_tokenizer():
    with pytest.raises(InvalidConfigError, match="tokenizer"):
        Runtime(tiny_llama(), predictor=PREDICTORS["zero"], **OPTIONS)
