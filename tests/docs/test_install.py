"""The extras of the package, and the lines of the documentation that install them."""

from __future__ import annotations

import re
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
    lists = re.findall(r"pip install '(?:\.|jaxserve)\[([\w,]+)\]'", "".join(map(_read, pages)))
    assert lists
    assert {extra for each in lists for extra in each.split(",")} <= EXTRAS.keys()


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")
