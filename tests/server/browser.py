"""A headless browser with the page, for tests; they skip where there is no Chromium."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# Set by `make page-test`, which has installed a browser.
MUST_RUN = "JAXSERVE_NEEDS_BROWSER" in os.environ


@contextmanager
def open_tab() -> Iterator[Any]:
    """Yield a tab of a headless browser, in which nothing may be reported on the console."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as started:
        own = started.chromium.executable_path  # where Playwright puts its own
        if BROWSER is None and not MUST_RUN and not Path(own).exists():
            pytest.skip("no Chromium is installed")
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page()
        sync_api.expect.set_options(timeout=30_000)
        reported: list[str] = []
        # The browser itself reports an answer of 401, which a test asks for.
        tab.on("console", lambda told: "401" in told.text or reported.append(told.text))
        tab.on("pageerror", lambda error: reported.append(str(error)))
        yield tab
        browser.close()
    assert reported == []


def expecting(tab: Any, selector: str) -> Any:
    """Return assertions that wait for an element; waiting for a script is against the policy."""
    from playwright.sync_api import expect

    return expect(tab.locator(selector))


def configure(tab: Any, **settings: object) -> None:
    """Set fields of the settings, by their ids."""
    tab.click("#configure")
    for id, value in settings.items():
        tab.fill(f"#{id}", str(value))
    tab.click("#settings button")


def say(tab: Any, text: str) -> None:
    tab.fill("#said", text)
    tab.keyboard.press("Enter")


def texts(tab: Any) -> list[str]:
    """Return the texts of the messages, without the thinking and the figures."""
    return [each.inner_text() for each in tab.locator("article > .text").all()]


def kept(tab: Any) -> list[dict[str, Any]]:
    """Return the conversations that the browser keeps."""
    found = tab.evaluate("Object.entries(localStorage)")
    return [json.loads(value) for key, value in found if key.startswith("jaxserve.conversation.")]


def answer_with(
    tab: Any, *pieces: str | dict[str, Any], finish: str = "stop"
) -> list[dict[str, Any]]:
    """Have each chat answered with these pieces; return the requests, as they will have come.

    A piece is a text, or the delta of a chunk.
    """
    asked: list[dict[str, Any]] = []

    def fulfill(route: Any) -> None:
        asked.append(route.request.post_data_json)
        deltas = [{"content": each} if isinstance(each, str) else each for each in pieces]
        choices: list[dict[str, Any]] = [
            {"index": 0, "delta": delta, "token_ids": [1]} for delta in deltas
        ]
        choices.append({"index": 0, "delta": {}, "finish_reason": finish, "token_ids": []})
        events = [f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices]
        body = "".join([*events, "data: [DONE]\n\n"])
        route.fulfill(body=body, content_type="text/event-stream")

    tab.route("**/v1/chat/completions", fulfill)
    return asked
