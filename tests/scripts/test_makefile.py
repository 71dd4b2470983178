"""The environment that a command of the Makefile uses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.fast,
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make"),
]

MAKEFILE = Path(__file__).parents[2] / "Makefile"


def _python(path: Path, version: str) -> Path:
    """Write a Python that says only which version it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def _would_run(folder: Path, *arguments: str) -> str:
    command = ["make", "-n", "-f", str(MAKEFILE), "-C", str(folder), "style", *arguments]
    # `make test PYTHON=...` hands its own choice down.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "MAKEFLAGS", "MAKEOVERRIDES")}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def test_a_python_that_is_named_is_the_one_that_runs(tmp_path: Path):
    """Beside an environment of another version it has its own; without a name there is one."""
    (tmp_path / "pyproject.toml").touch()
    other, same = _python(tmp_path / "other", "3.12"), _python(tmp_path / "same", "3.11")
    assert f"{other} -m venv .venv\n" in _would_run(tmp_path, f"PYTHON={other}")
    _python(tmp_path / ".venv/bin/python", "3.11")
    assert ".venv-3.12/bin/ruff check" in _would_run(tmp_path, f"PYTHON={other}")
    for arguments in [(), (f"PYTHON={same}",)]:
        assert "\n.venv/bin/ruff check" in _would_run(tmp_path, *arguments)
