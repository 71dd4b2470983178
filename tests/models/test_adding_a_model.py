"""The worked example of docs/adding_a_model.md is a family that works."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding_a_model.md"
COPIED = (
    "jaxserve",
    "tests/common",
    "tests/models",
    *(f"tests/{path.name}" for path in ROOT.glob("tests/*.py")),
)


def _blocks() -> dict[str, str]:
    """Return the code blocks of the page, by the file that their first line names."""
    found = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return dict(found)


def _replaced(text: str, statements: str) -> str:
    """Return a module with some statements in place of those that begin alike."""
    lines = text.splitlines()
    for new in ast.parse(statements).body:
        source = ast.get_source_segment(statements, new)
        beginning = re.match(r"from \S+ import|\w+ =", source or "")
        assert source is not None and beginning is not None
        (old,) = (
            each
            for each in ast.parse("\n".join(lines)).body
            if lines[each.lineno - 1].startswith(beginning.group())
        )
        lines[old.lineno - 1 : old.end_lineno] = source.splitlines()
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of the sources with exactly the three edits of the page."""
    folder = tmp_path_factory.mktemp("sources")
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    family, registry, checkpoints = _blocks()
    (folder / family).write_text(_blocks()[family])
    (folder / registry).write_text(_replaced((folder / registry).read_text(), _blocks()[registry]))
    text = (folder / checkpoints).read_text()
    assert text.count("_OTHERS = {\n") == 1
    entry = _blocks()[checkpoints]
    (folder / checkpoints).write_text(text.replace("_OTHERS = {\n", "_OTHERS = {\n" + entry))
    return folder


def test_the_page_has_a_file_and_two_edits():
    """The example adds one file and edits two existing files."""
    family, *edited = _blocks()
    assert not (ROOT / family).exists()
    assert len(edited) == 2 and all((ROOT / name).is_file() for name in edited)


@pytest.mark.release
def test_the_example_has_the_logits_of_pytorch(sources):
    """The parity tests pass for the family on the page, in every kind of batch."""
    path = os.pathsep.join((str(sources), str(ROOT)))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "phi",
            "--rootdir",
            str(sources),
            "tests/models/test_parity.py",
        ],
        cwd=sources,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b4 passed", done.stdout), done.stdout
