# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "pydantic-ai-slim[anthropic,openai]==2.68.0",
#     "openai==3.57.0",
#     "anthropic==2.14.0",
# ]
# ///
"""Pydantic AI: agents with three endpoints, streamed, with tools and each kind of output."""

import asyncio
import sys
from typing import Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:3]


class Place(BaseModel, extra="forbid"):
    """A city."""

    place: Literal["Rome", "Oslo"]


async def main() -> None:
    """Run agents with each model class."""
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
    anthropic = AnthropicProvider(
        anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
    )
    for model in (
        OpenAIChatModel(MODEL, provider=openai),
        OpenAIResponsesModel(MODEL, provider=openai),
        AnthropicModel(MODEL, provider=anthropic),
    ):
        name = type(model).__name__
        short = Agent(model, instructions="short", model_settings={"max_tokens": 9})
        whole = await short.run("hi", model_settings={"temperature": 0})
        assert whole.usage.output_tokens == 9, name
        async with short.run_stream("hi", model_settings={"temperature": 0}) as stream:
            assert await stream.get_output() == whole.output, name
        again = await short.run("so", message_history=whole.all_messages())
        assert again.usage.input_tokens > whole.usage.input_tokens
        # Pydantic AI knows which of Anthropic's own models have a format, and no others.
        formats = [] if isinstance(model, AnthropicModel) else [NativeOutput(Place)]
        for kind in (ToolOutput(Place), *formats):
            typed = Agent(model, output_type=kind, model_settings={"max_tokens": 200})
            found = await typed.run("hi")
            assert isinstance(found.output, Place), (name, kind)
            async with typed.run_stream("hi") as stream:
                assert isinstance(await stream.get_output(), Place), (name, kind)
            told = await short.run("so", message_history=found.all_messages())
            assert told.output, (name, kind)


asyncio.run(main())
