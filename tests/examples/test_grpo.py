"""The rollout loop that learns, in short."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest

from examples import grpo
from jaxserve import Runtime
from jaxserve.testing import WrapAll
from tests.common.processes import HEED_INTERRUPTS

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
SHORT = ["--steps=3", "--problems=4", "--group=4", "--worked-steps=2"]


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax does not support the strict promotion of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_a_short_run_draws_its_rewards(tmp_path, capsys):
    """Each step checks that the importance ratio is 1 to the last bit."""
    assert grpo.main([*SHORT, f"--plot={tmp_path / 'reward.svg'}"]) == 0
    assert "unseen sums that are right" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "reward.svg").read_text()


def test_the_runtime_serves_the_arrays_of_the_trainer():
    """After each step all of its arrays are the trainer's own, and answers have its version."""
    options = grpo.build_parser().parse_args(SHORT)
    model = grpo.small_model(seed=0)
    trainer = grpo.Trainer(model, grpo.grpo_loss, 1e-3)
    seen = WrapAll()
    with Runtime(model, trainer.params, wrap_executor=seen, **grpo.SERVING) as rt:
        for number, _ in enumerate(islice(grpo.learn(rt, trainer, grpo.PROBLEMS, options), 2), 1):
            assert rt.weights_version == number
            for served, trained in zip(
                jax.tree.leaves(seen.executors[0].params),
                jax.tree.leaves(trainer.params),
                strict=True,
            ):
                assert served.unsafe_buffer_pointer() == trained.unsafe_buffer_pointer()


def test_wrong_weights_are_noticed():
    """The check of the importance ratio fails if the runtime serves other weights."""
    options = grpo.build_parser().parse_args(SHORT)
    trainer = grpo.Trainer(grpo.small_model(seed=0), grpo.grpo_loss, 1e-3)
    with (
        Runtime(grpo.small_model(seed=1), **grpo.SERVING) as rt,
        pytest.raises(AssertionError, match="not the bits of sampling"),
    ):
        next(grpo.learn(rt, trainer, grpo.PROBLEMS, options))


def test_rewards_and_losses():
    """A sum is right with its full stop alone; an advantage raises what it is given to."""
    assert grpo.reward("17+8=", grpo.encode("25.")) == 1
    assert grpo.reward("17+8=", grpo.encode("25")) == grpo.reward("17+8=", grpo.encode("26.")) == 0
    batch = grpo.Batch.empty(2)
    batch.put(0, "1+1=", grpo.encode("2."), [-1.0, -2.0])
    batch.put(1, "1+1=", grpo.encode("3."), [-1.0, -2.0])
    batch.advantages[:] = 1, -1
    gradient = np.asarray(jax.grad(grpo.grpo_loss)(batch.logprobs, batch))
    assert np.all(gradient[0, 3:5] < 0) and np.all(gradient[1, 3:5] > 0)
    assert np.all(gradient[:, :3] == 0) and np.all(gradient[:, 5:] == 0)
    # An answer that has become far likelier gains nothing more.
    assert np.all(np.asarray(jax.grad(grpo.grpo_loss)(batch.logprobs + 1, batch))[0] == 0)


def test_a_picture_that_cannot_be_written_is_refused_at_once(capsys):
    """The error comes before the training."""
    with pytest.raises(SystemExit):
        grpo.main(["--plot=nowhere/reward.png"])
    assert "nowhere/reward.png" in capsys.readouterr().err


def test_an_interrupt_ends_the_training_and_keeps_its_picture(tmp_path):
    """Ctrl-C gives exit code 130, one line and the picture of what was done, and no traceback."""
    picture = tmp_path / "reward.png"
    program = (
        f"{HEED_INTERRUPTS}; import runpy; runpy.run_module('examples.grpo', None, '__main__')"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program, *SHORT, "--steps=100000", f"--plot={picture}"],
        cwd=ROOT,
        env=os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "standard"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    with running:
        try:
            seen = ""
            while "reward=" not in seen:
                seen += running.stderr.read(1)
            running.send_signal(signal.SIGINT)
            _, rest = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130, rest
    assert "Traceback" not in rest and "stopped after" in rest
    assert picture.read_bytes().startswith(b"\x89PNG")
