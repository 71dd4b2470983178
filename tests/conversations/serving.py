"""A tiny model for conversations, and a process with it to be killed: `... serving PATH`."""

from __future__ import annotations

import sys
import time
from typing import Any

from jaxserve import Runtime, SamplingParams
from jaxserve.testing import OPTIONS, SlowExecutor, tiny_llama
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


def main(path: str) -> None:
    """Acknowledge a turn, and hang in the middle of the next."""
    rt = runtime_with(path, wrap_executor=SlowExecutor)
    chat = rt.conversation("a", system="be")
    chat.send(SAID[0], PARAMS)
    for _ in chat.stream(SAID[1], PARAMS):
        print("here", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
