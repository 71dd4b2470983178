"""Policies are compared in whole runs that alternate, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.policies.__main__ import main, with_split
from tests.benchmarks.tiny_model import arguments

pytestmark = pytest.mark.release


def test_every_run_is_kept_and_the_median_reported(capsys, tmp_path):
    """Each policy has two runs, and median and range come from their figures."""
    more = ["--policies", "vllm_like,auto", "--repeats", "2"]
    assert main([*arguments(tmp_path), *more]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["repeats"] == 2
    assert result["missing_baselines"] == ["s3_oracle"]
    assert "s3 oracle was not measured" in err
    for figures in result["policies"].values():
        walls = [run["wall_s"] for run in figures["runs"]]
        assert len(walls) == 2
        assert figures["wall_s"] == pytest.approx(sum(walls) / 2)
        assert figures["range"]["wall_s"] == sorted(walls)
        for run in figures["runs"]:
            assert run["output_tokens"] == 24
            assert run["engine"]["num_iterations"] >= 12  # six tokens, two at a time
            assert 1 <= run["average_batch"] <= 2
            split = run["latency_split_s"]
            assert split["generation"] + split["penalty"] == pytest.approx(run["wall_s"])


def test_the_parts_of_a_run():
    """Penalties are a part of the run; planning happens at the same time."""
    engine = {"penalty_s": 2.0, "planning_s": 0.5, "predicting_s": 0.25}
    split = with_split({"wall_s": 10.0, "engine": engine})["latency_split_s"]
    assert split == {"generation": 8.0, "penalty": 2.0, "overhead": 0.75}


def test_no_runs_are_refused(capsys, tmp_path):
    """The option is refused before the model is loaded."""
    assert main([*arguments(tmp_path), "--repeats", "0"]) == 2
    assert "--repeats is 0; it must be at least 1" in capsys.readouterr().err
