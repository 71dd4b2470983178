"""Conversations under asyncio: equal turns, and the effect of cancelled tasks."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import aclosing
from functools import partial

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    ConversationBusyError,
    JournalError,
    TurnCancelledError,
    TurnTimeoutError,
)
from jaxserve.testing import SlowExecutor
from tests.common.waiting import until
from tests.conversations.chats import chat_tokenizer
from tests.conversations.fakes import Connections, FakeTurnClient, conversations
from tests.conversations.serving import PARAMS, SAID, runtime_with

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def slow_runtime() -> Iterator[Runtime]:
    """A runtime with answers long enough to be cut off, and conversations in memory."""
    with runtime_with(None, wrap_executor=partial(SlowExecutor, step_s=0.1)) as runtime:
        yield runtime


def test_twins_have_the_same_turns(tokenizer):
    """Tokens, texts and history of `asend` and `astream` equal those of `send`."""
    chats = [conversations(tokenizer=tokenizer).open("a") for _ in range(3)]

    async def one_turn(said: str):
        sent = await chats[1].asend(said)
        pieces = [piece async for piece in chats[2].astream(said)]
        return sent, pieces

    for said in SAID:
        expected = chats[0].send(said)
        sent, pieces = asyncio.run(one_turn(said))
        assert sent.token_ids == expected.token_ids
        assert tuple(t for piece in pieces for t in piece.token_ids) == expected.token_ids
        assert "".join(piece.text for piece in pieces) == expected.text
        assert pieces[-1].finish_reason == expected.finish_reason
    assert chats[0].history == chats[1].history == chats[2].history
    assert chats[0].token_ids == chats[1].token_ids == chats[2].token_ids


def test_the_last_piece_comes_when_the_turn_is_kept(tokenizer):
    """A reader of the last piece finds the turn in the journal."""
    home = conversations(tokenizer=tokenizer)
    chat = home.open("a")

    async def watch():
        return [
            (piece.finish_reason is not None, "a" in home) async for piece in chat.astream("hi")
        ]

    assert asyncio.run(watch()) == [(False, False), (True, True)]


@pytest.mark.parametrize("fault", ["error", "cancelled", "left"])
def test_a_turn_that_fails_leaves_no_trace(tokenizer, fault):
    """The next turn finds the conversation unchanged."""
    client = FakeTurnClient(tokenizer)
    home = conversations(client=client, tokenizer=tokenizer)
    chat = home.open("a")
    chat.send("hi")
    before = (chat.history, chat.token_ids, home.journal.find("a"))

    def fail():
        raise RuntimeError("lost")

    async def leave():
        async with aclosing(chat.astream("so?")) as pieces:
            async for _ in pieces:
                break

    async def stream():
        async for _ in chat.astream("so?"):
            pass

    if fault == "left":
        asyncio.run(leave())
    else:
        if fault == "error":
            client.during = fail
        else:
            client.finish_reason = "cancelled"
        for turn in (lambda: chat.asend("so?"), stream):
            with pytest.raises(RuntimeError if fault == "error" else TurnCancelledError):
                asyncio.run(turn())
    assert (chat.history, chat.token_ids, home.journal.find("a")) == before
    client.during, client.finish_reason = (lambda: None), "length"
    assert asyncio.run(chat.asend("so?")).prompt_token_ids[: len(before[1])] == before[1]


def test_a_locked_journal_does_not_hold_up_the_event_loop(tokenizer, tmp_path):
    """Other tasks run while a turn waits for the journal; the turn then raises its error."""
    path = str(tmp_path / "journal")
    home = conversations(path, tokenizer=tokenizer, connect=Connections(timeout=0.3))
    other = sqlite3.connect(path, isolation_level=None)
    chat = home.open("a")
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def locked():
        ticking = asyncio.create_task(tick())
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match="another process holds it"):
            await chat.asend("hi")
        other.execute("ROLLBACK")
        ticking.cancel()

    asyncio.run(locked())
    other.close()
    assert ticks >= 5 and chat.turns == ()


def test_a_turn_that_is_being_written_is_kept(tokenizer):
    """A task that is cancelled during the write waits for the journal, which has the whole turn."""
    opened = Connections()
    home = conversations(tokenizer=tokenizer, connect=opened)
    chat = home.open("a")
    writing, go_on = threading.Event(), threading.Event()

    def slow_commit(sql):
        if sql == "COMMIT":
            writing.set()
            assert go_on.wait(10)

    async def cancelled():
        task = asyncio.create_task(chat.asend("hi"))
        await asyncio.to_thread(writing.wait, 10)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    opened.last.set_trace_callback(slow_commit)
    asyncio.run(cancelled())
    opened.last.set_trace_callback(None)
    assert len(chat.turns) == 1 == home.list()[0].num_turns
    assert len(chat.send("so?").token_ids) and len(chat.turns) == 2


@pytest.mark.release
def test_cancelled_tasks_cancel_their_requests(slow_runtime):
    """The request ends early, the journal is unchanged, and the next turn is right."""
    chat = slow_runtime.conversation()
    chat.send("hi", PARAMS)
    expected = chat.fork().send("so", PARAMS).token_ids
    before = chat.token_ids

    async def stream(begun: asyncio.Event):
        async for _ in chat.astream("so", ENDLESS):
            begun.set()

    async def cancel_both():
        sending = asyncio.create_task(chat.asend("so", ENDLESS))
        await asyncio.to_thread(until, slow_runtime.outlook)
        with pytest.raises(ConversationBusyError):
            await chat.asend("ho")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        assert not slow_runtime.outlook()
        begun = asyncio.Event()
        streaming = asyncio.create_task(stream(begun))
        await begun.wait()
        streaming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await streaming

    asyncio.run(cancel_both())
    assert chat.token_ids == before
    until(lambda: not slow_runtime.outlook())
    assert asyncio.run(chat.asend("so", PARAMS)).token_ids == expected


@pytest.mark.release
def test_answers_that_do_not_come_in_time(slow_runtime):
    """Streamed and whole answers raise the error in both variants, without a change."""
    chat = slow_runtime.conversation()
    shown: list[int] = []

    async def astream():
        async for piece in chat.astream("hi", ENDLESS, timeout_s=1):
            shown.extend(piece.token_ids)

    def stream():
        for piece in chat.stream("hi", ENDLESS, timeout_s=1):
            shown.extend(piece.token_ids)

    for turn in (
        stream,
        lambda: asyncio.run(astream()),
        lambda: asyncio.run(chat.asend("hi", ENDLESS, timeout_s=0.3)),
    ):
        with pytest.raises(TurnTimeoutError, match=r"no answer after (1|0.3) s, only \d+ tokens"):
            turn()
        assert chat.turns == ()
    assert shown
    until(lambda: not slow_runtime.outlook())
    pieces = list(chat.stream("hi", PARAMS, timeout_s=30))
    assert pieces[-1].finish_reason == "length" and len(chat.turns) == 1
