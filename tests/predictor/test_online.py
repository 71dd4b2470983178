"""Online learning follows a drift, does no harm, and continues after a restart."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from jaxserve.predictor import (
    Example,
    LengthPredictor,
    OnlineConfig,
    OnlineLearner,
    TrainingConfig,
    train,
)
from jaxserve.predictor.data import columns
from tests.predictor.tiny import FailingTokenizer, examples, tiny_predictor

CONFIG = OnlineConfig(
    batch_size=16,
    learning_rate=3e-3,
    max_epochs=40,
    capacity=256,
    adopt_every=8,
    holdout_every=4,
    holdout_size=48,
    min_holdout=24,
    max_share=1.0,
)


def _stream(num: int, seed: int, times: int = 1) -> list[Example]:
    """Return examples whose first word decides the length: up to 12 tokens, or `times` that."""
    made = examples(num, seed)
    return [Example(e.prompt, times * max(1, round(0.3 * e.output_length))) for e in made]


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory):
    """A predictor trained on lengths up to 12."""
    predictor = tiny_predictor()
    config = TrainingConfig(batch_size=32, learning_rate=3e-3, num_epochs=3, patience=3)
    train(predictor, _stream(1500, 0), _stream(200, 1), config, progress=False)
    predictor.calibrate(*columns(_stream(400, 2)))
    folder = tmp_path_factory.mktemp("predictor")
    predictor.save(folder)
    return folder


def _error(predictor: LengthPredictor, new: list[Example]) -> float:
    """Return the mean absolute error in tokens."""
    prompts, lengths = columns(new)
    return float(np.abs(predictor.predict(prompts).expected_remaining() - lengths).mean())


def _follow(learner: OnlineLearner, stream: list[Example], every: int = 8) -> None:
    """Observe all examples, and learn a step after a fixed number of them."""
    for number, one in enumerate(stream):
        learner.observe(one.prompt, one.output_length)
        if number % every == every - 1:
            learner.step_once()


@pytest.mark.release
def test_it_follows_a_drift(trained_folder):
    """Lengths triple; after 600 requests the error relative to them is as small as before."""
    learner = OnlineLearner.load(trained_folder, CONFIG)
    before, new = _stream(400, 10), _stream(400, 11, times=3)
    usual = _error(learner.predictor, before)
    _follow(learner, _stream(200, 12))
    assert _error(learner.predictor, before) < 1.2 * usual
    drifted = _error(learner.predictor, new)
    assert drifted > 3 * 1.5 * usual
    _follow(learner, _stream(600, 13, times=3), every=2)
    assert _error(learner.predictor, new) < 3 * 1.2 * usual
    missed = np.mean(
        [
            one.output_length > learner.predictor.reserve(one.prompt, miss_rate=0.2)
            for one in new[:200]
        ]
    )
    assert missed < 0.35
    counters = learner.counters
    assert counters.adoptions > 0 and counters.observed == 800
    assert 200 < counters.mispredicted < 800


@pytest.fixture(scope="module")
def untrained_folder(tmp_path_factory):
    predictor = tiny_predictor()
    predictor.calibrate(*columns(_stream(100, 2)))
    folder = tmp_path_factory.mktemp("untrained")
    predictor.save(folder)
    return folder


@pytest.mark.parametrize(
    ("folder", "num"),
    [
        ("untrained_folder", 60),
        pytest.param("trained_folder", 600, marks=pytest.mark.release),
    ],
)
def test_adopting_never_makes_the_holdout_worse(request, folder, num):
    """Whatever is learned, half of it noise at a high rate, adopted parameters are not worse."""
    often = {"adopt_every": 2, "min_holdout": 8}
    wild = OnlineConfig(**(vars(CONFIG) | often | {"learning_rate": 0.1, "patience": 3}))
    learner = OnlineLearner.load(request.getfixturevalue(folder), wild)
    random = np.random.default_rng(0)
    num_compared = 0
    for number, one in enumerate(_stream(num, 14, times=3)):
        is_noise = random.random() < 0.5
        learner.observe(one.prompt, int(random.integers(1, 41)) if is_noise else one.output_length)
        if number % 4 < 3:
            continue
        for step in range(3):
            before, adoptions = learner.holdout_loss(), learner.counters.adoptions
            learner.step_once()
            # The first step takes in what was observed, so that losses are of other requests.
            if step and learner.counters.adoptions > adoptions:
                assert learner.holdout_loss() <= before
                num_compared += 1
    assert num_compared > 0 and learner.counters.rejections > 0


@pytest.mark.release
def test_stopped_saved_and_gone_on(trained_folder, tmp_path):
    """A learner that was saved half-way has the same bits at the end as one that was not."""
    whole, cut = (OnlineLearner.load(trained_folder, CONFIG) for _ in range(2))
    stream = _stream(240, 15, times=2)
    _follow(whole, stream)
    _follow(cut, stream[:120])
    cut.save(tmp_path / "state")
    again = OnlineLearner.load(tmp_path / "state")
    assert again.config == CONFIG
    _follow(again, stream[120:])
    prompts = [one.prompt for one in stream[:30]]
    np.testing.assert_array_equal(again.predictor.logits(prompts), whole.predictor.logits(prompts))
    assert again.predictor.reserve(prompts[0]) == whole.predictor.reserve(prompts[0])
    counted = [vars(learner.counters) | {"seconds": 0} for learner in (again, whole)]
    assert counted[0] == counted[1]
    for learner in (again, whole):
        learner.save(tmp_path / "end")
    assert LengthPredictor.load(tmp_path / "end").predict(prompts)


@pytest.mark.release
def test_the_thread_learns_beside_predictions(trained_folder):
    """Observations from many threads do not wait; predictions continue; closing is quick."""
    learner = OnlineLearner.load(trained_folder, CONFIG)
    params = learner.predictor.params
    with learner:

        def feed(seed: int) -> None:
            for one in _stream(150, seed, times=3):
                learner.observe(one.prompt, one.output_length)

        feeders = [threading.Thread(target=feed, args=(20 + i,)) for i in range(4)]
        for feeder in feeders:
            feeder.start()
        for feeder in feeders:
            feeder.join()
        until_s = time.perf_counter() + 60
        while learner.counters.adoptions == 0 and time.perf_counter() < until_s:
            learner.predictor.predict(["w1 w2 w3"])
        assert learner.is_learning
    assert not learner.is_learning
    assert learner.counters.observed == 600 and learner.counters.adoptions > 0
    assert learner.predictor.params is not params
    steps = learner.counters.steps
    learner.observe("w1", 3)
    assert (learner.counters.observed, learner.counters.steps) == (600, steps)
    learner.close()


@pytest.mark.release
def test_a_small_share_of_the_time(trained_folder):
    """Learning takes at most a twentieth of the time plus its last piece of work."""
    config = OnlineConfig(**(vars(CONFIG) | {"max_share": 0.05, "burst_s": 0.05}))
    learner = OnlineLearner.load(trained_folder, config)
    learner.start()
    begin_s = time.perf_counter()
    for one in _stream(256, 30):
        learner.observe(one.prompt, one.output_length, predicted=0)
    time.sleep(2.0)
    learner.close()
    elapsed_s = time.perf_counter() - begin_s
    assert learner.counters.steps > 0
    # The announced cost is the previous one; a busy machine may slow one piece of work down.
    assert learner.counters.seconds < 0.05 * elapsed_s + 0.5


@pytest.mark.release
def test_observing_never_raises():
    """Invalid observations are skipped, and prompts of any length are accepted."""
    learner = OnlineLearner(tiny_predictor(), CONFIG)
    for prompt, length in [("w1", 0), ("w1", -3), (object(), 5), ("w1", "long"), ("w1", None)]:
        learner.observe(prompt, length)
    assert learner.counters.observed == 0
    learner.observe(np.zeros(1000, np.int32), 5)
    learner.observe("w1 " * 1000, 5)
    assert not learner.step_once()
    assert learner.counters.observed == 2


@pytest.mark.release
def test_a_failure_ends_learning_and_nothing_else(caplog):
    """The failure is logged once; predictions and observations continue."""
    tokenizer = FailingTokenizer()
    learner = OnlineLearner(tiny_predictor(tokenizer=tokenizer), CONFIG)
    learner.start()
    with caplog.at_level(logging.ERROR):
        tokenizer.error = RuntimeError("out of memory")
        learner.observe("w1", 5)
        until_s = time.perf_counter() + 30
        while learner.is_learning and time.perf_counter() < until_s:
            time.sleep(0.01)
    assert not learner.is_learning
    assert [record.message for record in caplog.records].count(
        "online training has stopped; the predictor keeps its parameters"
    ) == 1
    tokenizer.error = None
    learner.observe("w1", 5)
    assert len(learner.predictor.predict(["w1 w2"])) == 1
    learner.close()


@pytest.mark.release
def test_too_little_to_learn_from():
    """There is no step before there is a batch, and none after the allowed epochs."""
    config = OnlineConfig(
        **(vars(CONFIG) | {"batch_size": 32, "max_epochs": 1, "holdout_every": 1000})
    )
    learner = OnlineLearner(tiny_predictor(), config)
    assert not learner.step_once()
    for one in _stream(64, 40):
        learner.observe(one.prompt, one.output_length)
    assert [learner.step_once() for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"holdout_every": 1}, "holdout_every=1 is not allowed; pass 2 or more"),
        ({"min_holdout": 300}, "min_holdout=300 is not allowed; pass at most holdout_size=256"),
        ({"max_share": 0.0}, "max_share=0.0 .* not allowed; pass a share"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 are not allowed; .* a rate over 0"),
    ],
)
def test_settings_that_make_no_sense(given, said):
    """The error has the given and the allowed values."""
    with pytest.raises(ValueError, match=said):
        OnlineConfig(**given)
