"""The benchmark of drifting lengths: its distributions, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.exegpt.drift import Drift, main
from jaxserve.workload.tasks import TASKS, Lengths

pytestmark = pytest.mark.release


@pytest.mark.parametrize("skewness", [-0.4, -0.2, 0.2, 0.4])
def test_a_skewed_distribution_keeps_mean_and_deviation(skewness: float):
    """The third moment has the sign of the skewness, and about its size."""
    lengths = Lengths(100, 20, 300)
    probabilities = Drift("skewness", skewness).probabilities(lengths)
    at = np.arange(1, len(probabilities) + 1)
    mean = probabilities @ at
    std = np.sqrt(probabilities @ (at - mean) ** 2)
    assert (mean, std) == pytest.approx((100, 20), rel=1e-3)
    third = probabilities @ ((at - mean) / std) ** 3
    assert third == pytest.approx(skewness, abs=0.03)


@pytest.mark.parametrize(("name", "mean", "std"), [("mean", 1.3, 1.0), ("std", 1.0, 0.7)])
def test_one_statistic_drifts(name: str, mean: float, std: float):
    """A factor of the mean leaves the deviation, and the other way round."""
    before = TASKS["T"].outputs
    probabilities = Drift(name, 1.3 if name == "mean" else 0.7).probabilities(before)
    at = np.arange(1, before.most + 1)
    drifted = probabilities @ at
    assert drifted == pytest.approx(mean * before.mean, rel=1e-3)
    deviation = np.sqrt(probabilities @ (at - drifted) ** 2)
    assert deviation == pytest.approx(std * before.std, rel=1e-2)


def test_a_small_run_writes_every_engine_s_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Shorter answers: the adapted engine serves more than the one that is left alone."""
    path = tmp_path / "drift.json"
    arguments = ["--before", "400", "--after", "1600", "--only", "none"]
    assert main([*arguments, "--output", str(path)]) == 2
    arguments[-1] = "mean"
    assert main([*arguments, "--factors", "0.7", "--output", str(path)]) == 0
    result = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == result
    [row] = result["drifts"]
    assert row["changed"] == "mean" and row["to"] == 0.7
    alone, adapted = row["left_alone"]["settled"], row["adapted"]["settled"]
    assert row["adapted"]["adopted"]
    assert adapted["answers_per_s"] > 1.02 * alone["answers_per_s"]
    assert adapted["share_in_bound"] >= 0.97
