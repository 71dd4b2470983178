"""Conversations that the server keeps: continued by their id, listed, forked, deleted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import openai
import pytest

from jaxserve import Runtime, SamplingParams
from tests.common.tiers import some
from tests.server.serving import CHAT, NAME, client, events, post, runtime, server

SHORT: dict[str, Any] = {"max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def journal(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("journal") / "conversations.sqlite"


@pytest.fixture(scope="module")
def rt(journal: Path) -> Iterator[Runtime]:
    with runtime(conversations=journal) as rt:
        yield rt


def _say(url: str, id: str, text: str, **others: Any) -> httpx2.Response:
    said = [{"role": "user", "content": text}]
    body = {"messages": said, "conversation_id": id, **SHORT, **others}
    return post(url, "/v1/chat/completions", body)


def test_turns_build_on_each_other(rt: Runtime, url: str):
    """With an id only new messages are sent; answers are those of `rt.conversation`."""
    chat = rt.conversation("reference")
    params = SamplingParams(max_tokens=5)
    for number, text in enumerate(("hi", "and", "so")):
        expected = chat.send(text, params)
        answer = _say(url, "mine", text, stream=number == 1)
        if number == 1:
            chunks = events(answer.text)
            found = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        else:
            told = answer.json()
            found = told["choices"][0]["message"]["content"]
            assert told["conversation_id"] == "mine"
            assert told["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
        assert found == expected.text
    assert rt.conversation("mine").history == chat.history
    listed = {card["id"]: card for card in httpx2.get(url + "/conversations").json()["data"]}
    assert listed["mine"]["num_turns"] == 3
    shown = httpx2.get(url + "/conversations/mine").json()
    assert shown["messages"] == chat.history


def test_streamed_usage_counts_the_history(url: str):
    """The prompt of a later turn has the tokens of the turns before."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    first, second = (events(_say(url, "usage", "a", **options).text)[-1] for _ in range(2))
    assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    assert second["usage"]["completion_tokens"] == 5


def test_fork_and_delete(url: str):
    """A fork continues the first turns under another id, and a deleted conversation is unknown."""
    for text in ("a", "b"):
        assert _say(url, "whole", text).status_code == 200
    forked = post(url, "/conversations/whole/fork", {"num_turns": 1}).json()
    assert forked["id"] != "whole" and len(forked["messages"]) == 2
    assert httpx2.delete(url + "/conversations/whole").json()["deleted"]
    for gone in (
        httpx2.get(url + "/conversations/whole"),
        httpx2.delete(url + "/conversations/whole"),
        post(url, "/conversations/whole/fork", {}),
    ):
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "conversation_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_turns_are_bounded(rt: Runtime, stream: bool):
    """The server's limit of prompts counts the history, and a refused turn is not kept."""
    id = f"bounded {stream}"
    with server(rt, max_prompt_tokens=20) as url:
        assert _say(url, id, "a", stream=stream).status_code == 200
        refused = _say(url, id, "b" * 20, stream=stream)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert len(rt.conversation(id).turns) == 1


@pytest.mark.parametrize("id", some(["a/b", "/a/", "a/fork", "a?b#c%2F d"]))
def test_ids_with_a_slash(url: str, id: str):
    """An id may have any printable character; in a path it is percent-encoded."""
    assert _say(url, id, "hi").status_code == 200
    body = {"input": "and", "conversation": {"id": id}, "max_output_tokens": 2}
    assert post(url, "/v1/responses", body).json()["conversation"] == {"id": id}
    path = f"/conversations/{quote(id, safe='')}"
    shown = httpx2.get(url + path).json()
    assert (shown["id"], len(shown["messages"])) == (id, 4)
    forked = post(url, path + "/fork", {"num_turns": 1}).json()
    assert forked["messages"] == shown["messages"][:2]
    assert httpx2.delete(url + path).json() == {"id": id, "deleted": True}
    assert httpx2.get(url + path).status_code == 404


def test_errors_of_turns(url: str):
    """A turn has one sample, and a failed turn leaves the conversation as it was."""
    assert _say(url, "n", "a", n=2, temperature=1).status_code == 400
    assert _say(url, "n", "x" * 200, stream=True).status_code == 400
    for id in ("", "a\nb", "a\n"):  # a path cannot have them
        assert _say(url, id, "a").status_code == 400
    assert _say(url, "n", "a", priority=1).json()["error"]["param"] == "priority"
    assert httpx2.get(url + "/conversations/n").status_code == 404


def test_disconnected_turn_is_not_kept(rt: Runtime, url: str):
    with client(url) as ai:
        asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 90, "temperature": 0}
        stream: openai.Stream[Any] = ai.chat.completions.create(
            **asked, stream=True, extra_body={"conversation_id": "left"}
        )
        next(iter(stream))
        stream.close()
    while rt.outlook():
        time.sleep(0.001)
    answered = _say(url, "left", "a")
    while answered.status_code == 409:  # the journal lets go of the turn a moment later
        answered = _say(url, "left", "a")
    assert answered.status_code == 200
