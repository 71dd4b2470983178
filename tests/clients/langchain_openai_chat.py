# /// script
# requires-python = ">=3.11"
# dependencies = ["langchain-openai==1.7.4", "langchain-core==1.8.3", "openai==3.57.0"]
# ///
"""LangChain: chat, stream, batch, tools, structured output, responses, completions, embeddings."""

import asyncio
import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]


class Place(BaseModel, extra="forbid"):
    """A city."""

    place: Literal["Rome", "Oslo"]


@tool
def weather(place: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a place."""
    return f"7 degrees in {place}"


options = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0}
chat = ChatOpenAI(**options, max_tokens=200, max_retries=0)
short = ChatOpenAI(**options, max_tokens=9, max_retries=0)
said = [SystemMessage("short"), HumanMessage("hi")]

whole = short.invoke(said)
assert whole.usage_metadata["output_tokens"] == 9 and whole.content
assert whole.response_metadata["finish_reason"] == "length"
added = None
for chunk in short.stream(said, stream_usage=True):
    added = chunk if added is None else added + chunk
assert added.content == whole.content
assert added.usage_metadata["output_tokens"] == 9, added.usage_metadata
assert asyncio.run(short.ainvoke(said)).content == whole.content
assert [each.content for each in short.batch([said, said])] == [whole.content] * 2
scored = short.bind(logprobs=True, top_logprobs=2).invoke(said).response_metadata["logprobs"]
assert len(scored["content"]) == 9

# Tools: demanded, streamed, and answered.
bound = chat.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False, strict=True)
call = bound.invoke(said)
assert call.tool_calls[0]["name"] == "weather", call
result = weather.invoke(call.tool_calls[0])
assert isinstance(result, ToolMessage)
last = chat.bind_tools([weather]).invoke([*said, call, result])
assert isinstance(last, AIMessage)
added = None
for chunk in bound.stream(said):
    added = chunk if added is None else added + chunk
assert added.tool_calls[0]["args"] == call.tool_calls[0]["args"]
assert chat.bind_tools([weather], tool_choice="any", strict=True).invoke(said).tool_calls

# Structured output, as a format and as a call.
for method in ("json_schema", "function_calling"):
    for include_raw in (False, True):
        structured = chat.with_structured_output(
            Place, method=method, include_raw=include_raw, strict=True
        )
        found = structured.invoke(said)
        assert isinstance(found["parsed"] if include_raw else found, Place), (method, found)
streamed = list(chat.with_structured_output(Place, method="json_schema").stream(said))
assert isinstance(streamed[-1], Place)

# The other endpoints.
newer = ChatOpenAI(**options, max_tokens=9, max_retries=0, use_responses_api=True)
assert newer.invoke(said).text == whole.content
assert "".join(chunk.text for chunk in newer.stream(said)) == whole.content
old = OpenAI(**options, max_tokens=5, max_retries=0)
assert old.invoke("hi") == "".join(old.stream("hi"))
