"""Simulations are compared with runs, end to end on a tiny model."""

from __future__ import annotations

import json

import pytest

from benchmarks.planning.simulate import JUDGED, main
from tests.benchmarks.tiny_model import arguments

pytestmark = pytest.mark.release


def test_each_run_has_its_own_prediction(capsys, tmp_path):
    """The error is that of a whole run, and equal schedules have equal numbers of iterations."""
    kept = tmp_path / "times.json"
    more = ["--policies", "orca", "--repeats", "2", "--save-step-times", str(kept)]
    more += ["--max-context", "512"]  # so that every shape of step fits
    assert main([*arguments(tmp_path), *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert kept.is_file()
    (policy,) = result["policies"]
    assert policy["policy"] == "orca" and len(policy["runs"]) == 2
    for run in policy["runs"]:
        measured, predicted = run["measured"], run["predicted"]
        error = predicted["output_tokens_per_s"] / measured["output_tokens_per_s"] - 1
        assert run["error"]["output_tokens_per_s"] == pytest.approx(error)
        iterations = {each["engine"]["num_iterations"] for each in (measured, predicted)}
        assert len(iterations) == 1
    assert result["worst_error"] == max(abs(policy["error"][name]) for name in JUDGED)
