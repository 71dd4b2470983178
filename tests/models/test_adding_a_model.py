"""The worked example of docs/adding_a_model.md is a family that works."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of the sources with exactly the two edits of the page."""
    folder = tmp_path_factory.mktemp("sources")
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    family, checkpoints = _blocks()
    (folder / family).write_text(_blocks()[family])
    text = (folder / checkpoints).read_text()
    assert text.count("VARIANTS = {\n") == 1
    entry = _blocks()[checkpoints]
    (folder / checkpoints).write_text(text.replace("VARIANTS = {\n", "VARIANTS = {\n" + entry))
    return folder


def test_the_page_has_a_file_and_an_edit():
    """The example adds one file and edits one existing file."""
    family, edited = _blocks()
    assert not (ROOT / family).exists()
    assert (ROOT / edited).is_file()


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
            "[phi]",
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
