"""Every way of restoring pages is measured, and restores them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.conversations.restore import SITUATIONS, main
from tests.fleet.test_fleet import CONFIG

pytestmark = pytest.mark.release


def _arguments(folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return [
        *("--model", str(folder), "--random-weights", "--lengths", "70,400", "--repeats", "1"),
        *("--others", "2", "--wait-tokens", "96", "--kv-memory", "8MB"),
    ]


def test_every_way_brings_all_pages(tmp_path, capsys):
    """A run fails unless exactly the pages that were put on the host are restored."""
    assert main(_arguments(tmp_path)) == 0
    result = json.loads(capsys.readouterr().out)
    found = [(point["situation"], point["length"], point["way"]) for point in result["points"]]
    assert found == [
        (situation, length, way)
        for situation, ways in SITUATIONS.items()
        for length in (70, 400)
        for way in ways
    ]
    for point in result["points"]:
        (run,) = point["runs"]
        assert run == {name: point[name] for name in run}
        assert 0 < point["others_longest_gap_s"] and 0 < point["first_token_s"]


def test_lengths_that_are_none_are_refused(capsys):
    """The lengths are refused before a model is loaded."""
    assert main(["--lengths", "many"]) == 2
    assert "--lengths 'many'" in capsys.readouterr().err


def test_what_there_is_no_time_for_is_skipped_and_said(tmp_path):
    """The file has the measured points, and names the runs that were not begun."""
    output = tmp_path / "restore.json"
    assert main([*_arguments(tmp_path), "--budget", "0", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["points"] == []
    assert len(result["skipped"]) == 2 * sum(map(len, SITUATIONS.values()))
    assert result["skipped"][0] == "at_once, 70 tokens, on_device, run 1"
