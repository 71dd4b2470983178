"""Training learns, stops early, resumes after an interrupt, and predictions survive loading."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.predictor import (
    Example,
    LengthPredictor,
    TrainingConfig,
    evaluate,
    split,
    split_in_three,
    train,
)
from jaxserve.predictor.data import padded, read_jsonl, shuffled_batches, write_jsonl
from jaxserve.predictor.evaluation import LinearBaseline, Majority, prompt_lengths
from jaxserve.predictor.training import wait_for_earlier
from jaxserve.sharding import make_mesh
from tests.predictor.tiny import BUCKETS, examples, tiny_predictor

CONFIG = TrainingConfig(batch_size=32, learning_rate=3e-3, num_epochs=4, patience=4)


@pytest.mark.release
def test_it_learns_what_decides_the_length():
    """It is far better than a constant bucket, and than a baseline on the prompts' lengths."""
    trained = tiny_predictor()
    learned, new = examples(1500), examples(300, seed=2)
    train(trained, learned, examples(200, seed=1), CONFIG, progress=False)
    prompts, lengths = [e.prompt for e in new], np.asarray([e.output_length for e in new])
    figures = evaluate(BUCKETS, trained.logits(prompts), lengths)
    seen = np.asarray([e.output_length for e in learned])
    for baseline in (Majority(BUCKETS), LinearBaseline(BUCKETS, prompt_lengths)):
        fitted = baseline.fit([e.prompt for e in learned], seen)
        assert evaluate(BUCKETS, fitted.logits(prompts), lengths).accuracy < 0.4
    assert figures.accuracy > 0.6


def test_reservations_after_calibration():
    """At most the requested share outgrows them, whatever was learned; before there are none."""
    predictor = tiny_predictor()
    with pytest.raises(ValueError, match="not calibrated"):
        predictor.reserve("w1 w2")
    held_out, new = examples(400, seed=3), examples(400, seed=4)
    predictor.calibrate([e.prompt for e in held_out], [e.output_length for e in held_out])
    level = predictor.calibration.level(0.1)
    reserved = predictor.predict([e.prompt for e in new]).quantile(level)
    missed = np.mean([e.output_length > length for e, length in zip(new, reserved, strict=True)])
    assert missed < 0.15
    assert predictor.reserve(new[0].prompt, miss_rate=0.1) == reserved[0]


def test_saved_and_loaded(tmp_path):
    """Predictions and reservations are equal; a folder without a predictor raises."""
    predictor = tiny_predictor()
    prompts = [e.prompt for e in examples(70, seed=5)]
    predictor.calibrate(prompts, [e.output_length for e in examples(70, seed=5)])
    predictor.save(tmp_path / "own")
    predictor.save(tmp_path / "own")
    loaded = LengthPredictor.load(tmp_path / "own")
    np.testing.assert_array_equal(loaded.logits(prompts), predictor.logits(prompts))
    assert loaded.reserve(prompts[0]) == predictor.reserve(prompts[0])
    with pytest.raises(ValueError, match="holds no predictor"):
        LengthPredictor.load(tmp_path)


@pytest.mark.release
def test_cut_off_and_gone_on(tmp_path):
    """Training that was interrupted after an epoch ends like one that was not."""
    learn, held_out = examples(200), examples(60, seed=1)
    config = TrainingConfig(batch_size=32, learning_rate=3e-3, num_epochs=3, patience=3)
    whole = tiny_predictor()
    wanted = train(whole, learn, held_out, config, progress=False)
    cut = tiny_predictor()

    class Interrupted(Exception):
        pass

    asked = 0
    original = cut.logits_of

    def interrupting(tokens, params=None):
        nonlocal asked
        asked += 1
        if asked == 3:
            raise Interrupted
        return original(tokens, params)

    cut.logits_of = interrupting
    with pytest.raises(Interrupted):
        train(cut, learn, held_out, config, checkpoints=tmp_path, progress=False)
    again = tiny_predictor(seed=9)
    got = train(again, learn, held_out, config, checkpoints=tmp_path, progress=False)
    np.testing.assert_allclose(got.losses, wanted.losses, rtol=1e-5)
    prompts = [e.prompt for e in held_out]
    np.testing.assert_allclose(again.logits(prompts), whole.logits(prompts), rtol=1e-4, atol=1e-5)


@pytest.mark.release
def test_training_over_a_mesh():
    """Batches split over two devices give the losses of one."""
    learn, held_out = examples(128), examples(40, seed=1)
    config = TrainingConfig(batch_size=32, learning_rate=3e-3, num_epochs=1)
    alone = train(tiny_predictor(), learn, held_out, config, progress=False)
    mesh = make_mesh(data=2)
    shared = train(tiny_predictor(), learn, held_out, config, mesh=mesh, progress=False)
    np.testing.assert_allclose(shared.losses, alone.losses, rtol=1e-4)


@pytest.mark.release
def test_training_ends_when_it_gets_no_better():
    """If lengths are random, patience ends the training, and the best epoch is kept."""
    random = np.random.default_rng(0)
    noise = [Example(e.prompt, int(random.integers(1, 41))) for e in examples(300)]
    predictor = tiny_predictor()
    history = train(
        predictor,
        noise[:200],
        noise[200:],
        TrainingConfig(batch_size=20, learning_rate=1e-2, num_epochs=30, patience=2),
        progress=False,
    )
    assert len(history.losses) < 30
    assert len(history.losses) - 1 - history.best_epoch == 2
    with pytest.raises(ValueError, match="0 examples"):
        train(predictor, [], noise, progress=False)


def test_conversations_are_never_torn_apart():
    """All prompts of a conversation are on one side; shares are about the requested ones."""
    all_of_them = examples(2000)
    learn, held_out = split(all_of_them, held_out=0.2)
    assert not {e.conversation for e in learn} & {e.conversation for e in held_out}
    assert abs(len(held_out) / 2000 - 0.2) < 0.03
    assert set(split(all_of_them[:500], held_out=0.2)[1]) <= set(held_out)
    with pytest.raises(ValueError, match="share between"):
        split(all_of_them, held_out=1.0)


def test_three_parts():
    """No conversation is in two parts; the test part does not depend on the use of the rest."""
    all_of_them = examples(2000)
    parts = split_in_three(all_of_them, held_out=0.2, seed=3)
    assert [
        abs(len(part) / 2000 - share) < 0.03
        for part, share in zip(parts, (0.6, 0.2, 0.2), strict=True)
    ] == [True] * 3
    names = [{e.conversation for e in part} for part in parts]
    assert sum(map(len, names)) == len(set.union(*names))
    with pytest.raises(ValueError, match="between 0 and a half"):
        split_in_three(all_of_them, held_out=0.5)


@pytest.mark.release
def test_half_precision_learns_too():
    """Computation is in bfloat16, parameters stay float32, and the loss falls about as much."""
    learn, held_out = examples(320), examples(60, seed=1)
    losses = []
    for dtype in ("float32", "bfloat16"):
        predictor = tiny_predictor()
        config = TrainingConfig(
            batch_size=32, learning_rate=3e-3, num_epochs=4, patience=4, dtype=dtype
        )
        # Flax's LayerNorm computes float32 means of bfloat16 without a cast.
        with jax.numpy_dtype_promotion("standard"):
            losses.append(train(predictor, learn, held_out, config, progress=False).losses[-1])
        assert {leaf.dtype for leaf in jax.tree.leaves(predictor.params)} == {jnp.dtype("float32")}
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.15)
    with pytest.raises(ValueError, match="dtype='int8' is not allowed"):
        TrainingConfig(dtype="int8")


@pytest.mark.release
def test_parameters_change_hands_at_once():
    """Parameters and calibration are replaced together; embeddings may use other parameters."""
    predictor, other = tiny_predictor(), tiny_predictor(seed=1)
    prompts = [e.prompt for e in examples(20)]
    before, old = predictor.embeddings(prompts), predictor.params
    fitted = other.calibrate(prompts, [e.output_length for e in examples(20)])
    predictor.adopt(other.params, fitted)
    np.testing.assert_array_equal(predictor.logits(prompts), other.logits(prompts))
    assert predictor.reserve(prompts[0]) == other.reserve(prompts[0])
    assert not np.array_equal(predictor.embeddings(prompts), before)
    np.testing.assert_array_equal(predictor.embeddings(prompts, old), before)


def test_jsonl_there_and_back(tmp_path):
    """Written examples are read; an invalid line is named."""
    wanted = [Example("naïve\nprompt", 3, "a"), Example("w1", 40)]
    write_jsonl(tmp_path / "e.jsonl", wanted)
    assert list(read_jsonl(tmp_path / "e.jsonl")) == wanted
    with (tmp_path / "e.jsonl").open("a") as file:
        file.write('\n{"prompt": "x"}\n')
    with pytest.raises(ValueError, match=r"e.jsonl:4: KeyError: 'output_length'"):
        list(read_jsonl(tmp_path / "e.jsonl"))
    with pytest.raises(ValueError, match="pass 1 or more"):
        Example("w1", 0)


def test_batches_have_texts_of_about_one_length():
    """Every text comes once; padding goes to the next size; long prompts lose their middle."""
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    batches = shuffled_batches(lengths, 16, np.random.default_rng(1))
    assert sorted(np.concatenate(batches)) == list(range(500))
    spread = [np.ptp(lengths[batch]) for batch in batches]
    assert np.mean(spread) < 10
    ids, mask = padded([np.arange(5), np.arange(33)], 3)
    assert ids.shape == (3, 64) and mask.sum(1).tolist() == [5, 33, 1]
    encoder = tiny_predictor().encoder
    words = [f"w{i}" for i in range(50)]
    (short,) = encoder.tokens([" ".join(words)])
    assert len(short) == 32 and short[0] == 2 and short[-1] == 51


class _Loss:
    """A loss on the device, which is there when it was asked for three times."""

    num_asked = 0

    def is_ready(self) -> bool:
        self.num_asked += 1
        return self.num_asked >= 3


@pytest.mark.fast
def test_at_most_two_steps_run_behind_the_newest():
    """Ctrl-C ends what is in flight, not an epoch that was dispatched ahead."""
    losses: list[Any] = []
    for _ in range(6):
        losses.append(_Loss())
        wait_for_earlier(losses)
    assert [loss.num_asked for loss in losses] == [3] * 4 + [0] * 2
