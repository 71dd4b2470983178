"""The blocks of the guides fit the sources that they change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import package_with

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("page", ["adding_a_policy.md", "adding_a_processor.md"])
def test_every_change_of_a_guide_fits(page: str, tmp_path: Path):
    """Each place that a block changes is there once."""
    assert package_with(page, tmp_path).is_dir()
