# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm==1.110.2", "openai==3.57.0"]
# ///
"""LiteLLM: chat, stream, tools, formats, completions, responses, and Anthropic's messages."""

import asyncio
import json
import sys

import litellm

URL, MODEL = sys.argv[1:3]
HI = [{"role": "user", "content": "hi"}]
PLACES = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PLACES}}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACES, "strict": True}}
litellm.num_retries = 0

for provider, base in (("openai", f"{URL}/v1"), ("anthropic", URL), ("hosted_vllm", f"{URL}/v1")):
    at = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "messages": HI}
    whole = litellm.completion(**at, max_tokens=9, temperature=0)
    assert whole.usage.completion_tokens == 9, provider
    assert whole.choices[0].finish_reason == "length"
    chunks = list(
        litellm.completion(
            **at, max_tokens=9, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == whole.choices[0].message.content, provider
    assert built.usage.completion_tokens == 9
    if provider == "hosted_vllm":  # LiteLLM takes additionalProperties out of its tools
        continue
    must = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    call = litellm.completion(**at, **must, max_tokens=200).choices[0]
    assert call.finish_reason == "tool_calls", (provider, call)
    (made,) = call.message.tool_calls
    assert json.loads(made.function.arguments)["place"] in ("Rome", "Oslo")
    result = {"role": "tool", "tool_call_id": made.id, "content": "7"}
    said = [*HI, call.message, result]
    litellm.completion(**{**at, "messages": said}, tools=[TOOL], max_tokens=9)
    chunks = list(litellm.completion(**at, **must, max_tokens=200, stream=True))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments)["place"] in ("Rome", "Oslo")
    formed = litellm.completion(**at, response_format=FORM, max_tokens=200).choices[0]
    assert json.loads(formed.message.content)["place"] in ("Rome", "Oslo"), (provider, formed)

at = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
assert litellm.text_completion(**at, prompt="hi", max_tokens=5).choices[0].text
assert litellm.responses(**at, input="hi", max_output_tokens=5).output
assert asyncio.run(litellm.acompletion(**at, messages=HI, max_tokens=5)).choices
# Anthropic's form, translated by LiteLLM to a chat.
message = asyncio.run(litellm.anthropic.messages.acreate(**at, messages=HI, max_tokens=5))
assert message["type"] == "message"
