"""The page: its headers, and what it must not contain. In a browser, where there is one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from predictor import LengthBuckets, LengthDistributions
from tests.server.serving import NAME, runtime, server

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# Set by `make page-test`, which has installed a browser.
MUST_RUN = "JAXSERVE_NEEDS_BROWSER" in os.environ


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with runtime() as rt, server(rt) as url:
        yield url


def test_page_has_a_policy_and_all_its_parts(url: str):
    """Scripts and styles are this server's own, and everything that the page names is there."""
    page = httpx2.get(url + "/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for name in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        assert httpx2.get(f"{url}/{name}").status_code == 200
    ids = set(re.findall(r'id="([^"]+)"', page.text))
    script = httpx2.get(url + "/page.js").text
    assert set(re.findall(r'\$\("([^"]+)"\)', script)) <= ids
    assert set(re.findall(r'for="([^"]+)"', page.text)) <= ids


def test_page_needs_no_other_site_and_inserts_no_html(url: str):
    """There is no address of another site, no inline script, and no way to insert HTML."""
    for name in ("", "page.js", "page.css"):
        text = httpx2.get(f"{url}/{name}").text
        assert not re.search(r"https?://|//[a-z]+\.", text)
        for bad in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", " on"):
            assert f"{bad}=" not in text and (bad == " on" or bad not in text), bad


def test_page_without_a_key(url: str):
    """The page is shown without a key, and asks for one; its requests are refused."""
    with runtime() as rt, server(rt, api_keys=("one",)) as guarded:
        assert httpx2.get(guarded + "/").status_code == 200
        assert httpx2.get(guarded + "/conversations").status_code == 401


@pytest.fixture
def tab() -> Iterator[Any]:
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


def _expect(tab: Any, selector: str) -> Any:
    """Return assertions that wait for an element; waiting for a script is against the policy."""
    from playwright.sync_api import expect

    return expect(tab.locator(selector))


def test_chat_in_a_browser(url: str, tab: Any):
    """An answer streams in; it is kept, regenerated, forked and deleted; the engine is shown."""
    tab.goto(url + "/")
    _expect(tab, "#model").to_have_text(NAME)
    tab.click("summary")
    tab.fill("#temperature", "0")
    tab.fill("#max_tokens", "12")
    bold = "<img src=x onerror=alert(1)> **b**"
    tab.fill("#said", bold)
    tab.keyboard.press("Enter")
    _expect(tab, "#status").to_contain_text("12 tokens in")
    said, answer = (one.inner_text() for one in tab.query_selector_all("article"))
    assert said.strip() == "<img src=x onerror=alert(1)> b"
    assert tab.query_selector("article img") is None
    assert tab.query_selector("article strong").inner_text() == "b"
    (card,) = httpx2.get(url + "/conversations").json()["data"]
    assert card["id"] in tab.inner_text("#conversations")
    tab.click("#again")
    _expect(tab, "#conversations li").to_have_count(2)
    assert tab.query_selector_all("article")[1].inner_text() == answer
    tab.click("#fork")
    _expect(tab, "#conversations li").to_have_count(3)
    tab.click("#delete")
    _expect(tab, "#conversations li").to_have_count(2)
    assert tab.query_selector_all("article") == []
    _expect(tab, "#running").to_have_text("0")
    _expect(tab, "#device").to_have_text(re.compile("^0 owned, 0 reserved, [0-9]+ cached, "))
    _expect(tab, "#host").to_have_text(re.compile("^[0-9]+ used, [0-9]+ free$"))
    _expect(tab, "#between").to_have_text(re.compile("ms$"))


class Even:
    """A predictor to which every length up to 80 is equally likely."""

    calibration = None

    def predict(self, prompts, /):
        buckets = LengthBuckets.equal_width(80, 4)
        return LengthDistributions(buckets, np.full((len(prompts), 4), 0.25))


def test_lengths_in_a_browser(tab: Any):
    """While an answer comes, its likely length is beside it, narrower with time; the list rests."""
    with (
        runtime(predictor=Even(), step_s=0.05, max_decode_iterations=1) as rt,
        server(rt) as url,
    ):
        tab.goto(url + "/")
        _expect(tab, "#model").to_have_text(NAME)
        tab.click("summary")
        tab.fill("#max_tokens", "60")
        tab.fill("#said", "hi")
        tab.click("#send")
        _expect(tab, ".length").to_contain_text("0 of about 41 tokens (8 to 60)")
        assert tab.is_disabled("#new")
        before = tab.locator(".lengths .likely").bounding_box()["width"]
        _expect(tab, ".length").to_contain_text("s left")
        _expect(tab, ".length").to_have_text(re.compile("^[34].*"))
        assert tab.locator(".lengths .likely").bounding_box()["width"] < before
        _expect(tab, "#status").to_contain_text("60 tokens in")
        assert tab.is_enabled("#new") and tab.query_selector(".length") is None
        tab.goto("about:blank")


def test_stop_in_a_browser(tab: Any):
    """Stop ends an answer, which is not kept, and the page goes on."""
    with runtime(step_s=0.05, max_decode_iterations=1) as rt, server(rt) as url:
        tab.goto(url + "/")
        tab.fill("#said", "hi")
        tab.click("#send")
        _expect(tab, "article >> nth=1").to_have_text(re.compile(".{3,}"))
        tab.click("#stop")
        _expect(tab, "#status").to_have_text("stopped")
        assert tab.query_selector_all("article") == []
        assert tab.is_enabled("#send") and tab.input_value("#said") == "hi"
        _expect(tab, "#running").to_have_text("0")
        assert httpx2.get(url + "/conversations").json()["data"] == []
        tab.goto("about:blank")  # the page asks for news as long as it is shown


def test_key_in_a_browser(tab: Any):
    """With API keys the page says that one is missing, and works once it is given."""
    with runtime() as rt, server(rt, api_keys=("one",)) as url:
        tab.goto(url + "/")
        _expect(tab, "#status").to_contain_text("API key")
        tab.click("summary")
        tab.fill("#key", "one")
        tab.press("#key", "Tab")
        _expect(tab, "#model").to_have_text(NAME)
        tab.goto("about:blank")
