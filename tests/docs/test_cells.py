"""The examples of docs/cells.md run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cells.md"


@pytest.mark.release
def test_the_examples_run(capsys):
    """They follow each other, as a reader would type them."""
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "(64,) stop 10 nodes"
    assert lines[1] == lines[2] == "(64,)"
    assert lines[3].startswith("tokens 0 ")
    assert lines[-4].startswith("(4, ") and lines[-4].endswith(" (4,)")
    assert lines[-3] == "(64,)"
    assert lines[-2].startswith("(1,")
    assert lines[-1] == "(64,)"
