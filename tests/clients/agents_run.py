# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0", "openai==3.57.0"]
# ///
"""OpenAI's agents SDK: runs on both endpoints, whole and streamed, with tools or a type."""

import asyncio
import sys
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
CALLS = []


class Place(BaseModel, extra="forbid"):
    """A city."""

    place: Literal["Rome", "Oslo"]


@function_tool
def weather(place: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a place."""
    CALLS.append(place)
    return "7 degrees"


async def main() -> None:
    """Run agents of each kind."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(MODEL, client)
        if kind is OpenAIChatCompletionsModel:  # the other one raises where a limit ends an answer
            short = ModelSettings(max_tokens=9, temperature=0)
            plain = Agent("plain", instructions="short", model=model, model_settings=short)
            whole = await Runner.run(plain, "hi")
            assert isinstance(whole.final_output, str) and whole.final_output
            assert whole.context_wrapper.usage.output_tokens == 9
            streamed = Runner.run_streamed(plain, "hi")
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == whole.final_output
        must = ModelSettings(max_tokens=200, tool_choice="required", parallel_tool_calls=False)
        asked = {"model": model, "tools": [weather], "tool_use_behavior": "stop_on_first_tool"}
        tooled = Agent("tooled", **asked, model_settings=must)
        CALLS.clear()
        answer = await Runner.run(tooled, "hi")
        assert len(CALLS) == 1 and answer.final_output == "7 degrees"
        streamed = Runner.run_streamed(tooled, "hi")
        async for _ in streamed.stream_events():
            pass
        assert len(CALLS) == 2
        typed = Agent("typed", model=model, output_type=Place)
        assert isinstance((await Runner.run(typed, "hi")).final_output, Place)
        # History of a run with calls, sent back.
        again = [*answer.to_input_list(), {"role": "user", "content": "so"}]
        assert isinstance((await Runner.run(typed, again)).final_output, Place)
        # A call or an answer of the type, as the model chooses.
        both = await Runner.run(Agent("both", **asked, output_type=Place), "hi")
        assert isinstance(both.final_output, Place) or both.final_output == "7 degrees"


asyncio.run(main())
