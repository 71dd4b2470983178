"""`jaxserve predictor probe` on a tiny model's own recorded answers."""

from __future__ import annotations

import json

import pytest

from jaxserve.predictor import LengthProbe
from tests.cli.common import SMALL, assert_refused, run

pytestmark = pytest.mark.release

HEAD = "--interval 4 --hidden-size 8 --max-length 64 --num-buckets 5"


@pytest.fixture(scope="module")
def folder(token_model, tmp_path_factory):
    """A folder with a recorded run and a probe that was trained on it."""
    folder = tmp_path_factory.mktemp("probe")
    jobs = [{"prompt": [1, 2, i], "max_tokens": 1 + i % 40, "id": str(i)} for i in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    files = f"--jsonl {folder}/prompts.jsonl --record {folder}/run.jsonl"
    done = run(f"generate {files} --model {token_model} {SMALL}")
    assert done.exit_code == 0, done.stderr
    done = _train(folder, token_model, f"--output {folder}/own --epochs 2 --json")
    assert done.exit_code == 0, done.stderr
    (folder / "said.json").write_text(done.stdout)
    return folder


def _train(folder, model, more: str):
    train = f"predictor probe train {folder}/run.jsonl --model {model} --load random --quiet"
    return run(f"{train} {HEAD} {more}")


def test_training_ends_with_a_probe_and_its_figures(folder):
    """The probe is trained on the recorded run; figures of every way exist at every interval."""
    said = json.loads((folder / "said.json").read_text())
    assert said["trained_on"] + said["calibrated_on"] + said["tested_on"] == 60
    probe = LengthProbe.load(folder / "own")
    assert (probe.layer, probe.width, probe.refinement.interval) == (1, 32, 4)
    assert probe.calibration is not None
    ways = {each["name"] for each in said["figures"]}
    assert ways == {"single readings", "marginal, survival", "marginal, refined"}
    whole = next(f for f in said["figures"] if f["elapsed"] is None)
    at = {f["elapsed"]: f["num"] for f in said["figures"] if f["name"] == whole["name"]}
    assert at[0] == said["tested_on"] > at[16] > at.get(32, 0) and whole["num"] > at[0]


def test_a_probe_is_described(folder):
    """The description has the layer that it reads and the training data."""
    done = run(f"predictor probe show {folder}/own")
    assert done.exit_code == 0 and "after layer 1, 32 wide" in done.stdout
    assert "run.jsonl" in done.stdout


def test_it_serves(folder, token_model):
    """Answers with and without the probe are the same."""
    ask = f"generate --jsonl {folder}/prompts.jsonl --model {token_model} {SMALL}"
    without, with_it = run(ask), run(f"{ask} --probe {folder}/own")
    assert with_it.exit_code == 0, with_it.stderr
    assert with_it.stdout == without.stdout


@pytest.mark.parametrize(
    "more, said",
    [
        ("--output {folder}", "is not empty and holds no probe"),
        ("--output {folder}/run.jsonl", "is a file"),
        ("--output {folder}/new --layer 9", "layers 1 to 2"),
        ("--output {folder}/new --held-out 0.6", "between 0 and a half"),
        ("--output {folder}/new --max-answers 2", "pass more"),
        ("--output {folder}/new --buckets odd", "equal, log, quantile"),
        ("--output {folder}/new --interval 0", "interval"),
    ],
)
def test_what_cannot_be_trained_is_refused(folder, token_model, more, said):
    """The command exits with 2 and a message, before the slow part if possible."""
    assert_refused(_train(folder, token_model, more.format(folder=folder)), said)


def test_answers_that_were_recorded_without_tokens_are_refused(folder, token_model, tmp_path):
    """The message says what is missing."""
    line = json.loads((folder / "run.jsonl").read_text().splitlines()[0])
    del line["output_token_ids"]
    (tmp_path / "run.jsonl").write_text(json.dumps(line) + "\n")
    done = _train(tmp_path, token_model, f"--output {tmp_path}/new")
    assert_refused(done, "output_token_ids")
