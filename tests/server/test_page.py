"""The page: its headers and files, and chats in a browser, where there is one."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from jaxserve import server as package
from tests.server.browser import answer_with, configure, expecting, kept, say, texts
from tests.server.serving import NAME, Even, metrics, runtime, server

FOLDER = Path(package.__file__).parent / "page"
OWN = [path for path in FOLDER.iterdir() if path.is_file()]
SCRIPTS = "".join(path.read_text() for path in OWN if path.suffix == ".js")


def test_page_has_a_policy_and_all_its_parts(url: str):
    """Scripts and styles are this server's own, and everything that the page names is there."""
    page = httpx2.get(url + "/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    imported = re.findall(r'from "\./([^"]+)"', SCRIPTS)
    named = re.findall(r'(?:href|src)="([^"]+)"', page.text)
    for name in [*named, *(f"page/{each}" for each in imported)]:
        assert httpx2.get(f"{url}/{name}").status_code == 200
    for name in ("gone.js", "../app.py", "%2e%2e/app.py", ""):
        assert httpx2.get(f"{url}/page/{name}").status_code == 404
    ids = set(re.findall(r'id="([^"]+)"', page.text))
    assert set(re.findall(r'\$\("([^"]+)"\)', SCRIPTS)) <= ids
    assert set(re.findall(r'for="([^"]+)"', page.text)) <= ids


@pytest.mark.fast
def test_page_needs_no_other_site_and_inserts_no_html():
    """There is no address of another site, no inline script, and no way to insert HTML."""
    assert len(OWN) > 5
    for path in OWN:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w|[^:]//[a-z]+\.", text), path
        for bad in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", " on"):
            assert f"{bad}=" not in text and (bad == " on" or bad not in text), (path, bad)


@pytest.mark.fast
def test_libraries_of_the_page_are_those_that_are_recorded():
    """The files of other projects are unchanged, and each has a version and a licence."""
    recorded = (FOLDER / "vendor" / "VERSIONS.txt").read_text()
    found = dict(re.findall(r"^([0-9a-f]{64})  (\S+)", recorded, re.MULTILINE))
    files = sorted((FOLDER / "vendor").glob("*.js"))
    sums = {hashlib.sha256(path.read_bytes()).hexdigest(): path.name for path in files}
    assert found == sums
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    for name in ("markdown-it", "highlight.js", "DOMPurify"):
        assert f"== {name} " in licences


def test_page_without_a_key(url: str):
    """The page is shown without a key, and asks for one; its requests are refused."""
    with runtime() as rt, server(rt, api_keys=("one",)) as guarded:
        assert httpx2.get(guarded + "/").status_code == 200
        assert httpx2.get(guarded + "/page/page.js").status_code == 200
        assert httpx2.get(guarded + "/conversations").status_code == 401


@pytest.mark.release
def test_chat_in_a_browser(url: str, tab: Any):
    """An answer streams in with its figures; the conversation has a title and an address."""
    tab.goto(url + "/")
    expecting(tab, "#model").to_have_text(NAME)
    expecting(tab, "h1").to_have_text("jaxserve")
    configure(tab, temperature=0, max_tokens=60)
    say(tab, "<img src=x onerror=alert(1)>\n**b**")
    expecting(tab, ".figures").to_have_text(
        re.compile(r"^60 tokens · [0-9.]+ tokens/s · first after [0-9.]+ s · cut off")
    )
    assert texts(tab)[0] == "<img src=x onerror=alert(1)>\n**b**"
    assert tab.locator("article img").count() == 0
    (conversation,) = kept(tab)
    assert tab.url == f"{url}/#/c/{conversation['id']}"
    expecting(tab, "#conversations a").to_have_text("<img src=x onerror=alert(1)> **b**")
    assert tab.title() == "<img src=x onerror=alert(1)> **b** – jaxserve"
    before = texts(tab)
    tab.reload()
    expecting(tab, "article").to_have_count(2)
    assert texts(tab) == before
    assert tab.locator("#conversations [aria-current=page]").count() == 1
    tab.goto(url + "/#/c/unknown")
    expecting(tab, "#status").to_have_text("this browser has no conversation at this address")
    tab.on("dialog", lambda dialog: dialog.accept())
    tab.hover("#conversations li")
    tab.click("#conversations button")
    expecting(tab, "#conversations li").to_have_count(0)
    assert kept(tab) == []


@pytest.mark.release
def test_conversations_are_listed_and_found(url: str, tab: Any):
    """The list has the last used conversation first, and a search looks into all messages."""
    answer_with(tab, "the Danube")
    tab.goto(url + "/")
    for said in ("rivers", "mountains"):
        tab.click("#new")
        say(tab, said)
        expecting(tab, ".figures").to_contain_text("1 tokens")
    links = tab.locator("#conversations a")
    assert links.all_inner_texts() == ["mountains", "rivers"]
    tab.fill("#search", "MOUNT")
    expecting(tab, "#conversations a").to_have_text("mountainsmountains")
    tab.fill("#search", "danube")
    expecting(tab, "#conversations small").to_have_text(["the Danube", "the Danube"])
    links.nth(1).click()
    expecting(tab, "article >> nth=0").to_contain_text("rivers")
    tab.fill("#search", "no such text")
    expecting(tab, "#conversations li").to_have_count(0)
    tab.go_back()
    expecting(tab, "article >> nth=0").to_contain_text("mountains")


@pytest.mark.release
def test_conversations_leave_and_come_back(url: str, tab: Any, tmp_path: Path):
    """Export writes a file from which another browser has the same conversations."""
    answer_with(tab, "the Danube")
    tab.goto(url + "/")
    say(tab, "rivers")
    expecting(tab, ".figures").to_contain_text("1 tokens")
    with tab.expect_download() as found:
        tab.click("#export")
    path = tmp_path / found.value.suggested_filename
    found.value.save_as(path)
    before = kept(tab)
    tab.evaluate("localStorage.clear()")
    tab.goto(url + "/#/")
    tab.reload()
    expecting(tab, "#conversations li").to_have_count(0)
    for told in ("1 conversations are new here", "0 conversations are new here"):
        tab.set_input_files("#imported", path)
        expecting(tab, "#status").to_have_text(told)
        expecting(tab, "#conversations a").to_have_text("rivers")
    assert kept(tab) == before
    (own,) = before
    wrong = [{**own, "leaf": 2}, {**own, "id": "a/b"}, {**own, "messages": [{"role": "user"}]}]
    wrong.append({**own, "messages": [{**own["messages"][0], "parent": 0}], "leaf": 0})
    for text in (*map(json.dumps, wrong), *(json.dumps([each]) for each in wrong), "not JSON"):
        path.write_text(text)
        tab.evaluate("document.getElementById('status').textContent = ''")
        tab.set_input_files("#imported", path)
        expecting(tab, "#status").to_contain_text(path.name)
    assert kept(tab) == before


@pytest.mark.release
def test_files_and_keys(url: str, tab: Any, tmp_path: Path):
    """Text files go into the message, in a fence that they do not end; others are named."""
    text, other = tmp_path / "a.py", tmp_path / "b.bin"
    text.write_text("x = 1\n```\n")
    other.write_bytes(b"\xff\xfe\x00")
    tab.goto(url + "/")
    tab.fill("#said", "Look at")
    tab.set_input_files("#attached", [text, other])
    expecting(tab, "#said").to_have_value("Look at\na.py:\n````\nx = 1\n```\n````\n")
    expecting(tab, "#status").to_contain_text("b.bin is not text")
    tab.keyboard.press("Control+k")
    expecting(tab, "#search").to_be_focused()
    tab.keyboard.press("Control+Shift+O")
    expecting(tab, "#said").to_be_focused()


@pytest.mark.release
def test_edit_and_regenerate(url: str, tab: Any):
    """Another answer, and a changed message, are versions beside the old ones, which stay."""
    answers = [["one"], ["two"], ["three"]]
    tab.goto(url + "/")
    asked = answer_with(tab, *answers[0])
    configure(tab, system="be brief")
    say(tab, "count")
    expecting(tab, ".figures").to_contain_text("tokens")
    answer_with(tab, *answers[1])
    tab.click("[aria-label='Regenerate answer']")
    expecting(tab, "article.assistant .text").to_have_text("two")
    expecting(tab, "article.assistant .actions span").to_have_text("2/2")
    asked = answer_with(tab, *answers[2])
    tab.click("[aria-label='Edit message']")
    tab.fill(".editor", "count on")
    tab.click("article form [type=submit]")
    expecting(tab, "article.assistant .text").to_have_text("three")
    assert [(each["role"], each["content"]) for each in asked[0]["messages"]] == [
        ("system", "be brief"),
        ("user", "count on"),
    ]
    say(tab, "more")
    expecting(tab, "article").to_have_count(5)
    assert [each["content"] for each in asked[1]["messages"]] == [
        *("be brief", "count on", "three", "more"),
    ]
    tab.locator("[aria-label='Version before']").first.click()
    assert texts(tab) == ["be brief", "count", "two"]
    tab.locator("[aria-label='Version before']").nth(1).click()
    assert texts(tab) == ["be brief", "count", "one"]
    tab.locator("[aria-label='Version after']").first.click()
    assert texts(tab) == ["be brief", "count on", "three", "more", "three"]


@pytest.mark.release
def test_engine_view(tab: Any):
    """The engine is behind one button: plots over time, and means of the last minute."""
    with runtime() as rt, server(rt) as url:
        held: list[Any] = []
        tab.route("**/metrics", lambda route: held.append(route))
        tab.goto(url + "/")
        tab.wait_for_timeout(2500)
        assert len(held) == 1  # asked for again after an answer
        held[0].continue_()
        tab.unroute("**/metrics")
        expecting(tab, "#engine").to_be_hidden()
        tab.click("#watch")
        expecting(tab, "#engine figure svg").to_have_count(5)
        expecting(tab, "#engine figure >> nth=1").to_contain_text("0 tokens/s")
        assert [tab.inner_text(f"#{id}") for id in ("first", "between")] == ["–", "–"]
        configure(tab, max_tokens=4)
        say(tab, "hi")
        for id in ("first", "between"):
            expecting(tab, f"#{id}").to_have_text(re.compile("^[0-9.]+ ms$"))
        pages = tab.locator("#engine figure >> nth=3")
        assert re.search("0 owned\\s+0 reserved\\s+[0-9]+ cached", pages.inner_text())
        drawn = [each.get_attribute("d") for each in pages.locator("path").all()]
        assert all(re.fullmatch(r"M[\d.L -]+Z", each) for each in drawn), drawn
        tab.click("#watch")
        expecting(tab, "#engine").to_be_hidden()
        tab.goto("about:blank")


# Keeps every text that an element of the page gets.
WATCHED = """(element) => {
    window.told = [];
    new MutationObserver(() => window.told.push(element.textContent))
        .observe(element, {childList: true});
}"""


@pytest.mark.release
def test_while_an_answer_comes(tab: Any):
    """The box is free, other conversations go on, and a complete answer is announced once."""
    with runtime(step_s=0.05, max_decode_iterations=1) as rt, server(rt) as url:
        tab.goto(url + "/")
        configure(tab, max_tokens=60)
        tab.locator("#announced").evaluate(WATCHED)
        say(tab, "first")
        answer = "article.assistant .text"
        expecting(tab, answer).to_have_text(re.compile(".{3,}"))
        assert tab.input_value("#said") == "" and tab.is_enabled("#said")
        say(tab, "too early")
        expecting(tab, "#status").to_contain_text("still being written")
        assert tab.input_value("#said") == "too early"
        tab.click("#new")
        say(tab, "second")
        expecting(tab, answer).to_have_text(re.compile(".{3,}"))
        assert metrics(url)["jaxserve:num_requests_running"] == 2
        expecting(tab, "#conversations .busy").to_have_count(2)
        expecting(tab, ".figures").to_contain_text("60 tokens")
        assert tab.locator(answer).evaluate("(it) => it.closest('[aria-live]').ariaLive") == "off"
        expecting(tab, "#conversations .busy").to_have_count(0)
        whole = tab.locator(answer).text_content()
        assert tab.evaluate("told.filter((each) => each)") == [whole]
        tab.locator("#conversations a").nth(1).click()
        expecting(tab, ".figures").to_contain_text("60 tokens")
        tab.goto("about:blank")


@pytest.mark.release
def test_lengths_in_a_browser(tab: Any):
    """While an answer comes, its likely length is beside it, and becomes narrower with time."""
    with runtime(predictor=Even(80), step_s=0.05, max_decode_iterations=1) as rt, server(rt) as url:
        tab.goto(url + "/")
        configure(tab, max_tokens=60)
        say(tab, "hi")
        expecting(tab, ".length").to_contain_text("0 of about 41 tokens (8 to 60)")
        before = tab.locator(".lengths .likely").bounding_box()["width"]
        expecting(tab, ".length").to_contain_text("s left")
        expecting(tab, ".length").to_have_text(re.compile("^[34].*"))
        assert tab.locator(".lengths .likely").bounding_box()["width"] < before
        expecting(tab, ".figures").to_contain_text("60 tokens")
        expecting(tab, ".length").to_have_count(0)
        tab.goto("about:blank")


@pytest.mark.release
def test_stop_keeps_what_was_written(tab: Any):
    """Stop ends a request; its text stays, also over a reload, and the conversation goes on."""
    with runtime(step_s=0.05, max_decode_iterations=1) as rt, server(rt) as url:
        tab.goto(url + "/")
        configure(tab, max_tokens=200)
        say(tab, "hi")
        expecting(tab, "article.assistant .text").to_have_text(re.compile(".{3,}"))
        assert "stopped" not in tab.inner_text(".figures")
        tab.click("#stop")
        expecting(tab, ".figures").to_contain_text("stopped")
        written = texts(tab)
        assert len(written[1]) >= 3
        expecting(tab, "#send").to_be_visible()
        tab.click("#watch")
        expecting(tab, "#engine figure >> nth=0").to_contain_text("0 running")
        tab.reload()
        expecting(tab, ".figures").to_contain_text("stopped")
        assert texts(tab) == written
        asked = answer_with(tab, "well")
        say(tab, "go on")
        expecting(tab, "article").to_have_count(4)
        assert [each["content"] for each in asked[0]["messages"]][0::2] == ["hi", "go on"]
        assert asked[0]["messages"][1]["content"].split() == written[1].split()
        tab.goto("about:blank")  # the page asks for news as long as it is shown


@pytest.mark.release
def test_failed_answer_can_be_asked_for_again(url: str, tab: Any):
    """An error is shown below the message, and a later prompt leaves out the unanswered one."""
    tab.goto(url + "/")
    error = {"error": {"message": "the server is too busy"}}
    tab.route("**/v1/chat/completions", lambda route: route.fulfill(status=401, json=error))
    say(tab, "a")
    expecting(tab, ".figures.error").to_have_text("the server is too busy")
    asked = answer_with(tab, "b")
    say(tab, "c")
    expecting(tab, "article").to_have_count(4)
    assert [each["content"] for each in asked[0]["messages"]] == ["c"]
    tab.locator("[aria-label='Regenerate answer']").first.click()
    expecting(tab, ".figures").to_contain_text("1 tokens")
    assert texts(tab) == ["a", "b"]


@pytest.mark.release
def test_key_in_a_browser(tab: Any):
    """With API keys the page says that one is missing, and works once it is given."""
    with runtime() as rt, server(rt, api_keys=("one",)) as url:
        tab.goto(url + "/")
        expecting(tab, "#status").to_contain_text("API key")
        configure(tab, key="one")
        expecting(tab, "#model").to_have_text(NAME)
        expecting(tab, "#status").to_have_text("")
        tab.goto("about:blank")
