"""A headless browser with the page, for tests; they skip where there is no Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.serving import post

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


def converse(url: str, id: str, *turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """Have the server answer turns of a conversation, and return the messages that it keeps."""
    for said in turns:
        body = {"messages": said, "conversation_id": id, "temperature": 0, "max_tokens": 4}
        assert post(url, "/v1/chat/completions", body).status_code == 200
    return httpx2.get(f"{url}/conversations/{id}").json()["messages"]


def open_conversation(tab: Any, url: str, id: str) -> None:
    """Open a conversation from the list, with parameters that give the same answer each time."""
    tab.goto(url + "/")
    tab.click("summary")
    tab.fill("#temperature", "0")
    tab.fill("#max_tokens", "4")
    tab.click(f"#conversations button:has-text('{id}')")
    expecting(tab, "#conversations [aria-current=true]").to_contain_text(id)
