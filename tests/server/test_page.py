"""The page: its headers, and what it must not contain. In a browser, where there is one."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest

from tests.server.browser import converse, expecting, open_conversation
from tests.server.serving import NAME, Even, runtime, server


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


@pytest.mark.release
def test_chat_in_a_browser(url: str, tab: Any):
    """An answer streams in; it is kept, regenerated, forked and deleted; the engine is shown."""
    tab.goto(url + "/")
    expecting(tab, "#model").to_have_text(NAME)
    tab.click("summary")
    tab.fill("#temperature", "0")
    tab.fill("#max_tokens", "12")
    bold = "<img src=x onerror=alert(1)> **b**"
    tab.fill("#said", bold)
    tab.keyboard.press("Enter")
    expecting(tab, "#status").to_contain_text("12 tokens in")
    said, answer = (one.inner_text() for one in tab.query_selector_all("article"))
    assert said.strip() == "<img src=x onerror=alert(1)> b"
    assert tab.query_selector("article img") is None
    assert tab.query_selector("article strong").inner_text() == "b"
    (card,) = httpx2.get(url + "/conversations").json()["data"]
    assert card["id"] in tab.inner_text("#conversations")
    tab.click("#again")
    expecting(tab, "#conversations li").to_have_count(2)
    assert tab.query_selector_all("article")[1].inner_text() == answer
    tab.click("#fork")
    expecting(tab, "#conversations li").to_have_count(3)
    tab.click("#delete")
    expecting(tab, "#conversations li").to_have_count(2)
    assert tab.query_selector_all("article") == []
    expecting(tab, "#running").to_have_text("0")
    expecting(tab, "#device").to_have_text(re.compile("^0 owned, 0 reserved, [0-9]+ cached, "))
    expecting(tab, "#host").to_have_text(re.compile("^[0-9]+ used, [0-9]+ free$"))
    expecting(tab, "#disk").to_have_text("0 used")
    expecting(tab, "#between").to_have_text(re.compile("ms$"))


SYSTEM = {"role": "system", "content": "be brief"}
EXAMPLE = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]


@pytest.mark.release
@pytest.mark.parametrize("num_turns", [1, 2])
def test_regenerate_keeps_what_the_conversation_began_with(url: str, tab: Any, num_turns: int):
    """The system prompt and examples are the conversation's own, and only its last turn goes."""
    turns = [
        [SYSTEM, *EXAMPLE, {"role": "user", "content": "2"}],
        [{"role": "user", "content": "3"}],
    ]
    id = f"regenerated-{num_turns}"
    before = converse(url, id, *turns[:num_turns])
    open_conversation(tab, url, id)
    tab.fill("#system", "not this one")
    tab.fill("#said", "a draft")
    tab.click("#again")
    expecting(tab, "#status").to_contain_text("4 tokens in")
    newest = httpx2.get(url + "/conversations").json()["data"][0]
    assert newest["id"] != id and newest["num_turns"] == num_turns
    messages = httpx2.get(f"{url}/conversations/{newest['id']}").json()["messages"]
    assert messages == before
    assert tab.input_value("#said") == "a draft"
    for each in (id, newest["id"]):
        httpx2.delete(f"{url}/conversations/{each}")


@pytest.mark.release
def test_opened_conversation_goes_on(url: str, tab: Any):
    """A conversation from the list has the next turn, and keeps its id."""
    turns = [[{"role": "user", "content": text}] for text in ("a", "b")]
    expected = converse(url, "there", *turns)
    converse(url, "here", turns[0])
    open_conversation(tab, url, "here")
    expecting(tab, "article").to_have_count(2)
    tab.fill("#said", "b")
    tab.keyboard.press("Enter")
    expecting(tab, "#status").to_contain_text("4 tokens in")
    expecting(tab, "#conversations [aria-current=true]").to_have_text("here (2)")
    assert httpx2.get(url + "/conversations/here").json()["messages"] == expected
    for each in ("here", "there"):
        httpx2.delete(f"{url}/conversations/{each}")


@pytest.mark.release
def test_system_prompt_reaches_the_model(url: str, tab: Any):
    """The model reads the system prompt of the page, and answers as to a client that sends it."""
    asked = [SYSTEM, {"role": "user", "content": "hi"}]
    expected = converse(url, "with", asked)
    assert converse(url, "without", asked[1:])[-1] != expected[-1]
    tab.goto(url + "/")
    tab.click("summary")
    tab.fill("#temperature", "0")
    tab.fill("#max_tokens", "4")
    tab.fill("#system", SYSTEM["content"])
    tab.fill("#said", "hi")
    tab.click("#send")
    expecting(tab, "#status").to_contain_text("4 tokens in")
    newest = httpx2.get(url + "/conversations").json()["data"][0]["id"]
    assert httpx2.get(f"{url}/conversations/{newest}").json()["messages"] == expected
    for each in ("with", "without", newest):
        httpx2.delete(f"{url}/conversations/{each}")


@pytest.mark.release
def test_engine_is_shown_as_it_is_now(tab: Any):
    """Times are means of the last minute, and metrics are asked for again after an answer."""
    with runtime() as rt, server(rt) as url:
        converse(url, "before", [{"role": "user", "content": "a"}])
        held: list[Any] = []
        tab.route("**/metrics", lambda route: held.append(route))
        tab.goto(url + "/")
        tab.wait_for_timeout(2500)
        assert len(held) == 1
        held[0].continue_()
        tab.unroute("**/metrics")
        expecting(tab, "#rate").to_have_text("0")
        assert [tab.inner_text(f"#{id}") for id in ("first", "between")] == ["–", "–"]
        tab.fill("#said", "hi")
        tab.keyboard.press("Enter")
        for id in ("first", "between"):
            expecting(tab, f"#{id}").to_have_text(re.compile("^[0-9.]+ ms$"))
        tab.goto("about:blank")


# Keeps every text that an element of the page gets.
WATCHED = """(element) => {
    window.told = [];
    new MutationObserver(() => window.told.push(element.textContent))
        .observe(element, {childList: true});
}"""


@pytest.mark.release
def test_an_answer_is_announced_once(tab: Any):
    """A screen reader is told of an answer when it is complete, and of no part of it before."""
    with runtime(step_s=0.02, max_decode_iterations=1) as rt, server(rt) as url:
        tab.goto(url + "/")
        tab.click("summary")
        tab.fill("#max_tokens", "30")
        tab.locator("#announced").evaluate(WATCHED)
        tab.fill("#said", "hi")
        tab.click("#send")
        answer = tab.locator("article >> nth=1")
        expecting(tab, "article >> nth=1").to_have_text(re.compile(".{3,}"))
        assert answer.evaluate("(each) => each.closest('[aria-live]').ariaLive") == "off"
        expecting(tab, "#status").to_contain_text("30 tokens in")
        assert tab.evaluate("told.filter((each) => each)") == [answer.text_content()]
        assert tab.get_attribute("#announced", "aria-live") == "polite"
        tab.goto("about:blank")


@pytest.mark.release
def test_lengths_in_a_browser(tab: Any):
    """While an answer comes, its likely length is beside it, narrower with time; the list rests."""
    with runtime(predictor=Even(80), step_s=0.05, max_decode_iterations=1) as rt, server(rt) as url:
        tab.goto(url + "/")
        expecting(tab, "#model").to_have_text(NAME)
        tab.click("summary")
        tab.fill("#max_tokens", "60")
        tab.fill("#said", "hi")
        tab.click("#send")
        expecting(tab, ".length").to_contain_text("0 of about 41 tokens (8 to 60)")
        assert tab.is_disabled("#new")
        before = tab.locator(".lengths .likely").bounding_box()["width"]
        expecting(tab, ".length").to_contain_text("s left")
        expecting(tab, ".length").to_have_text(re.compile("^[34].*"))
        assert tab.locator(".lengths .likely").bounding_box()["width"] < before
        expecting(tab, "#status").to_contain_text("60 tokens in")
        assert tab.is_enabled("#new") and tab.query_selector(".length") is None
        tab.goto("about:blank")


@pytest.mark.release
def test_stop_in_a_browser(tab: Any):
    """Stop ends an answer, which is not kept, and the page goes on."""
    with runtime(step_s=0.05, max_decode_iterations=1) as rt, server(rt) as url:
        tab.goto(url + "/")
        tab.fill("#said", "hi")
        tab.click("#send")
        expecting(tab, "article >> nth=1").to_have_text(re.compile(".{3,}"))
        tab.click("#stop")
        expecting(tab, "#status").to_have_text("stopped")
        assert tab.query_selector_all("article") == []
        assert tab.is_enabled("#send") and tab.input_value("#said") == "hi"
        expecting(tab, "#running").to_have_text("0")
        assert httpx2.get(url + "/conversations").json()["data"] == []
        tab.goto("about:blank")  # the page asks for news as long as it is shown


@pytest.mark.release
def test_key_in_a_browser(tab: Any):
    """With API keys the page says that one is missing, and works once it is given."""
    with runtime() as rt, server(rt, api_keys=("one",)) as url:
        tab.goto(url + "/")
        expecting(tab, "#status").to_contain_text("API key")
        tab.click("summary")
        tab.fill("#key", "one")
        tab.press("#key", "Tab")
        expecting(tab, "#model").to_have_text(NAME)
        tab.goto("about:blank")
