"""A tiny model for conversations."""

from __future__ import annotations

from typing import Any

from jaxserve import Runtime, SamplingParams
from jaxserve.testing import OPTIONS, tiny_llama
from tests.conversations.chats import START_ID, chat_tokenizer
from tests.conversations.fakes import END_ID

# An untrained model would generate control tokens as often as letters.
LETTERS_ONLY = {START_ID: -1e6, END_ID: -1e6}
PARAMS = SamplingParams(max_tokens=6, logit_bias=LETTERS_ONLY)
SAID = ("hi", "and?", "so")


def runtime_with(path: str | None, **options: Any) -> Runtime:
    """Return a runtime with its conversations in a journal or only in memory."""
    given = {**OPTIONS, "conversations": path, **options}
    return Runtime(tiny_llama(), tokenizer=chat_tokenizer(), **given)
