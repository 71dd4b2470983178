"""The page: its headers, and what it must not contain. In a browser, where there is one."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.server.serving import CHAT, NAME, post, runtime, server

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


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


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
def test_page_in_a_browser(url: str, tmp_path: Path):
    """A browser runs the script under the policy: it shows the model, and kept conversations."""
    body = {"messages": CHAT, "conversation_id": "shown <b>", "max_tokens": 3}
    assert post(url, "/v1/chat/completions", body).status_code == 200
    command = [BROWSER, "--headless", "--no-sandbox", f"--user-data-dir={tmp_path}"]
    shown = subprocess.run(
        [*command, "--virtual-time-budget=5000", "--dump-dom", url + "/"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert f'<dd id="model">{NAME}</dd>' in shown
    assert html.escape("shown <b>") in shown and "<b>" not in shown
