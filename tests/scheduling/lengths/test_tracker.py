"""The tracker, driven by an engine whose probe has made-up logits."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.predictor import Calibration, LengthBuckets, LengthDistributions, Refinement
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.testing import Trace
from tests.common.tiers import some
from tests.scheduling.simulated import engine_of, request_of
from tests.scheduling.test_traces import PREDICTED

PROBED = LengthBuckets((0, 5, 10, 20, 40))
MARGINAL = np.asarray([0.1, 0.2, 0.4, 0.3])
REFINEMENT = Refinement(buckets=PROBED, marginal=MARGINAL, belief_weight=0.5, interval=3)
GIVEN = LengthPrediction(
    LengthBuckets.equal_width(40, 4),
    np.asarray([0.7, 0.1, 0.1, 0.1]),
    Calibration(1.0, np.linspace(0.0, 1.0, 99)),
)


CONFIG = EngineConfig(
    page_size=4,
    num_pages=100,
    max_slots=4,
    max_context=120,
    max_step_tokens=32,
    max_decode_iterations=1,
)


def _engine(
    refinement: Refinement | None,
    reading: Callable[[Request, int, int], np.ndarray] | None = None,
    policy: str | Policy = "auto",
) -> Engine:
    probe = dict(refinement=refinement, reading=reading)
    return engine_of(policy, CONFIG, **probe, reads_context=False)


def _request(
    name: str = "a", length: int = 30, prediction: LengthPrediction | None = None
) -> Request:
    return request_of(name, prediction=prediction, max_tokens=None, forced_length=length)


def _only(engine: Engine, request: Request) -> tuple[Sequence, LengthTracker]:
    (sequence,) = engine.add(request)
    return sequence, engine.scheduler.lengths


def test_nothing_is_known_without_a_prediction_and_without_a_probe():
    """There is no estimate of the sequence, and none of all sequences."""
    sequence, lengths = _only(_engine(None), _request())
    assert lengths.estimate(sequence) is lengths.first_estimate(sequence) is None
    assert lengths.forecast([sequence]) is None and lengths.forecast([]) is None


def test_with_a_probe_alone_an_answer_is_as_long_as_others_were():
    """This holds until the first reading."""
    sequence, lengths = _only(_engine(REFINEMENT), _request())
    estimate, forecast = lengths.estimate(sequence), lengths.forecast([sequence])
    assert estimate is not None and forecast is not None
    assert estimate.likeliest_length == 20
    mean = LengthDistributions(PROBED, MARGINAL[None]).expected_remaining()
    np.testing.assert_allclose(estimate.expected_length, mean[0])
    np.testing.assert_allclose(forecast.expected_remaining(), mean)


def test_a_prediction_keeps_its_buckets_and_its_calibration_until_something_was_read():
    """The probe has other buckets, on which estimates of several sequences are combined."""
    engine = _engine(REFINEMENT)
    sequence, lengths = _only(engine, _request(prediction=GIVEN))
    (other,) = engine.add(_request("b"))
    estimate, forecast = lengths.estimate(sequence), lengths.forecast([sequence, other])
    assert estimate is not None and forecast is not None
    assert estimate.prediction is GIVEN
    expected = forecast.expected_remaining()
    assert abs(expected[0] - estimate.expected_length) < 0.5
    unread = lengths.estimate(other)
    assert unread is not None and abs(expected[1] - unread.expected_length) < 1e-9


@pytest.mark.parametrize("given", [None, GIVEN])
def test_estimates_are_those_of_the_refinement_step_by_step(given):
    """Every third token updates the previous estimate, moved on by the tokens in between."""
    logits = {t: np.random.default_rng(t).normal(size=PROBED.num) for t in range(40)}
    engine = _engine(REFINEMENT, lambda request, sample, elapsed: logits[elapsed])
    sequence, lengths = _only(engine, _request(prediction=given))
    newest = lengths.estimate(sequence)
    predicted = None
    if given is not None:
        predicted = LengthDistributions(given.buckets, given.probabilities[None])
    belief, at, seen = REFINEMENT.first(predicted), 0, []
    while engine.has_work:
        engine.step()
        now = lengths.estimate(sequence)
        if now is None or now is newest:
            continue
        newest = now
        passed = np.asarray([now.at - at])
        belief = REFINEMENT.refined(belief, passed, logits[now.at][None])
        np.testing.assert_allclose(now.prediction.probabilities, belief[0])
        forecast = lengths.forecast([sequence])
        assert forecast is not None
        since = np.asarray([sequence.num_planned_outputs - now.at])
        np.testing.assert_allclose(
            forecast.expected_remaining(),
            LengthDistributions(PROBED, belief).expected_remaining(since),
        )
        at = now.at
        seen.append(at)
    assert seen == list(range(0, 30, 3))
    assert lengths.num_refined == len(seen)


def test_a_reading_that_is_not_finite_changes_nothing():
    """The next finite one counts, although the interval is not over."""
    nan = np.full(PROBED.num, np.nan)
    engine = _engine(REFINEMENT, lambda request, sample, t: nan if t < 5 else np.zeros(PROBED.num))
    sequence, lengths = _only(engine, _request())
    first, seen = lengths.estimate(sequence), []
    while engine.has_work:
        engine.step()
        newest = lengths.estimate(sequence)
        if newest is not None and newest is not first:
            seen.append(newest.at)
    assert sorted(set(seen)) == list(range(5, 29, 3))
    assert lengths.num_refined == len(set(seen))


def test_readings_that_cannot_be_used_are_logged_once(caplog):
    """All answers come, and estimates stay the same."""
    engine = _engine(REFINEMENT, lambda request, sample, elapsed: np.zeros(PROBED.num + 1))
    sequences = [_only(engine, _request(name))[0] for name in "abc"]
    with caplog.at_level(logging.ERROR):
        while engine.has_work:
            engine.step()
    assert [len(sequence.output) for sequence in sequences] == [30] * 3
    assert engine.scheduler.lengths.num_refined == 0
    assert caplog.text.count("the probe's readings cannot be used") == 1


def test_an_answer_that_begins_anew_has_its_first_estimate_again():
    """Its place among the waiting sequences is the first one, too."""
    policy = next(each for each in PREDICTED if each.name == "quantiles")
    engine = _engine(
        REFINEMENT, lambda request, sample, elapsed: np.asarray([0, 0, 0, 30.0]), policy
    )
    sequence, lengths = _only(engine, _request(length=60))
    scheduler = engine.scheduler
    first, key = lengths.estimate(sequence), scheduler.order_keys.of(sequence)
    for keeps_output in (True, False):
        while len(sequence.output) < 10:
            engine.step()
        engine.drain()
        newest = lengths.estimate(sequence)
        assert newest is not None and newest is not first
        scheduler.restart(sequence, keeps_output=keeps_output)
        assert lengths.estimate(sequence) is (newest if keeps_output else first)
        assert (scheduler.order_keys.of(sequence) == key) is not keeps_output
        if keeps_output:
            sequence_length = len(sequence.output)
            while len(sequence.output) == sequence_length:
                engine.step()
    while engine.has_work:
        engine.step()
    assert len(sequence.output) == 60


@pytest.mark.parametrize("probe", some([None, "any"], 1))
def test_nothing_is_held_of_sequences_that_have_ended(probe):
    """They end by themselves, at a limit, cancelled or failed, running or waiting."""
    for seed in range(12):
        trace = Trace(seed, with_faults=seed % 2 == 0, probe=probe)
        engine, rng = trace.engine(PRESETS["s3"]), random.Random(seed)
        sequences = [s for request in trace.requests for s in engine.add(request)]
        while engine.has_work:
            if rng.random() < 0.1:
                engine.scheduler.end(rng.choice(sequences), "cancelled")
            engine.step()
            live = [s for s in sequences if s.phase is not Phase.FINISHED]
            assert len(engine.scheduler.order_keys) == len(live), f"seed {seed}"
            known = [s for s in live if probe or s.request.prediction is not None]
            assert len(engine.scheduler.lengths) == len(known), f"seed {seed}"
        assert engine.scheduler.lengths.forecast(sequences) is None


def test_samples_are_refined_each_by_itself():
    """Two samples of one request have equal first estimates and then differ."""

    def reading(request: Request, sample: int, elapsed: int) -> np.ndarray:
        return 10.0 * np.eye(PROBED.num)[3 * sample]

    engine = _engine(REFINEMENT, reading)
    request = _request()
    params = replace(request.params, n=2, temperature=1.0)
    first, second = engine.add(replace(request, params=params))
    lengths = engine.scheduler.lengths
    for _ in range(8):
        engine.step()
    short, long = lengths.estimate(first), lengths.estimate(second)
    assert short is not None and long is not None
    assert short.likeliest_length == short.at + 5 and long.likeliest_length == long.at + 40
