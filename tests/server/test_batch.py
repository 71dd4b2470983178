"""Lines of OpenAI's batches: how they are read, and what answers them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from jaxserve.core.errors import InvalidRequestError
from jaxserve.server.batch import answer_lines, parse_line
from tests.server.serving import CHAT, NAME, runtime

LINE: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": NAME, "messages": CHAT, "max_tokens": 2},
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"custom_id": 3}, "custom_id: Input should be a valid string"),
        ({"method": "GET"}, "method: Input should be 'POST'"),
        ({"url": "/v1/load_lora_adapter"}, "url: Input should be '/v1/chat/completions'"),
        ({"body": []}, "body: Input should be an object"),
        ({"body": {"stream": True}}, "stream=true is not possible in a batch"),
        ({"priority": 3}, "priority: Extra inputs are not permitted"),
    ],
)
def test_a_line_that_is_no_request_is_refused(changes, said):
    """The error names the field."""
    assert parse_line(json.dumps(LINE)).custom_id == "a"
    with pytest.raises(InvalidRequestError) as raised:
        parse_line(json.dumps(LINE | changes))
    assert said in str(raised.value)


@pytest.mark.parametrize("line", ["{", "3", "[" * 10_000, '{"custom_id": "\ud800"}'])
def test_a_line_that_is_no_object_is_refused(line):
    """Nothing but an InvalidRequestError leaves."""
    with pytest.raises(InvalidRequestError):
        parse_line(line)


def test_each_line_has_its_output():
    """A wrong line, and one that its endpoint refuses, fail alone; filled places are left out."""
    text = {**LINE, "custom_id": "b", "url": "/v1/completions"}
    lines = [
        json.dumps(LINE),
        " ",
        json.dumps({**LINE, "method": "PUT"}),
        "broken",
        json.dumps({**text, "body": {"prompt": "ab", "max_tokens": 3, "ignore_eos": True}}),
        json.dumps({**LINE, "custom_id": "c", "body": {**LINE["body"], "model": "other"}}),
        json.dumps({**LINE, "custom_id": "d", "body": {**LINE["body"], "messages": [{}]}}),
        json.dumps(LINE),
        "answered before",
    ]
    before = {"custom_id": "e"}
    answers: list[Any] = [*[None] * 8, before]
    counted: list[Any] = []
    with runtime() as rt:
        asyncio.run(answer_lines(rt, NAME, lines, answers, counted.append))
    assert len(counted) == 7 and answers[-1] is before
    assert all(answer in counted for answer in answers[:-1] if answer is not None)
    assert answers.pop(1) is None
    assert [each["custom_id"] for each in answers] == ["a", "a", None, "b", "c", "d", "a", "e"]
    chat, wrong, broken, completion, other, refused, twice, _ = answers
    assert chat["error"] is None and chat["response"]["status_code"] == 200
    assert chat["response"]["body"]["usage"]["completion_tokens"] <= 2
    assert chat["response"]["request_id"] and chat["id"] != wrong["id"]
    assert wrong["response"] is None and wrong["error"]["message"].startswith("line 3: method")
    assert broken["error"]["code"] == "invalid_line"
    assert completion["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (other["response"]["status_code"], other["error"]) == (404, None)
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["type"] == "invalid_request_error"
    assert "is that of line 1" in twice["error"]["message"]
