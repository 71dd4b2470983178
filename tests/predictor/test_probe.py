"""A probe learns from activations, and its readings improve estimates and do no harm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.predictor import (
    LengthBuckets,
    LengthDistributions,
    LengthProbe,
    ProbeConfig,
    Refinement,
    TrainingConfig,
    train_probe,
)
from jaxserve.predictor.probe_training import compare_remaining
from tests.predictor.probes import BUCKETS, INTERVAL, WIDTH, planted

CONFIG = ProbeConfig(layer=1, width=WIDTH, hidden_size=16)
TRAINING = TrainingConfig(batch_size=128, learning_rate=1e-2, num_epochs=12, patience=4)
FLAT = Refinement(buckets=BUCKETS, marginal=np.full(BUCKETS.num, 1 / BUCKETS.num))


def _trained(config: ProbeConfig = CONFIG) -> LengthProbe:
    parts = planted(500, seed=1), planted(150, seed=2)
    return train_probe(config, BUCKETS, *parts, TRAINING, interval=INTERVAL, progress=False)[0]


@pytest.fixture(scope="module")
def probe() -> LengthProbe:
    """A probe that was trained on planted activations."""
    return _trained()


def _error(beliefs: np.ndarray, remaining: np.ndarray) -> float:
    expected = LengthDistributions(BUCKETS, beliefs).expected_remaining()
    return float(np.abs(expected - remaining).mean())


@pytest.mark.release
def test_it_learns_what_activations_tell(probe):
    """Its error is half of survival's alone, and smaller still with combined readings."""
    new = planted(200, seed=3)
    predicted = {"flat": LengthDistributions(BUCKETS, np.ones((200, BUCKETS.num)))}
    figures = compare_remaining(probe, new, (0, 8, 999), predicted)
    assert {each.elapsed for each in figures} == {0, 8, None}
    assert {each.num for each in figures if each.elapsed == 0} == {200}
    of = {each.name: each for each in figures if each.elapsed is None}
    single, refined = of["single readings"], of["marginal, refined"]
    assert single.error_tokens < 0.5 * of["marginal, survival"].error_tokens
    for measure in ("error_tokens", "cross_entropy"):
        assert getattr(refined, measure) < getattr(single, measure)
        assert getattr(of["flat, refined"], measure) < getattr(of["flat, survival"], measure)
    assert refined.accuracy > single.accuracy and probe.refinement.belief_weight > 0
    expected = predicted["flat"].expected_remaining(0)
    error = float(np.abs(expected - new.lengths).mean())
    [at_first] = [f for f in figures if (f.name, f.elapsed) == ("flat, survival", 0)]
    assert at_first.error_tokens == pytest.approx(error)


@pytest.mark.release
def test_confidence_means_what_it_says(probe):
    """This holds for combined readings and for single ones."""
    new = planted(200, seed=3)
    refinement, logits = probe.refinement, probe.logits(new.activations)
    first = refinement.first(None, len(new.lengths))
    together = refinement.along(logits, new.answer, new.elapsed, first)
    right = BUCKETS.bucket_of(new.remaining)
    for beliefs in (together, probe.predict(new.activations).probabilities):
        assert abs((beliefs.argmax(1) == right).mean() - beliefs.max(1).mean()) < 0.05


@pytest.mark.release
def test_a_linear_head_is_a_head():
    """A head without hidden units learns too."""
    probe = _trained(replace(CONFIG, hidden_size=0))
    new = planted(100, seed=3)
    assert _error(probe.predict(new.activations).probabilities, new.remaining) < 12


@pytest.mark.release
def test_its_quantiles_have_the_requested_miss_rate(probe):
    """The share of remaining lengths that outgrow a quantile is the requested one."""
    new = planted(300, seed=4)
    assert probe.calibration is not None
    for miss_rate in (0.1, 0.3):
        predicted = probe.predict(new.activations)
        reserved = predicted.quantile(probe.calibration.level(miss_rate))
        assert abs((new.remaining > reserved).mean() - miss_rate) < 0.06


@pytest.mark.release
def test_saved_and_loaded(probe, tmp_path):
    """Readings, estimates and quantiles are equal; a folder without a probe is refused."""
    probe.save(tmp_path / "probe")
    loaded = LengthProbe.load(tmp_path / "probe")
    new = planted(20, seed=5)
    np.testing.assert_array_equal(loaded.logits(new.activations), probe.logits(new.activations))
    for name, value in vars(probe.refinement).items():
        np.testing.assert_array_equal(getattr(loaded.refinement, name), value)
    assert loaded.calibration is not None and probe.calibration is not None
    assert loaded.calibration.level(0.1) == probe.calibration.level(0.1)
    assert loaded.config == probe.config
    with pytest.raises(ValueError, match="holds no probe"):
        LengthProbe.load(tmp_path)
    small = _untrained(replace(CONFIG, hidden_size=3))
    small.save(tmp_path / "small")
    (tmp_path / "small" / "probe.json").rename(tmp_path / "probe" / "probe.json")
    with pytest.raises(ValueError, match="does not belong to the probe"):
        LengthProbe.load(tmp_path / "probe")


def _untrained(config: ProbeConfig) -> LengthProbe:
    parts = planted(20, seed=1), planted(20, seed=2)
    training = TrainingConfig(batch_size=128, learning_rate=1e-9, num_epochs=1)
    return train_probe(config, BUCKETS, *parts, training, progress=False)[0]


def test_what_cannot_be_learned_from_is_refused():
    """Activations of another width, and an empty set, are refused."""
    parts = planted(20, seed=1), planted(20, seed=2)
    with pytest.raises(ValueError, match=r"\[readings, 5\]"):
        train_probe(replace(CONFIG, width=5), BUCKETS, *parts, progress=False)
    with pytest.raises(ValueError, match="layer=0"):
        replace(CONFIG, layer=0)


def test_time_passes_between_readings():
    """Estimates that are moved on agree with survival, on any buckets of the prediction."""
    fine = LengthBuckets.equal_width(128, 64)
    refinement = replace(FLAT, buckets=fine, marginal=np.full(64, 1 / 64))
    predicted = LengthDistributions(LengthBuckets.equal_width(40, 4), np.eye(4))
    beliefs = refinement.first(predicted)
    np.testing.assert_allclose(beliefs.sum(1), 1.0)

    def expected(beliefs: np.ndarray) -> np.ndarray:
        return LengthDistributions(fine, beliefs).expected_remaining()

    np.testing.assert_allclose(expected(beliefs), predicted.expected_remaining(), atol=0.5)
    moved = refinement.moved_on(beliefs, np.full(4, 12))
    left = predicted.expected_remaining(12)
    np.testing.assert_allclose(expected(moved)[1:], left[1:], atol=0.5)
    over = refinement.moved_on(beliefs, np.full(4, 500))
    np.testing.assert_array_equal(over, refinement.first(None, 4))


def test_readings_that_say_nothing_change_nothing():
    """NaN, infinite and uniform readings have no effect."""
    beliefs = np.tile(np.arange(1.0, BUCKETS.num + 1), (3, 1))
    beliefs /= beliefs.sum(1, keepdims=True)
    logits = np.zeros((3, BUCKETS.num))
    logits[0, 2], logits[1, 3] = np.nan, np.inf
    np.testing.assert_allclose(FLAT.refined(beliefs, np.zeros(3, int), logits), beliefs)


@pytest.mark.usefixtures("unchecked_shapes")
def test_readings_of_another_probe_are_refused():
    """They raise instead of being combined by accident."""
    with pytest.raises(ValueError, match="one row per sequence"):
        FLAT.refined(np.ones((2, BUCKETS.num)), np.zeros(2), np.zeros((2, 1)))


def test_a_wrong_estimate_is_corrected():
    """A length with a probability of 0 becomes likely after a few readings."""
    beliefs = np.zeros((1, BUCKETS.num))
    beliefs[0, 0] = 1.0
    logits = np.zeros((1, BUCKETS.num))
    logits[0, -1] = 6.0
    for _ in range(4):
        beliefs = FLAT.refined(beliefs, np.zeros(1, int), logits)
    assert beliefs[0, -1] > 0.9


@pytest.mark.parametrize("wrong", [{"marginal": np.ones(2)}, {"interval": 0}, {"temperature": 0.0}])
def test_what_no_refinement_can_be_is_refused(wrong):
    """The error says what is wrong."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(FLAT, **wrong)
