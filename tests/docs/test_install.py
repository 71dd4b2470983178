"""The extras of the package, and the lines of the documentation that install them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxserve.cli.options import DEFAULT_MODEL
from jaxserve.models.registry import resolve

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_serve_reads_its_default_model():
    """The extra `serve` has what reads the file that `jaxserve serve` serves by default."""
    assert resolve(DEFAULT_MODEL).kind == "gguf"
    assert set(EXTRAS["gguf"]) <= set(EXTRAS["serve"])


def test_documented_extras_exist():
    """Every extra that the documentation installs is one of the package's."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lists = re.findall(r"pip install (?:-e )?'\.\[([\w,]+)\]'", "".join(map(_read, pages)))
    assert lists
    assert {extra for each in lists for extra in each.split(",")} <= EXTRAS.keys()


def test_modules_of_a_users_folder_are_not_ours(tmp_path: Path):
    """Files named like our packages, and a clone, next to a program are not imported."""
    (tmp_path / "jaxserve").mkdir()
    for name in ("kernels", "pallas_kernels", "predictor", "sharding", "cells", "server"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError(__name__)\n")
    program = (
        "from jaxserve import Runtime, kernels, predictor, sharding\n"
        "from jaxserve.predictor import LengthPredictor\n"
        "from jaxserve.cli import main\n"
        "import jaxserve\n"
        "print(jaxserve.__path__[0], kernels.__path__[0], sharding.__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    package = ROOT / "jaxserve"
    assert done.stdout.split() == [str(package), str(package / "kernels"), "jaxserve.sharding"]


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")
