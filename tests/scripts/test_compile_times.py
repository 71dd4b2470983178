"""Times of compiling, for this machine in place of a GPU's."""

from __future__ import annotations

import json

import pytest

from scripts.compile_times import WAYS, main


@pytest.mark.release
def test_each_way_compiles_the_same_executables(capsys):
    small = ["--target", "cpu", "--shape", "small", "--max-slots", "4", "--max-step-tokens", "64"]
    assert main([*small, "--max-decode-iterations", "2", "--first"]) == 0
    result = json.loads(capsys.readouterr().out)
    serial, parallel = (result[way] for way in WAYS)
    assert serial["executables"].keys() == parallel["executables"].keys()
    assert "mixed step, 64 tokens" in serial["executables"]
    assert min(serial["executables"].values()) > 0
    # One after the other, they take as long as all of them together.
    assert serial["sum_s"] <= serial["wall_s"]
    assert serial["sum_s"] == sum(serial["executables"].values())


def test_an_unknown_way_is_named(capsys):
    assert main(["--ways", "serial,sideways"]) == 2
    assert "'sideways'" in capsys.readouterr().err
