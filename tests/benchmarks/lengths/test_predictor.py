"""The predictor's benchmark on made-up answers has all figures and saves the predictor."""

from __future__ import annotations

import json

import pytest

from benchmarks.lengths import predictor as benchmark
from jaxserve.predictor import LengthPredictor, write_jsonl
from tests.predictor.encoders import write_encoder
from tests.predictor.tiny import examples

pytestmark = pytest.mark.release


def test_one_object_with_every_figure(tmp_path, capsys):
    """The JSON has predictor, baselines, miss rates, times, environment; stderr has the table."""
    write_jsonl(tmp_path / "data.jsonl", examples(500))
    write_encoder(tmp_path / "encoder")
    code = benchmark.main(
        [
            *("--data", str(tmp_path / "data.jsonl"), "--encoder", str(tmp_path / "encoder")),
            *("--max-length", "40", "--num-buckets", "4", "--max-tokens", "32"),
            *("--epochs", "2", "--learning-rate", "3e-3", "--save", str(tmp_path / "kept")),
        ]
    )
    assert code == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert sum(result["num_examples"].values()) == 500
    assert [len(one["promises"]) for one in result["contenders"]] == [4] * 4
    assert set(result["milliseconds_a_prompt"]) == {"1", "64"}
    assert result["step_s"] > 0 and "commit" in result
    assert "accuracy" in err and "outgrown" in err
    assert LengthPredictor.load(tmp_path / "kept").calibration is not None


def test_what_cannot_be_measured(tmp_path, capsys):
    """Bad options and missing data exit with 2 and a one-line message."""
    assert benchmark.main(["--data", str(tmp_path / "missing.jsonl")]) == 2
    write_jsonl(tmp_path / "data.jsonl", examples(50))
    assert benchmark.main(["--data", str(tmp_path / "data.jsonl"), "--held-out", "0.9"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "cannot read the data" in err and "a half" in err
