"""Every way of bringing pages back is measured, and brings them."""

from __future__ import annotations

import json

from benchmarks.restore import FIGURES, SITUATIONS, main
from tests.fleet.test_fleet import CONFIG


def test_every_way_brings_all_pages(tmp_path, capsys):
    """A run fails unless just the pages that were put on the host come back."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = ["--model", str(tmp_path), "--random-weights", "--lengths", "70,400"]
    arguments += ["--others", "2", "--repeats", "1", "--wait-tokens", "96", "--kv-memory", "8MB"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    found = [(point["situation"], point["length"], point["way"]) for point in result["points"]]
    assert found == [
        (situation, length, way)
        for situation, ways in SITUATIONS.items()
        for length in (70, 400)
        for way in ways
    ]
    for point in result["points"]:
        assert [point[name] for name in FIGURES] == [point["runs"][0][name] for name in FIGURES]
        assert 0 < point["others_longest_gap_s"] and 0 < point["first_token_s"]


def test_lengths_that_are_none_are_refused(capsys):
    """Before a model is loaded."""
    assert main(["--lengths", "many"]) == 2
    assert "--lengths 'many'" in capsys.readouterr().err
