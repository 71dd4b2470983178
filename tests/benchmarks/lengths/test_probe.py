"""The benchmark of probes, on a tiny model and made-up answers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.lengths.probe import main
from tests.cli.common import TOKEN_CONFIG

pytestmark = pytest.mark.release


def test_it_says_what_a_probe_knows_and_costs(tmp_path, capsys):
    """The result has all figures, and times with and without a probe without compilation."""
    (tmp_path / "config.json").write_text(json.dumps(TOKEN_CONFIG))
    random = np.random.default_rng(0)
    lines = [
        {"prompt_token_ids": [1, i], "token_ids": random.integers(0, 64, 1 + i % 40).tolist()}
        for i in range(60)
    ]
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = main(
        [
            *("--answers", str(tmp_path / "run.jsonl"), "--model", str(tmp_path)),
            *("--load", "random", "--max-length", "64", "--num-buckets", "5", "--epochs", "2"),
            *("--batch-size", "4", "--tokens", "12", "--rounds", "1", "--interval", "8"),
            *("--save", str(tmp_path / "probe"), "--output", str(tmp_path / "result.json")),
        ]
    )
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and json.loads((tmp_path / "result.json").read_text()) == result
    assert sum(result["num_answers"].values()) == 60
    assert {f["elapsed"] for f in result["figures"]} >= {0, 16, None}
    cost = result["cost"]
    assert cost["iteration_us_with"] > 0 < cost["iteration_us_without"]
    assert cost["compilations_while_serving"] == 0
    assert (tmp_path / "probe" / "probe.json").is_file()
    assert main(["--answers", str(tmp_path / "none"), "--model", str(tmp_path)]) == 2
