"""The code blocks of README.md and docs/ run as they are pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, check_command, fenced, session
from tests.docs.stand_ins import write_stand_ins

# The page that a new user reads first runs in `make test`, the others before a release.
FIRST = ("README.md",)
WITH_PYTHON = [
    page if page in FIRST else pytest.param(page, marks=pytest.mark.release)
    for page in PAGES
    if session(page)
]
# Programs of ours are started to parse their options, `jaxserve` is not.
WITH_COMMANDS = [
    pytest.param(page, marks=pytest.mark.release) if "python -m" in text else page
    for page in PAGES
    if (text := "".join(each.text for each in fenced(page) if each.kind == "commands"))
]
# What a page prints, as a regular expression of its text or of a part.
PRINTED = {
    # Ten steps teach the sequence.
    "docs/own_model.md": r"\A([01]\.\d+ \(4, 5, 6, 7, 0, 1, 2, 3\)\n){2}\Z",
    "docs/cells.md": r"\A\(64,\) stop 10 nodes\n(\(64,\)\n){2}tokens 0 .*"
    r"\(4, .* \(4,\)\n\(64,\)\n\(1,.*\n\(64,\)\n\Z",
    "docs/own_choice.md": r"'smolm-135m' is not a known model.*model_type='my_new_model'",
}


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page: str, tmp_path: Path):
    """The Python blocks of a page run in one session, where its models are tiny stand-ins."""
    write_stand_ins((ROOT / page).read_text(encoding="utf-8"), tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.pages", page],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_NUMPY_DTYPE_PROMOTION": "standard",  # as a user has it
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED.get(page, ""), done.stdout, re.DOTALL), done.stdout


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_are_understood(page: str):
    """The options of each command are those that its program has."""
    for block in fenced(page):
        if block.kind == "commands" and block.reason is None:
            for words in block.commands():
                check_command(words)


@pytest.mark.fast
def test_a_model_of_ones_own_is_short():
    """The whole way from nothing to a served model has less than 60 lines."""
    assert all(block.text.count("\n") < 60 for block in session("docs/own_model.md"))


@pytest.mark.fast
def test_every_block_runs_or_says_why_not():
    """A block that is neither run nor checked has a reason above it."""
    blocks = [block for page in PAGES for block in fenced(page)]
    assert all(block.reason is None or len(block.reason) > 3 for block in blocks)
    run = [block for block in blocks if block.reason is None and block.kind == "python"]
    assert len(run) >= 60
