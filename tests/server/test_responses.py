"""`/v1/responses` with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from jaxserve import Runtime, SamplingParams
from tests.server.serving import NAME

SAID = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]


def _respond(ai: openai.OpenAI, **others: Any) -> Any:
    given = {"input": "hi", "instructions": "short", "max_output_tokens": 9, "temperature": 0}
    return ai.responses.create(model=NAME, **{**given, **others})


def test_response_is_the_runtimes(rt: Runtime, ai: openai.OpenAI):
    """The text is that of the same chat, and the status says that the limit ended it."""
    expected = rt.generate(SAID, SamplingParams(max_tokens=9))
    answer = _respond(ai, metadata={"a": "b"})
    assert answer.output_text == expected.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.input_tokens == len(expected.prompt_token_ids)
    whole_pages = (answer.usage.input_tokens - 1) // rt.options.page_size
    cached = whole_pages * rt.options.page_size  # by the runtime's own answer
    assert answer.usage.input_tokens_details.cached_tokens == cached > 0
    *_, last = _respond(ai, stream=True)
    assert last.response.usage.input_tokens_details.cached_tokens == cached
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.usage.output_tokens, answer.metadata, answer.store) == (9, {"a": "b"}, False)


def test_events_build_the_response(ai: openai.OpenAI):
    """The events come in OpenAI's order; the deltas, joined, are the text of the last one."""
    whole = _respond(ai).output_text
    events = list(_respond(ai, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole == events[-1].response.output_text
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


def test_stream_helper(ai: openai.OpenAI):
    """The client's own accumulation of the deltas is the text."""
    asked: Any = {"model": NAME, "input": "hi", "instructions": "short", "temperature": 0}
    with ai.responses.stream(**asked, max_output_tokens=9) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
    assert snapshots[-1] == _respond(ai).output_text


def test_output_can_be_sent_back(rt: Runtime, ai: openai.OpenAI):
    """An answer's output is an input, beside texts and parts."""
    first = _respond(ai)
    said: Any = [
        {"role": "user", "content": "hi"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": [{"type": "input_text", "text": "so"}]},
    ]
    answer = _respond(ai, input=said)
    chat = [*SAID, {"role": "assistant", "content": first.output_text}]
    expected = rt.generate([*chat, {"role": "user", "content": "so"}], SamplingParams(max_tokens=9))
    assert answer.output_text == expected.text


def test_logprobs(ai: openai.OpenAI):
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    found = _respond(ai, **asked).output[0].content[0].logprobs
    assert len(found) == 9 and len(found[0].top_logprobs) == 1
    *_, last = _respond(ai, **asked, stream=True)
    assert last.response.output[0].content[0].logprobs == found
    assert _respond(ai, include=[]).output[0].content[0].logprobs == []


def test_conversation(rt: Runtime, ai: openai.OpenAI):
    """With a conversation the server keeps the history, streamed or not."""
    chat, params = rt.conversation("same"), SamplingParams(max_tokens=4)
    for number, text in enumerate("abc"):
        asked: Any = {"conversation": "mine", "instructions": None, "max_output_tokens": 4}
        if number == 1:
            *_, last = _respond(ai, input=text, stream=True, **asked)
            answer = last.response
        else:
            answer = _respond(ai, input=text, **asked)
        assert answer.output_text == chat.send(text, params).text
        assert answer.conversation.id == "mine"


@pytest.mark.parametrize("stream", [False, True])
def test_instructions_of_a_conversation_are_kept_once(rt: Runtime, ai: openai.OpenAI, stream: bool):
    """They begin it; later turns may send the same or none, and others are a bad request."""
    id = f"instructed {stream}"

    def say(text: str, instructions: str | None) -> str:
        asked: Any = {"conversation": id, "instructions": instructions, "max_output_tokens": 4}
        if not stream:
            return _respond(ai, input=text, **asked).output_text
        *_, last = _respond(ai, input=text, stream=True, **asked)
        return last.response.output_text

    chat = rt.conversation(f"expected {stream}", messages=SAID[:1])
    for text, instructions in (("a", "short"), ("b", "short"), ("c", None), ("d", "short")):
        assert say(text, instructions) == chat.send(text, SamplingParams(max_tokens=4)).text
    assert rt.conversation(id).history == chat.history
    with pytest.raises(openai.BadRequestError, match="other instructions") as caught:
        say("e", "long")
    assert caught.value.param == "instructions"
    assert rt.conversation(id).history == chat.history
    bare: Any = {"conversation": f"bare {stream}", "max_output_tokens": 4}
    _respond(ai, instructions=None, **bare)
    with pytest.raises(openai.BadRequestError, match="or without"):
        _respond(ai, **bare)


def test_agents_say_how_to_call_no_tools(ai: openai.OpenAI):
    """An empty list of tools, with how to call them, is as none; results may have parts."""
    no_tools: Any = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    options: Any = {"stream_options": {"include_obfuscation": False}}
    *_, last = _respond(ai, max_output_tokens=2, stream=True, extra_body=options, **no_tools)
    assert last.type == "response.incomplete"
    call: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "1"}
    parts: Any = [{"type": "input_text", "text": each} for each in ("one", " two")]
    whole, cut = (
        _respond(ai, input=[call, {**result, "output": output}], max_output_tokens=2, temperature=0)
        for output in ("one two", parts)
    )
    assert whole.output_text == cut.output_text
    assert whole.usage.input_tokens == cut.usage.input_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_1"},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "required"},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"top_logprobs": 2},
        {"input": []},
        {"text": {"format": {"type": "grammar"}}},
    ],
)
def test_fields_that_are_not_honoured(ai: openai.OpenAI, fields: dict[str, Any]):
    """What this server cannot do is a bad request, also for a stream."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            _respond(ai, stream=stream, **fields)
