"""The driver of gpu-check, with parts without measurements."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.common.harness import whole_numbers
from benchmarks.common.processes import ROOT
from benchmarks.common.shapes import SHAPES, hf_config
from benchmarks.conversations.restore import NEW_TOKENS
from benchmarks.kernels.timing import chosen
from scripts.gpu_check import PARTS, Part, check, count_tests, main, run_part

ABOUT = {"device": {"kind": "NVIDIA Imagined"}, "versions": {}, "commit": "abc"}


def _part(does: str, limit_s: float = 30.0) -> Part:
    return Part(("tests.scripts.fake_part", does), limit_s)


def _options(name: str) -> argparse.Namespace:
    """Return the options that a part's command parses from its arguments."""
    module, *arguments = PARTS[name].command
    if hasattr(importlib.import_module(module), "__path__"):  # a package
        module += ".__main__"
    parser = importlib.import_module(module).main.parser()
    return parser.parse_args([*arguments, "--budget", "10", "--output", "x.json"])


@pytest.mark.release
def test_parts_go_on_after_failures_and_cuts(tmp_path):
    """The written result of a part counts, however it ended; the file has its status."""
    output = tmp_path / "results" / "check.json"
    parts = {"first": _part("fail"), "hung": _part("hang", 3.0), "last": _part("ok")}
    result = check(parts, output, ABOUT, budget_s=60)
    assert result == json.loads(output.read_text())
    assert {name: part["status"] for name, part in result["parts"].items()} == {
        "first": "failed",
        "hung": "cut off",
        "last": "done",
    }
    for part in result["parts"].values():
        assert part["result"]["figures"] == [{"value": 1}]
    assert result["parts"]["first"]["exit_code"] == 3
    assert "no such kernel" in result["parts"]["first"]["output"]
    assert result["parts"]["hung"]["wall_s"] < 15
    assert result["commit"] == "abc"
    assert list(output.parent.iterdir()) == [output]


def test_what_there_is_no_time_for_is_skipped_and_said(tmp_path):
    """A part with too little time is not begun; a later call runs the remaining parts."""
    output = tmp_path / "check.json"
    parts = {"one": _part("ok"), "two": _part("ok")}
    result = check(parts, output, ABOUT, budget_s=1)
    assert [part["status"] for part in result["parts"].values()] == ["skipped", "skipped"]
    assert "1 s" in result["parts"]["one"]["reason"]
    earlier = {"status": "cut off", "result": {"figures": "earlier"}}
    result = check(parts, output, ABOUT, budget_s=1, before={"two": earlier})
    assert result["parts"]["two"] == earlier
    before = {"one": {"status": "done", "result": {"figures": "kept"}}, "two": earlier}
    result = check(parts, output, ABOUT, budget_s=60, before=before)
    assert result["parts"]["one"]["result"] == {"figures": "kept"}
    assert result["parts"]["two"]["result"]["figures"] == [{"value": 1}]


@pytest.mark.release
def test_a_part_that_ran_out_of_time_is_partly_done(tmp_path):
    """A short part may begin measurements in half of its limit."""
    result = run_part(_part("ok"), tmp_path / "own", 30.0)
    assert result["status"] == "done"
    result = run_part(_part("late"), tmp_path / "own", 4.0)
    assert result["status"] == "partly done"
    assert result["result"]["skipped"] == ["two"]


@pytest.mark.release
def test_an_end_from_outside_loses_nothing(tmp_path):
    """A signal in the middle of a part writes the part's figures so far."""
    output = tmp_path / "check.json"
    script = (
        "from pathlib import Path\n"
        "from scripts.gpu_check import check\n"
        "from tests.scripts.test_gpu_check import ABOUT, _part\n"
        "parts = {'one': _part('ok'), 'two': _part('hang'), 'three': _part('ok')}\n"
        f"check(parts, Path({str(output)!r}), ABOUT, budget_s=100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    own = tmp_path / "check.two.part"
    deadline_s = time.monotonic() + 60
    while not own.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.wait(timeout=30)
    found = json.loads(output.read_text())["parts"]
    assert {name: part["status"] for name, part in found.items()} == {
        "one": "done",
        "two": "interrupted",
    }
    assert found["two"]["result"]["figures"] == [{"value": 1}]


@pytest.mark.release
def test_tests_are_counted_as_far_as_they_came(tmp_path):
    """This works for complete output and for output that is cut off."""
    module = tmp_path / "test_some.py"
    module.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_is_one(n):\n"
        "    assert n == 1\n"
    )
    command = ("pytest", "-v", "--tb=line", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    part = Part((*command, str(module)), 60, writes=False)
    result = run_part(part, tmp_path / "own", 60)
    assert result["status"] == "failed"
    assert result["result"]["passed"] == 1
    assert [name.rpartition("::")[2] for name in result["result"]["failed"]] == ["test_is_one[2]"]
    broken_off = "tests/a.py::test_x[a-b] PASSED [ 50%]\ntests/a.py::test_y "
    assert count_tests(broken_off) == {"passed": 1, "failed": [], "skipped": 0}


@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.writes])
def test_every_part_can_be_asked_for(name: str):
    """Its module accepts the arguments, and the named shapes exist."""
    options = _options(name)
    assert options.budget == 10
    if "--shapes" in PARTS[name].command:
        assert all(chosen(options.shapes, options.leave_out)[0])


def test_restores_take_the_shape_of_a_model():
    """It needs neither a checkpoint nor a network, and its lengths are accepted."""
    options = _options("restore")
    assert options.model in SHAPES
    model = hf_config(options.model)
    longest = max(whole_numbers(options.lengths, "--lengths"))
    assert longest + options.wait_tokens + NEW_TOKENS < model["max_position_embeddings"]


def test_first_shapes_and_the_rest_are_all_shapes():
    """Together the parts time every shape exactly once."""
    early, late = (
        [shape.name for shape in chosen(options.shapes, options.leave_out)[0]]
        for options in (_options("kernels"), _options("kernels_rest"))
    )
    everything = [shape.name for shape in chosen("decode,prefill,mixed")[0]]
    assert sorted(early + late) == sorted(everything)


def test_without_a_gpu_nothing_is_run(capfd, tmp_path):
    """It prints a message and leaves no file."""
    output = tmp_path / "check.json"
    assert main(["--output", str(output)]) == 2
    assert "finds no NVIDIA GPU" in capfd.readouterr().err
    assert not output.exists()
    assert main(["--parts", "kernels,nothing"]) == 2
    assert "['nothing']" in capfd.readouterr().err


def test_the_first_day_fits_ten_minutes(capsys):
    """Correct models and kernels, speed, and the start have their time, however long each takes."""
    names = ["tests", "families", "kernels", "decode_llama_3_8b", "start"]
    assert list(PARTS)[: len(names)] == names
    assert sum(PARTS[name].limit_s for name in names) < 570
    assert main(["--list", "--minutes", "8.5"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert lines["kernels"][-2:] == ["320", "s"]
    assert lines["start"][-1] == "cut" and lines["products"][-3:] == ["time", "is", "left"]


def test_named_families_exist():
    """A name that pytest does not know would select nothing."""
    names = re.findall(r"\[(\w+)\]", PARTS["families"].command[-1])
    variants = (ROOT / "tests/models/hf_checkpoints.py").read_text()
    assert names and all(f'\n    "{name}": _of(' in variants for name in names)
