"""What a family's chat template makes of the calls in a history is read back as the same calls."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.jinja import render
from jaxserve.models.tool_calls import (
    GIGACHAT,
    LIST,
    NamedCall,
    QuotedArguments,
    ToolFormat,
    format_of,
)
from jaxserve.models.tool_reader import Call, CallReader, MoreArguments, Part
from tests.common.tiers import RELEASE_EXAMPLES, examples, seeds
from tests.models.tool_templates import BEGIN, END, TEMPLATES

pytestmark = pytest.mark.fast

TOOLS: dict[str, dict[str, Any]] = {
    "save": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "force": {"type": "boolean"},
            "tags": {"$ref": "#/$defs/tags"},
            "more": {"type": "object"},
        },
        "$defs": {"tags": {"type": "array"}},
    },
    "get_now": {"type": "object", "properties": {}},
}
# Texts in arguments are made of these: other formats' tags, and everything that JSON and Python
# escape. The tags that end a value of plain text and begin the next one together are left out:
# where both stand in a value, the format is ambiguous.
_WORDS = ["5", "true", " ", "\n", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", "é"]
_WORDS += ["😀", "a b", "\u2028", "</tool_call>", "<tool_call>", "</parameter>", "</arg_value>"]
_WORDS += ["[TOOL_CALLS]", "\\ud800", "<|call|>", "; ", "```", "<｜tool▁call▁end｜>"]
_TEXT = st.lists(st.sampled_from(_WORDS), max_size=6).map("".join)
_KEYS = st.sampled_from(["a", "b_c", "d1"])
_NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
_SCALARS = _TEXT | _NUMBERS | st.booleans()
_OBJECTS = st.dictionaries(_KEYS, _SCALARS | st.lists(_SCALARS, max_size=2), max_size=2)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": _TEXT,
        "count": st.integers(-(2**70), 2**70),
        "share": _NUMBERS | st.none(),
        "force": st.booleans(),
        "tags": st.lists(_SCALARS | _OBJECTS, max_size=2),
        "more": _OBJECTS,
    },
)
_CALLS = st.lists(
    st.tuples(st.just("save"), _ARGUMENTS) | st.tuples(st.just("get_now"), st.just({})),
    min_size=1,
    max_size=3,
)


def _written(template: str, content: str, calls: Sequence[tuple[str, Any]]) -> str:
    made = [
        {"id": f"functions.{name}:{i}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": made}
    text = render(template, [answer], {}, tools=[{}], add_generation_prompt=False)
    return text.partition(BEGIN)[2].rpartition(END)[0]


def read(
    form: ToolFormat, pieces: Sequence[str], tools: dict[str, Any] = TOOLS
) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and the names and arguments of the calls."""
    reader = CallReader(form, tools)
    found: list[Part] = []
    for piece in pieces:
        found += reader.push(piece)
    found += reader.finish()
    content, calls = "", list[tuple[str, str]]()
    for part in found:
        if isinstance(part, str):
            content += part
        elif isinstance(part, Call):
            calls.append((part.name, part.arguments))
        else:
            assert isinstance(part, MoreArguments)
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return content, calls


def _same(read_back: Any, given: Any) -> bool:
    """Return whether two values of JSON are equal, and of the same types."""
    return json.dumps(read_back, sort_keys=True) == json.dumps(given, sort_keys=True)


def _is_hard(form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> bool:
    """Return whether a format cannot say these calls."""
    if not isinstance(form.call, NamedCall):
        return False
    written = json.dumps([arguments for _, arguments in calls], ensure_ascii=False)
    arguments = form.call.arguments
    return isinstance(arguments, QuotedArguments) and json.dumps(arguments.quote)[1:-1] in written


@pytest.mark.parametrize(
    ("form", "template"), [t[2:] for t in TEMPLATES], ids=[t[0] for t in TEMPLATES]
)
@examples(3, 50)
@given(calls=_CALLS, content=st.sampled_from(["", "So: <it> [is] {", "a\n\nb"]))
def test_calls_of_the_history_are_read_back(form, template, calls, content):
    """Whole, by characters and cut in two, the same calls and content are read.

    In `make test` cut at 12 random places, in `make test-all` at every place.
    """
    if form is GIGACHAT:  # whose template writes the first one
        calls = calls[:1]
    text = _written(template, content, calls)
    if content not in text:  # the template leaves it out beside calls
        content = ""
    found = read(form, [text])
    assert found[0] == content
    assert [name for name, _ in found[1]] == [name for name, _ in calls]
    for (_, arguments), (_, wanted) in zip(found[1], calls, strict=True):
        assert _same(json.loads(arguments), wanted), (text, arguments)
    assert read(form, text) == found
    places: Sequence[int] = range(len(text))
    if settings.default.max_examples != RELEASE_EXAMPLES:
        places = random.Random(text).choices(places, k=12)
    for at in places:
        assert read(form, [text[:at], text[at:]]) == found, (text[:at], text[at:])


def _broken(text: str, rng: random.Random) -> str:
    """Return a text whose tags and words are cut, left out, repeated or exchanged at random."""
    parts = re.findall(r"<[^<>]*>|\w+|\s+|.", text)
    for _ in range(rng.randrange(1, 4)):
        i, j = rng.randrange(len(parts)), rng.randrange(len(parts))
        change = rng.randrange(4)
        if change == 0:
            parts[i : i + 1] = []
        elif change == 1:
            parts.insert(i, rng.choice([*parts, *_WORDS]))
        elif change == 2:
            parts[i], parts[j] = parts[j], parts[i]
        else:
            parts = parts[: i + 1]
        parts = parts or ["x"]
    return "".join(parts)


@seeds(100, 2)
@pytest.mark.parametrize(("form", "template"), [t[2:] for t in TEMPLATES])
def test_broken_calls_are_read_alike_however_they_are_cut(form, template, seeds):
    """Whatever a model writes in place of a call, a stream and a whole answer have the same."""
    calls = [("save", {"text": "a b", "count": 5, "tags": [1, {"a": "x"}]}), ("get_now", {})]
    written = _written(template, "So", calls)
    for seed in seeds:
        text = _broken(written, random.Random(seed))
        found = read(form, [text])
        json.dumps(found, ensure_ascii=False).encode()
        assert read(form, text) == found, (seed, text)


@pytest.mark.parametrize(("family", "form", "template"), [(t[0], *t[2:]) for t in TEMPLATES])
def test_the_template_says_the_format(family, form, template):
    """A template of a family's form is known by what it has in it; SmolLM2's has no calls."""
    if form is not LIST:
        assert format_of(template) is form, family
