"""Limits of requests before they reach the application."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jaxserve.server.guard import BodyReader

pytestmark = pytest.mark.fast


def test_bodies_count_while_they_are_read():
    """A hundred large bodies one after the other are served: more than may be read at once."""
    served = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        served.append(len((await receive())["body"]))

    reader = BodyReader(application, 200_000, 10.0)
    scope: Any = {"type": "http", "path": "/", "headers": []}

    async def ask() -> list[Any]:
        parts = [
            {"type": "http.request", "body": b"x" * 90_000, "more_body": is_first}
            for is_first in (True, False)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        await reader(scope, receive, send)
        return sent

    for _ in range(100):
        assert asyncio.run(ask()) == []
    assert served == [180_000] * 100
