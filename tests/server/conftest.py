"""What tests of the page share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser import open_tab


@pytest.fixture
def tab() -> Iterator[Any]:
    with open_tab() as tab:
        yield tab
