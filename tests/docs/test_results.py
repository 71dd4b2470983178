"""Pages of results are written from the result files."""

from __future__ import annotations

import pytest

from benchmarks.common.environment import ROOT
from benchmarks.figures.__main__ import update

pytestmark = pytest.mark.fast


def test_pages_say_what_the_results_say():
    """README.md, docs/results/ and docs/figures/ are as `python -m benchmarks.figures` writes."""
    assert update(ROOT, write=False) == []
