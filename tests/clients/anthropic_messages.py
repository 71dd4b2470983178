# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.14.0", "pydantic==2.14.4"]
# ///
"""Anthropic's client: messages, streams, tools, parsed formats, counts, errors."""

import asyncio
import sys
from typing import Literal

import anthropic
import pydantic

URL, MODEL = sys.argv[1:3]
HI = [{"role": "user", "content": "hi"}]
PLACES = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "the weather", "input_schema": PLACES}
ANY = {"type": "any", "disable_parallel_tool_use": True}


class Place(pydantic.BaseModel):
    """A city."""

    place: Literal["Rome", "Oslo"]


def num_prompt(message: anthropic.types.Message) -> int:
    """Return the number of tokens of the prompt, the cached ones too."""
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = {"model": MODEL, "messages": HI, "max_tokens": 9, "extra_body": {"temperature": 0}}

# Messages, with everything that agents send unasked.
whole = client.messages.create(
    **asked,
    system=[{"type": "text", "text": "short", "cache_control": {"type": "ephemeral"}}],
    metadata={"user_id": "me"},
    cache_control={"type": "ephemeral"},
)
assert (whole.stop_reason, whole.usage.output_tokens, whole.content[0].type) == (
    "max_tokens",
    9,
    "text",
)
again = [*HI, {"role": "assistant", "content": whole.content}, *HI]
assert num_prompt(client.messages.create(**{**asked, "messages": again})) > 9

# Streams: events, and the helper that accumulates them.
with client.messages.stream(**asked) as stream:
    texts = "".join(stream.text_stream)
    message = stream.get_final_message()
assert message.content[0].text == texts and message.usage.output_tokens == 9
kinds = [event.type for event in client.messages.create(**asked, stream=True)]
assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]


async def ask_async() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, auth_token="none") as other:
        assert (await other.messages.create(**asked)).content[0].text == texts


asyncio.run(ask_async())

# Tools: a call, its result, and the call as it is streamed.
tooled = {**asked, "tools": [TOOL], "tool_choice": ANY, "max_tokens": 200}
call = client.messages.create(**tooled)
(block,) = call.content
assert call.stop_reason == "tool_use" and block.input["place"] in ("Rome", "Oslo")
result = {"type": "tool_result", "tool_use_id": block.id, "content": "7"}
turns = [*HI, call.to_param(), {"role": "user", "content": [result]}]
client.messages.create(**{**tooled, "messages": turns, "tool_choice": {"type": "auto"}})
with client.messages.stream(**tooled) as stream:
    (streamed,) = stream.get_final_message().content
assert streamed.input == block.input

# Structured output, parsed whole and streamed.
parsed = client.messages.parse(**{**asked, "max_tokens": 200}, output_format=Place)
assert isinstance(parsed.parsed_output, Place)
with client.messages.stream(**{**asked, "max_tokens": 200}, output_format=Place) as stream:
    assert stream.get_final_message().parsed_output == parsed.parsed_output

# Counts and errors.
counted = client.messages.count_tokens(model=MODEL, messages=HI, tools=[TOOL])
assert counted.input_tokens == num_prompt(call)
for fields, error in (
    ({"model": "other"}, anthropic.NotFoundError),
    ({"max_tokens": -1}, anthropic.BadRequestError),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, anthropic.BadRequestError),
):
    try:
        client.messages.create(**{**asked, **fields})
    except error as caught:
        assert caught.body["type"] == "error", caught.body
    else:
        raise AssertionError(f"{fields} raised nothing")
