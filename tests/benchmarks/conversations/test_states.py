"""Retentions of states are compared on the same requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.conversations.states import WORKLOADS, main
from benchmarks.figures.papers import STATES
from benchmarks.figures.results import Place

pytestmark = pytest.mark.release


def test_every_retention_is_measured(capsys):
    """Without states nothing is found; what is found is not computed again."""
    small = ["--num-requests", "16", "--repeats", "1", "--states", "64", "--weights", "0.5"]
    assert main([*small, "--shapes", "bamba-9b"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["workload"] for row in result["rows"]] == list(WORKLOADS)
    for row in result["rows"]:
        found = row["policies"]
        assert list(found) == ["ours", "marconi", "grid", "none"]
        assert found["none"]["hit"] == 0 < min(found[name]["hit"] for name in ("ours", "grid"))
        assert found["ours"]["recomputed_tokens"] < found["none"]["recomputed_tokens"]
    assert "| ours |" in STATES(Place(Path("states.json"), result, ""))
