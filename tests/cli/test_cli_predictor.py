"""`jaxserve predictor` on a tiny encoder and made-up answers."""

from __future__ import annotations

import json

import pytest

from jaxserve.predictor import Example, LengthPredictor, write_jsonl
from tests.cli.common import assert_refused, run
from tests.predictor.encoders import write_encoder
from tests.predictor.tiny import examples

SMALL = (
    "--max-length 40 --num-buckets 4 --max-prompt-tokens 32 --batch-size 16 --learning-rate 3e-3 "
    "--quiet"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with data and an encoder."""
    folder = tmp_path_factory.mktemp("predictor")
    longer = [Example(e.prompt, e.output_length * 2, e.conversation) for e in examples(150, 9)]
    write_jsonl(folder / "data.jsonl", examples(300))
    write_jsonl(folder / "other.jsonl", longer)
    write_encoder(folder / "encoder")
    (folder / "taken.checkpoints").mkdir()
    return folder


@pytest.fixture(scope="module")
def folder(data):
    """The folder, with a predictor that was trained on its data."""
    done = _train(data, "own", "--epochs 2 --json")
    assert done.exit_code == 0, done.stderr
    (data / "said.json").write_text(done.stdout)
    return data


def _train(folder, name: str, more: str):
    files = f"{folder}/data.jsonl --encoder {folder}/encoder --output {folder}/{name}"
    return run(f"predictor train {files} {SMALL} {more}")


@pytest.mark.release
def test_training_ends_with_a_predictor_and_its_figures(folder):
    """The JSON has the figures; the predictor loads and is calibrated; no checkpoints remain."""
    said = json.loads((folder / "said.json").read_text())
    assert said["trained_on"] + said["calibrated_on"] + said["tested_on"] == 300
    names = [one["name"] for one in said["contenders"]]
    assert names == ["predictor", "majority", "prompt length", "linear on embeddings"]
    assert len(said["history"]["losses"]) == 2
    predictor = LengthPredictor.load(folder / "own")
    assert predictor.calibration is not None
    assert len(predictor.calibration.levels) == said["calibrated_on"]
    assert 1 <= predictor.reserve("w1 w2") <= 40
    assert not (folder / "own.checkpoints").exists()


@pytest.mark.release
def test_evaluation_repeats_what_training_said(folder):
    """On the training data the test part is the same, and so are the figures."""
    done = run(f"predictor evaluate {folder}/own --json --quiet")
    assert done.exit_code == 0, done.stderr
    wanted = json.loads((folder / "said.json").read_text())["contenders"]
    for one, other in zip(json.loads(done.stdout)["contenders"], wanted, strict=True):
        assert one["name"] == other["name"]
        assert one["accuracy"] == pytest.approx(other["accuracy"])
        assert one["error_tokens"] == pytest.approx(other["error_tokens"], rel=1e-3)
        assert one["promises"] == other["promises"]


@pytest.mark.release
def test_evaluation_on_other_data(folder):
    """The table has every contender; answers in other data are longer, so miss rates are higher."""
    done = run(f"predictor evaluate {folder}/own {folder}/other.jsonl --quiet")
    assert done.exit_code == 0, done.stderr
    for name in ("predictor", "majority", "prompt length", "linear on embeddings", "outgrew"):
        assert name in done.stdout
    assert "prompts that were not used for training" in done.stdout


@pytest.mark.release
def test_a_predictor_is_described(folder):
    """The description has encoder, buckets, calibration, levels and the training data."""
    done = run(f"predictor show {folder}/own")
    assert done.exit_code == 0, done.stderr
    for text in ("1 layers of 16", "10, 20, 30, 40", "temperature", "level for 5%", "data.jsonl"):
        assert text in done.stdout, text


@pytest.mark.release
def test_gone_on_after_it_was_cut_off(folder, monkeypatch):
    """Ctrl-C leaves the last epoch beside the output; --resume continues after it."""
    original, asked = LengthPredictor.logits_of, 0

    def interrupted(self, *arguments):
        nonlocal asked
        asked += 1
        if asked == 2:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(LengthPredictor, "logits_of", interrupted)
    cut = _train(folder, "cut", "--epochs 2")
    assert cut.exit_code == 130 and "interrupted" in cut.stderr
    monkeypatch.undo()
    assert not (folder / "cut").exists() and (folder / "cut.checkpoints").is_dir()
    other = _train(folder, "cut", "--epochs 3 --resume")
    assert other.exit_code == 2 and "other options" in other.stderr
    done = _train(folder, "cut", "--epochs 2 --resume --json")
    assert done.exit_code == 0, done.stderr
    wanted = json.loads((folder / "said.json").read_text())["history"]
    assert json.loads(done.stdout)["history"]["losses"] == pytest.approx(wanted["losses"], rel=1e-4)
    assert not (folder / "cut.checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--buckets even", "buckets='even' is unknown; pass one of"),
        ("--num-buckets 0", "0 buckets"),
        ("--num-buckets 10000000000", "num=10000000000 buckets"),
        ("--epochs 0", "num_epochs=0 is not allowed; pass 1 or more"),
        ("--held-out 0.7", "between 0 and a half"),
        ("--max-examples 3", "pass more, or another --held-out"),
        ("--encoder no-such-encoder", "UnknownModelError: 'no-such-encoder'"),
        ("--encoder {folder}", "has no config.json"),
        ("--output {folder}", "is not empty and holds no predictor"),
        ("--output {folder}/data.jsonl", "is a file"),
        ("--output {folder}/taken", "holds files other than checkpoints"),
        ("--output /proc/no/such", "cannot write --output"),
    ],
)
def test_bad_input_of_train(data, arguments, said):
    """A bad option exits with 2 and one message before the training."""
    assert_refused(_train(data, "bad", arguments.format(folder=data)), said)


def test_bad_data_and_folders(data):
    """The message names data that cannot be read and folders without a predictor."""
    missing = run(f"predictor train {data}/missing.jsonl --output {data}/bad --quiet")
    assert_refused(missing, "cannot read the data")
    for command in ("evaluate", "show"):
        assert_refused(run(f"predictor {command} {data}/encoder"), "holds no")
