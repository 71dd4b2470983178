"""Streams of events: what is sent for each group of pieces, and prepared JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
from starlette.types import Message

from jaxserve import Runtime
from jaxserve.core.errors import TurnCancelledError
from jaxserve.engine.answers import Piece
from jaxserve.server.events import ChoiceEvent, EventStream, compact
from jaxserve.server.exchange import Group
from jaxserve.server.routes.chat import ChatChunk, CountedChatChunk
from jaxserve.server.routes.completions import CompletionReply, CountedCompletionChunk
from jaxserve.server.routes.responses import ResponseEvent
from jaxserve.server.routes.tokens import GenerateReply
from tests.common.tiers import some
from tests.server.serving import CHAT, post, runtime, server


class _Texts:
    """Events that are the texts of pieces."""

    def begin(self) -> bytes:
        return b"begin "

    def of(self, group: Group) -> bytes:
        return "".join(piece.text for _, piece in group).encode()

    def end(self) -> bytes:
        return b" end"


def _sent(*groups: Group | Exception) -> list[Message]:
    """Return what a stream of groups sends; an error ends them."""

    async def pieces() -> AsyncGenerator[Group]:
        for group in groups:
            if isinstance(group, Exception):
                raise group
            yield group

    async def receive() -> Message:
        await asyncio.sleep(60)
        raise AssertionError("the client stays")

    async def run() -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await EventStream(pieces(), _Texts(), lambda: None)(
            {"type": "http", "path": "/"}, receive, send
        )
        return sent

    return asyncio.run(run())


def _group(*texts: str) -> Group:
    return [(0, Piece(text=text, token_ids=(1,), sample_index=i)) for i, text in enumerate(texts)]


def test_pieces_that_come_together_are_sent_at_once():
    """A group is one message, with the events before it if it is the first, and so is the end."""
    start, *bodies = _sent(_group("a", "b"), _group("c"))
    assert start["type"] == "http.response.start" and start["status"] == 200
    assert [body["body"] for body in bodies] == [b"begin ab", b"c", b" enddata: [DONE]\n\n"]
    assert [body["more_body"] for body in bodies] == [True, True, False]


def test_a_stream_that_waits_begins_with_a_comment():
    """A group without pieces has the status sent, and says so."""
    _, first, *_ = _sent([], _group("a"))
    assert first["body"] == b"begin : waiting\n\n"


def test_errors_before_the_first_piece_are_raised():
    """Before the status is sent, an error is for its handler; afterwards it is the last event."""
    with pytest.raises(TurnCancelledError):
        _sent(TurnCancelledError("cancelled"))
    *_, last = _sent(_group("a"), TurnCancelledError("cancelled"))
    data = json.loads(last["body"].removeprefix(b"data: "))
    assert (data["error"]["code"], last["more_body"]) == ("cancelled", False)


def test_no_name_looks_like_the_place_of_the_choice():
    """A model whose name is the JSON of that place is served under it."""
    name = '"choices":[]'
    event = ChoiceEvent(ChatChunk(id="1", created=0, model=name, choices=[])).of("{}")
    data = json.loads(event.removeprefix(b"data: "))
    assert (data["model"], data["choices"]) == (name, [{}])


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    # Pieces of steps that take no time may all come before the event loop sends the first.
    with runtime(step_s=0.03, max_decode_iterations=1) as rt:
        yield rt


TEXT = 'a"\\\n\x00\u2028é漢😀'


@pytest.mark.parametrize("usage", some([True, False]))
@pytest.mark.parametrize(
    ("path", "body", "model"),
    some(
        [
            ("/v1/chat/completions", {"messages": CHAT, "n": 2}, ChatChunk),
            ("/v1/chat/completions", {"messages": CHAT, "logprobs": True}, ChatChunk),
            ("/v1/chat/completions", {"messages": CHAT, "return_token_ids": True}, ChatChunk),
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True}, CompletionReply),
            ("/v1/completions", {"prompt": "a", "logprobs": 1}, CompletionReply),
            ("/inference/v1/generate", {"n": 2}, GenerateReply),
            ("/inference/v1/generate", {"n": 2, "logprobs": 0}, GenerateReply),
            ("/inference/v1/generate", {"n": 2, "logprobs": 1}, GenerateReply),
            ("/v1/responses", {"input": "a"}, ResponseEvent),
        ],
        1,
        8,
    ),
)
def test_events_are_as_their_models_write_them(
    rt: Runtime, path: str, body: dict[str, Any], model: Any, usage: bool
):
    """What is prepared for many chunks is what Pydantic writes for each, character by character."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked: dict[str, Any] = {**body, limit: 5}
    if model is GenerateReply:
        asked = {"token_ids": [3, 4], "sampling_params": asked}
    elif usage and model is not ResponseEvent:
        model = CountedChatChunk if model is ChatChunk else CountedCompletionChunk
        asked["stream_options"] = {"include_usage": True}
    with server(rt, model_name=TEXT) as url:
        text = post(url, path, {**asked, "stream": True}).text
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {")]
    assert len(data) >= 2
    for each in data:
        assert model.model_validate_json(each).model_dump_json() == each
    if usage and model in (CountedChatChunk, CountedCompletionChunk):
        *others, last = [json.loads(each)["usage"] for each in data]
        assert set(map(str, others)) == {"None"} and last["total_tokens"] > 0


def test_texts_are_json_as_pydantic_writes_it():
    """Quotes, control characters and characters beyond the first plane are escaped alike."""
    chunk = CompletionReply(id=TEXT, created=0, model="", choices=[])
    assert chunk.model_dump_json().startswith(f'{{"id":{compact(TEXT)},')
