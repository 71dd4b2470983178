# /// script
# requires-python = ">=3.11"
# dependencies = ["instructor==1.17.0", "openai==3.3.0", "anthropic==2.14.0"]
# ///
"""Instructor: objects from chats in each of its modes, streamed, in lists, and from messages."""

import sys
from typing import Literal

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]


class Place(BaseModel, extra="forbid"):
    """A city."""

    place: Literal["Rome", "Oslo"]
    size: int


said = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
asked = {"model": MODEL, "messages": said, "max_tokens": 400, "seed": 1}
plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)

for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    found = client.create(**asked, response_model=Place, max_retries=0)
    assert isinstance(found, Place), (mode, found)
    *_, last = client.create_partial(**asked, response_model=Place, max_retries=0)
    assert last.place in ("Rome", "Oslo"), mode

newer = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
found = newer.responses.create(
    model=MODEL, input="hi", max_output_tokens=400, response_model=Place, max_retries=0
)
assert isinstance(found, Place)

other = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
client = instructor.from_anthropic(other, mode=instructor.Mode.ANTHROPIC_TOOLS)
options = {"model": MODEL, "messages": said, "max_tokens": 400}
found = client.create(**options, response_model=Place, max_retries=0)
assert isinstance(found, Place)
