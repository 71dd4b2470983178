"""The residual between sampling and training, end to end on a tiny model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.invariance.residual import differences, main
from tests.benchmarks.tiny_model import arguments

pytestmark = pytest.mark.release


def test_the_deterministic_mode_has_no_residual_and_int8_has_one(capsys, tmp_path):
    """Every token counts; the figures of other bits are above zero."""
    sizes = ["--num-requests=5", "--prompt-tokens=4", "--output-tokens=6"]
    model = arguments(tmp_path)[1]
    assert main(["--model", model, "--modes=deterministic,KV in int8", *sizes]) == 0
    modes = json.loads(capsys.readouterr().out)["modes"]
    assert modes["deterministic"]["num_tokens"] == 30 == modes["KV in int8"]["num_tokens"]
    exact = modes["deterministic"]
    assert exact["num_different"] == exact["largest"] == exact["kl"] == 0
    assert modes["KV in int8"]["num_different"] > 0 and modes["KV in int8"]["kl"] > 0
    assert main(["--modes=int9"]) == 2
    assert "int9" in capsys.readouterr().err


def test_figures_of_differences():
    """A ratio that is off by a tenth has this share as its error, and a positive divergence."""
    found = differences(np.log([1.0, 1.1, 0.95]))
    assert found["num_different"] == 2 and np.isclose(found["largest_ratio_error"], 0.1)
    assert np.isclose(found["kl"], np.mean([0, 0.1 - np.log(1.1), -0.05 - np.log(0.95)]))
