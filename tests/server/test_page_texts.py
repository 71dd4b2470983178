"""How the page shows texts: Markdown without HTML, colours that can be read, and names."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.server.browser import converse, open_conversation

# In a browser: `make page-test` runs them, too.
pytestmark = pytest.mark.release


def _show(tab: Any, url: str, content: str) -> Any:
    """Open a conversation that has this message, and return the message's element."""
    converse(url, "shown", [{"role": "user", "content": "a"}])
    reply = {"object": "conversation", "messages": [{"role": "assistant", "content": content}]}
    tab.route("**/conversations/shown", lambda route: route.fulfill(json=reply))
    open_conversation(tab, url, "shown")
    httpx2.delete(f"{url}/conversations/shown")
    return tab.locator("article")


def test_links_lead_to_pages_and_mail_only(url: str, tab: Any):
    """An address with another scheme, or of this server, stays text, and so does HTML."""
    refused = [
        *("[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](data:text/html,<b>)"),
        *("[a](//evil.example/x)", "[a](/conversations)", "[a](vbscript:x)", "[a](file:///etc)"),
        *("[a](blob:https://b.example/c)", "[a](#said)", "[a]()", "[](https://b.example/)"),
    ]
    html = "<img src=x onerror=alert(1)>"
    good = [
        f'[{html}](https://a.example/"onclick=alert(1))',
        *("[in (b)](http://b.example/c_(d)?e=1)", "[mail](mailto:a@b.example)"),
    ]
    shown = _show(tab, url, "\n\n".join([*refused, *good]))
    assert [each.inner_text() for each in shown.locator("p").all()][: len(refused)] == refused
    links = shown.locator("a").all()
    assert [each.inner_text() for each in links] == [html, "in (b)", "mail"]
    assert [each.get_attribute("href") for each in links] == [
        *("https://a.example/%22onclick=alert(1)", "http://b.example/c_(d)?e=1"),
        "mailto:a@b.example",
    ]
    for each in links:
        names = each.evaluate("(link) => link.getAttributeNames()")
        assert set(names) == {"href", "title", "target", "rel"}
        assert each.get_attribute("rel") == "noopener noreferrer"
        assert each.get_attribute("target") == "_blank"
    assert shown.locator("img").count() == 0


def test_quotes_and_tables(url: str, tab: Any):
    """Quotes may have quotes, deep ones too; cells have text and no HTML, escaped bars included."""
    html = "<script>alert(1)</script>"
    lines = [
        *("> one", "> > **two**", "", "a | b", "not a table"),
        *("", f"| a | {html} |", "|:--|--:|", "| x \\| y | `c` | more |", "| [l](javascript:1) |"),
        *("", ">" * 5000 + " deep"),
    ]
    shown = _show(tab, url, "\n".join(lines))
    quotes = shown.locator("blockquote")
    assert quotes.nth(0).locator("p").first.inner_text() == "one"
    assert quotes.nth(0).locator("blockquote strong").inner_text() == "two"
    assert quotes.last.inner_text().endswith("> deep") and quotes.count() < 20
    table = shown.locator("table")
    assert [each.inner_text() for each in table.locator("th").all()] == ["a", html]
    cells = [each.inner_text() for each in table.locator("td").all()]
    assert cells == ["x | y", "c", "[l](javascript:1)"]
    assert shown.locator("script, a").count() == 0
    assert "a | b\nnot a table" in shown.inner_text()


# Returns the contrast of each text of the page with what is behind it (WCAG 2.2, section 1.4.3).
CONTRASTS = """() => {
    const rgba = (color) => {
        const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
        return [r, g, b, a];
    };
    const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);
    const behind = (element) => {
        const own = rgba(getComputedStyle(element).backgroundColor);
        return element.parentElement && own[3] < 1 ? over(own, behind(element.parentElement)) : own;
    };
    const luminance = (color) => color.slice(0, 3)
        .map((c) => c / 255)
        .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const found = [];
    for (const element of document.querySelectorAll("body *:not(:disabled)")) {
        const hasText = [...element.childNodes].some((e) => e.nodeType === 3 && e.data.trim());
        if (!hasText || !element.checkVisibility()) continue;
        const ground = behind(element);
        const text = over(rgba(getComputedStyle(element).color), ground);
        const [low, high] = [luminance(text), luminance(ground)].sort((a, b) => a - b);
        found.push([(high + 0.05) / (low + 0.05), element.tagName]);
    }
    return found;
}"""


def test_light_and_dark(url: str, tab: Any):
    """The page follows the system's colours, and texts can be read in both."""
    text = "a [b](https://b.example/)\n> c\n\n| d |\n|---|\n| `e` |"
    grounds = {}
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        _show(tab, url, text)
        grounds[scheme] = tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        contrasts = tab.evaluate(CONTRASTS)
        assert {"A", "DD", "BUTTON", "CODE", "LABEL", "TH"} <= {name for _, name in contrasts}
        assert min(contrasts)[0] >= 4.5, min(contrasts)
    assert grounds["light"] != grounds["dark"]


def test_controls_have_names(url: str, tab: Any):
    """Everything that can have the focus has a name for those who do not see it."""
    _show(tab, url, "a [b](https://b.example/)")
    tree = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
    names = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if any(each["name"] == "focusable" for each in node.get("properties", ()))
    ]
    assert all(name for _, name in names), names
    assert {"button", "textbox", "spinbutton", "link"} <= {role for role, _ in names}
