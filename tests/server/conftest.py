"""What tests of the server share; a module may have an `rt` or `url` of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve import Runtime
from tests.server.browser import open_tab
from tests.server.serving import client, runtime, server


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with runtime() as rt:
        yield rt


@pytest.fixture(scope="module")
def url(rt: Runtime) -> Iterator[str]:
    with server(rt) as url:
        yield url


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with client(url) as ai:
        yield ai


@pytest.fixture
def tab() -> Iterator[Any]:
    with open_tab() as tab:
        yield tab
