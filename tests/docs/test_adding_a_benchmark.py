"""The worked example of docs/adding_a_benchmark.md, built from the blocks of the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import blocks, package_with, run_with

# A script for the copy. It runs in a separate process, in which `benchmarks` is the copy.
PROGRAM = """
import json
import sys
from pathlib import Path

import benchmarks
from benchmarks.drawing import main
from benchmarks.figures.__main__ import load, render
from tests.benchmarks.tiny_model import arguments

root = Path(sys.argv[1])
assert benchmarks.__file__.startswith(sys.argv[1]), benchmarks.__file__
results = root / "benchmarks" / "results"
for path in results.glob("*.json"):
    path.unlink()
output = results / "drawing_tiny.json"
stdout, sys.stdout = sys.stdout, sys.stderr
code = main([*arguments(root), "--repeats", "1", "--output", str(output)])
sys.stdout = stdout
assert code == 0
result = json.loads(output.read_text())
assert result["benchmark"] == "drawing" and result["arguments"]["temperature"] == 1.0
assert {"device", "versions", "commit"} <= result.keys()
greedy, drawn = (result["ways"][way] for way in ("greedy", "drawn"))
assert greedy["output_tokens"] == drawn["output_tokens"] > 0
assert greedy["num_failed"] == drawn["num_failed"] == 0
print(render("docs/results/throughput.md", load(results), root))
"""


@pytest.mark.fast
def test_the_example_is_one_short_file_and_one_entry():
    """The measurement has at most fifty lines and a few, and changes one other file."""
    file, entry = blocks("adding_a_benchmark.md")
    assert (file.kind, entry.kind) == ("python", "diff")
    assert len(file.text.splitlines()) < 55
    assert all(not line.startswith("-") for line in entry.text.splitlines())


@pytest.mark.release
def test_the_example_measures_and_is_shown(tmp_path: Path):
    """A run gives a whole result, and the page shows it with a link to its file."""
    page = run_with(package_with("adding_a_benchmark.md", tmp_path), PROGRAM)
    assert "## What drawing tokens costs\n\n4 requests at once, " in page
    link = "(../../benchmarks/results/drawing_tiny.json)"
    assert "\n| greedy | [" in page and "\n| drawn | [" in page and link in page
