"""How the page shows texts: Markdown without HTML, colours that can be read, and names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.browser import answer_with, configure, expecting, kept, say, texts

# In a browser: `make page-test` runs them, too.
pytestmark = pytest.mark.release


def _thought(text: str) -> dict[str, str]:
    return {"reasoning_content": text, "reasoning": text}


def _call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    """Return what adds to a call; its name begins it."""
    begun = {} if name is None else {"id": f"call_{index}", "type": "function"}
    function = {"arguments": arguments} | ({} if name is None else {"name": name})
    return {"tool_calls": [{"index": index, **begun, "function": function}]}


def _show(tab: Any, url: str, *pieces: str | dict[str, Any], finish: str = "stop") -> Any:
    """Open the page, have a message answered with this text, and return the answer's element."""
    answer_with(tab, *pieces, finish=finish)
    tab.goto(url + "/")
    say(tab, "a")
    expecting(tab, ".figures").to_contain_text("tokens")
    return tab.locator("article.assistant")


def test_links_lead_to_pages_and_mail_only(url: str, tab: Any):
    """An address with another scheme, or of this server, stays text, and so does HTML."""
    refused = [
        *("[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](data:text/html,b)"),
        *("[a](//evil.example/x)", "[a](/conversations)", "[a](vbscript:x)", "[a](file:///etc)"),
        *("[a](blob:https-b.example/c)", "[a](#said)", "[a](java&#x73;cript:alert(1))"),
    ]
    html = "<img src=x onerror=alert(1)>"
    good = [
        f'[{html}](https://a.example/"onclick=alert(1))',
        *("[in (b)](http://b.example/c_(d)?e=1)", "[mail](mailto:a@b.example)"),
        "https://bare.example/x",
    ]
    shown = _show(tab, url, "\n\n".join([*refused, *good]))
    paragraphs = [each.inner_text() for each in shown.locator(".text p").all()]
    assert paragraphs[: len(refused) - 1] == refused[:-1]
    links = shown.locator("a").all()
    assert [each.inner_text() for each in links] == [
        *(html, "in (b)", "mail", "https://bare.example/x"),
    ]
    assert [each.get_attribute("href") for each in links] == [
        *("https://a.example/%22onclick=alert(1)", "http://b.example/c_(d)?e=1"),
        *("mailto:a@b.example", "https://bare.example/x"),
    ]
    for each in links:
        names = each.evaluate("(link) => link.getAttributeNames()")
        assert set(names) == {"href", "title", "target", "rel"}
        assert each.get_attribute("rel") == "noopener noreferrer"
        assert each.get_attribute("target") == "_blank"
    assert shown.locator("img").count() == 0


HOSTILE = [
    "<script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\">",
    "<svg onload=\"document.title = 'taken'\"><style>*{display:none}</style></svg>",
    "<iframe srcdoc=\"<script>parent.document.title = 'taken'</script>\"></iframe>",
    "<a href=\"javascript:document.title = 'taken'\">a</a>",
    "![b](https://b.example/c.png)",
    '<form id="form"><input name="said"></form>',
]


def test_text_of_a_model_runs_nothing(url: str, tab: Any):
    """HTML is text wherever it is: plain, in a table, in code, in thinking; images are links."""
    everywhere = "\n\n".join(HOSTILE)
    table = "|a|\n|-|\n" + "\n".join(f"|{each}|" for each in HOSTILE)
    fence = f'```html" onload="x\n{everywhere}\n```'
    text = f"{everywhere}\n\n{table}\n\n{fence}\n\n> {HOSTILE[0]}"
    shown = _show(tab, url, _thought(everywhere), text)
    tab.click("summary")
    assert tab.title() == "a – jaxserve"
    bad = "script, img, svg, style, iframe, form, input, [onload], [onerror], [style], [id]"
    assert shown.locator(bad).count() == 0
    for each in HOSTILE:
        if not each.startswith("!"):
            assert each in shown.locator(".text").inner_text()
            assert each in shown.locator(".thinking").inner_text()
    assert {each.get_attribute("href") for each in shown.locator("a").all()} <= {
        "https://b.example/c.png"
    }


def test_markdown(url: str, tab: Any):
    """Headings, lists, quotes, tables and code are elements; code has colours and is copied."""
    code = 'def f(x):\n    return "<b>"  # a comment'
    lines = [
        *("## A heading", "", "3. three", "4. *four*", "   - inner", "", "> one", "> > **two**"),
        *("", "line", "next line", "", "| a | b |", "|:--|--:|", "| x \\| y | `c` |"),
        *("", f"```python\n{code}\n```", "", "```\nplain <i>\n```", "", ">" * 5000 + " deep"),
    ]
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "\n".join(lines)
    shown = _show(tab, url, *(text[i : i + 500] for i in range(0, len(text), 500)))
    expecting(tab, "article h2").to_have_text("A heading")
    assert shown.locator("ol").get_attribute("start") == "3"
    assert shown.locator("ol li em").inner_text() == "four"
    assert shown.locator("ol ul li").inner_text() == "inner"
    assert shown.locator("blockquote blockquote strong").inner_text() == "two"
    assert "line\nnext line" in shown.inner_text()
    assert [each.inner_text() for each in shown.locator("th, td").all()] == ["a", "b", "x | y", "c"]
    assert shown.locator("td.right").inner_text() == "c"
    blocks = shown.locator(".code")
    assert blocks.locator("pre").all_text_contents() == [code + "\n", "plain <i>\n"]
    assert blocks.nth(0).locator(".hljs-keyword").first.inner_text() == "def"
    assert blocks.nth(0).locator("p").inner_text().startswith("python")
    blocks.nth(0).locator("button").click()
    expecting(tab, ".code button >> nth=0").to_have_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == code + "\n"
    tab.click("[aria-label='Copy answer']")
    expecting(tab, "[aria-label='Copy answer']").to_have_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == text


def test_thinking_is_folded(url: str, tab: Any):
    """What a model thinks is folded, and is not copied or announced; the model gets it back."""
    shown = _show(tab, url, _thought("let me "), _thought("*see*"), "the ", "answer")
    expecting(tab, "article.assistant .text").to_have_text("the answer")
    thoughts = shown.locator("details")
    assert thoughts.get_attribute("open") is None
    assert thoughts.locator("em").is_hidden()
    tab.click("summary")
    assert thoughts.locator("em").inner_text() == "see"
    assert tab.inner_text("#announced") == "the answer"
    (conversation,) = kept(tab)
    assert conversation["messages"][1]["content"] == "the answer"
    assert conversation["messages"][1]["reasoning"] == "let me *see*"
    asked = answer_with(tab, "b")
    say(tab, "and?")
    expecting(tab, "article.assistant .text >> nth=1").to_have_text("b")
    assert asked[0]["messages"][1] == {
        "role": "assistant",
        "content": "the answer",
        "reasoning_content": "let me *see*",
    }


def test_cut_off_thinking_is_folded(url: str, tab: Any):
    """Thinking that has not ended is folded, too, and an answer without thinking has none."""
    shown = _show(tab, url, _thought("let me see"))
    expecting(tab, "summary").to_have_text("Thinking …")
    assert shown.locator(".text").inner_text() == ""
    answer_with(tab, "plain")
    tab.click("[aria-label='Regenerate answer']")
    expecting(tab, "article.assistant .text").to_have_text("plain")
    expecting(tab, "article details").to_be_hidden()


def test_calls_of_tools_are_folded(url: str, tab: Any):
    """Calls show their names, folded over their arguments; what is written then is the results."""
    given = '{"city": "<b>```\\n"}'
    calls = [_call(0, "", "weather"), _call(0, given[:9]), _call(0, given[9:]), _call(1, "", "now")]
    shown = _show(tab, url, *calls, finish="tool_calls")
    expecting(tab, "details:visible summary").to_have_text(["Calls weather", "Calls now"])
    assert tab.inner_text("#announced") == "Calls weather, Calls now"
    assert shown.locator("pre:visible").count() == 0
    tab.click("text=Calls weather")
    assert json.loads(shown.locator("pre:visible").inner_text()) == json.loads(given)
    assert shown.locator("b").count() == 0
    (conversation,) = kept(tab)
    assert conversation["messages"][1]["calls"] == [
        {"id": "call_0", "name": "weather", "arguments": given},
        {"id": "call_1", "name": "now", "arguments": ""},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    configure(tab, tools=json.dumps(tools))
    asked = answer_with(tab, "it rains")
    expecting(tab, "#said").to_have_attribute("placeholder", "Result of weather")
    say(tab, "rain")
    expecting(tab, "#said").to_have_attribute("placeholder", "Result of now")
    assert asked == []
    say(tab, "noon")
    expecting(tab, "article.assistant .text >> nth=1").to_have_text("it rains")
    assert texts(tab) == ["a", "", "rain", "noon", "it rains"]
    assert asked[0]["tools"] == tools
    answered, *results = asked[0]["messages"][1:]
    assert [(each["id"], each["function"]) for each in answered["tool_calls"]] == [
        ("call_0", {"name": "weather", "arguments": given}),
        ("call_1", {"name": "now", "arguments": ""}),
    ]
    assert results == [
        {"role": "tool", "content": "rain", "tool_call_id": "call_0"},
        {"role": "tool", "content": "noon", "tool_call_id": "call_1"},
    ]


def test_cut_off_calls_are_shown_and_not_sent(url: str, tab: Any):
    """Arguments that end too early are shown as they are; the model does not get them back."""
    shown = _show(tab, url, "well", _call(0, '{"city": ', "weather"), finish="length")
    tab.click("text=Calls weather")
    assert shown.locator("details pre").inner_text() == '{"city": '
    expecting(tab, "#said").to_have_attribute("placeholder", "Message")
    asked = answer_with(tab, "b")
    say(tab, "and?")
    expecting(tab, "article.assistant .text >> nth=1").to_have_text("b")
    assert asked[0]["messages"][1] == {"role": "assistant", "content": "well"}
    tab.click("#configure")
    tab.fill("#tools", "[{")
    tab.click("#settings button")
    problem = "document.getElementById('tools').validationMessage"
    assert tab.evaluate(problem).startswith("the tools in Settings are not JSON: ")


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
    """The page follows the system's colours or its switch, and texts can be read in both."""
    text = "a [b](https://b.example/)\n> c\n\n| d |\n|---|\n| `e` |\n```python\nx = 1 # f\n```"
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    grounds = {}
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        _show(tab, url, _thought("g"), text)
        tab.click("#watch")
        tab.click("summary")
        tab.fill("#search", "a")
        grounds[scheme] = tab.evaluate(ground)
        contrasts = tab.evaluate(CONTRASTS)
        wanted = {"A", "DD", "BUTTON", "CODE", "SUMMARY", "TH", "SMALL", "FIGCAPTION", "SPAN"}
        assert wanted <= {name for _, name in contrasts}
        assert min(contrasts)[0] >= 4.5, min(contrasts)
    assert grounds["light"] != grounds["dark"]
    tab.click("#theme")
    assert tab.evaluate(ground) == grounds["light"]
    tab.reload()
    assert tab.evaluate(ground) == grounds["light"]
    tab.click("#theme")
    tab.emulate_media(color_scheme="light")
    expecting(tab, "html").to_have_attribute("data-theme", "light")  # the system's again


def test_controls_have_names(url: str, tab: Any):
    """Everything that can have the focus has a name for those who do not see it."""
    _show(tab, url, _thought("c"), "a [b](https://b.example/)\n```\nd\n```")
    found = []
    for selector in ("#search", "#configure"):  # with the page, and with the settings
        tab.click(selector)
        tree = tab.context.new_cdp_session(tab).send("Accessibility.getFullAXTree")["nodes"]
        found += [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree
            if any(each["name"] == "focusable" for each in node.get("properties", ()))
        ]
    assert all(name for _, name in found), found
    assert {"button", "textbox", "searchbox", "spinbutton", "link"} <= {role for role, _ in found}


def test_narrow_page(url: str, tab: Any):
    """On a phone nothing is cut off, and the list and the engine open over the chat."""
    tab.set_viewport_size({"width": 390, "height": 844})
    _show(tab, url, "x" * 300 + "\n\n| " + "wide | " * 40 + "\n" + "|-" * 40 + "|")
    width = "document.documentElement.scrollWidth"
    assert tab.evaluate(width) == 390
    for id in ("menu", "watch", "configure", "theme", "said", "send"):
        box = tab.locator(f"#{id}").bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= 390, id
    expecting(tab, "#conversations a").to_be_hidden()
    tab.click("#menu")
    expecting(tab, "#conversations a").to_be_visible()
    tab.click("#new")
    expecting(tab, "#conversations a").to_be_hidden()
    tab.click("#watch")
    assert tab.locator("#engine").bounding_box()["width"] == pytest.approx(390, abs=2)
    expecting(tab, "#said").to_be_hidden()
    assert tab.evaluate(width) == 390
    tab.click("#watch")
    expecting(tab, "#said").to_be_visible()
