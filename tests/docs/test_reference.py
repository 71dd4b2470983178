"""docs/reference.md is what the sources say."""

from __future__ import annotations

import pytest

from scripts.reference import PAGE, page


@pytest.mark.fast
def test_the_page_is_current():
    """`python -m scripts.reference` writes it."""
    assert PAGE.read_text("utf-8") == page()
