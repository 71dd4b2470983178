"""Conversations with a tiny model have the tokens of one long prompt, whatever happens."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    ConversationTooLongError,
    JournalError,
    RuntimeClosedError,
    TokenOutOfRangeError,
    TurnCancelledError,
    TurnTimeoutError,
)
from jaxserve.core.options import JournalLimits
from jaxserve.testing import SlowExecutor
from jaxserve.workload import recorded
from tests.common.processes import heeding_interrupts, interrupt
from tests.common.waiting import until
from tests.conversations.fakes import END_ID
from tests.conversations.serving import LETTERS_ONLY, PARAMS, SAID, runtime_with

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    """A runtime around a tiny model, with conversations in memory."""
    with runtime_with(None) as runtime:
        yield runtime


def test_turns_are_those_of_one_long_prompt(runtime):
    """The greedy tokens of each turn are those of a new request with the whole history."""
    chat = runtime.conversation(system="be")
    for said in SAID:
        completion = chat.send(said, PARAMS)
        fresh = runtime.generate(completion.prompt_token_ids, PARAMS)
        assert completion.token_ids == fresh.token_ids
        assert completion.conversation_id == chat.id
    # Every answer was cut off, and every turn got its end token.
    assert [turn.finish_reason for turn in chat.turns] == ["length"] * 3
    whole = runtime.tokenizer.apply_chat_template(chat.history[:-1])
    assert completion.prompt_token_ids == tuple(whole)
    streamed = runtime.conversation(system="be")
    for said in SAID:
        list(streamed.stream(said, PARAMS))
    assert (streamed.token_ids, streamed.history) == (chat.token_ids, chat.history)


def test_an_ended_answer_is_not_ended_twice(runtime):
    """The model's own end of turn is the template's end of turn."""
    chat = runtime.conversation()
    bias = LETTERS_ONLY | {END_ID: 1e6}  # as soon as min_tokens allows it
    params = SamplingParams(max_tokens=6, logit_bias=bias, min_tokens=3)
    first = chat.send("hi", params)
    assert (first.finish_reason, first.token_ids[-1]) == ("stop", END_ID)
    second = chat.send("so", PARAMS)
    whole = runtime.tokenizer.apply_chat_template(chat.history[:-1])
    assert second.prompt_token_ids == tuple(whole)


def test_stop_strings_are_not_in_the_history(runtime):
    """The text ends before the stop string, and so do the tokens that the next turn continues."""
    free = runtime.conversation().send("hi", PARAMS)
    chat = runtime.conversation()
    cut = chat.send("hi", replace(PARAMS, stop=free.text[2:4]))
    assert chat.history[-1]["content"] == cut.text == free.text[: free.text.find(free.text[2:4])]
    again = chat.send("so", PARAMS)
    whole = runtime.tokenizer.apply_chat_template(chat.history[:-1])
    assert again.prompt_token_ids == tuple(whole)


def test_conversations_run_side_by_side(runtime):
    """Conversations on many threads have the answers that they have alone."""
    names = "abcdefgh"

    def converse(name: str) -> tuple[int, ...]:
        chat = runtime.conversation(system=name)
        for said in SAID[:2]:
            chat.send(said, PARAMS)
        return chat.token_ids

    alone = [converse(name) for name in names]
    with ThreadPoolExecutor(len(names)) as threads:
        assert list(threads.map(converse, names)) == alone


def test_a_context_that_is_full(runtime):
    """Answers are cut at the end; then an error has the remaining room, and a shorter turn fits."""
    chat = runtime.conversation()
    chat.send("hi", SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(chat.token_ids) == runtime.config.max_context
    with pytest.raises(ConversationTooLongError, match=f"has {len(chat.token_ids)} tokens"):
        chat.send("so", PARAMS)
    with pytest.raises(TokenOutOfRangeError):
        runtime.conversation().send([10_000])


@pytest.mark.release
def test_cut_off_turns_are_not_kept(runtime):
    """A turn that ends by cancel, timeout, Ctrl-C or leaving the loop is not kept."""
    chat = runtime.conversation()
    chat.send("hi", PARAMS)
    expected = chat.fork().send("so", PARAMS).token_ids
    before, endless = chat.token_ids, SamplingParams(max_tokens=None, ignore_eos=True)
    with runtime_with(None, wrap_executor=SlowExecutor) as slow:
        slow_chat = slow.conversation()
        with pytest.raises(TurnTimeoutError, match="no answer after 0.1 s"):
            slow_chat.send("hi", endless, timeout_s=0.1)
        with pytest.raises(TurnCancelledError):
            for i, _ in enumerate(slow_chat.stream("hi", endless)):
                if i == 1:
                    for request_id in slow.outlook():
                        slow.cancel(request_id)
        threading.Timer(0.1, interrupt).start()
        with heeding_interrupts(), pytest.raises(KeyboardInterrupt):
            slow_chat.send("hi", endless)
        assert slow_chat.history == []
        until(lambda: not slow.outlook())

    for _ in chat.stream("so", endless):
        break
    gc.collect()
    assert chat.token_ids == before
    assert chat.send("so", PARAMS).token_ids == expected


def test_a_journal_outlives_the_runtime(runtime, tmp_path):
    """A new runtime continues with the same tokens; ids are in the report and the recording."""
    path, record = str(tmp_path / "journal"), tmp_path / "run.jsonl"
    undisturbed = runtime.conversation("a", system="be")
    for i, said in enumerate(SAID[:2]):
        undisturbed.send(said, PARAMS)
        with runtime_with(path, record=record if i == 0 else None) as again:
            chat = again.conversation("a", system="be")
            assert len(chat.turns) == i
            chat.send(said, PARAMS)
            assert [r.conversation_id for r in again.report().requests] == ["a"]
    assert chat.token_ids == undisturbed.token_ids
    assert [line.conversation_id for line in recorded.read(record)] == ["a"]
    older = json.loads(record.read_text())
    del older["conversation_id"]
    (tmp_path / "older").write_text(json.dumps(older))
    assert recorded.read(tmp_path / "older")[0].conversation_id is None
    with pytest.raises(RuntimeClosedError):
        chat.send("gone", PARAMS)
    with pytest.raises(RuntimeClosedError):
        again.conversations.list()


def test_a_journal_that_fails_refuses_turns_and_keeps_those_before(tmp_path):
    """`send` raises, `stream` raises before its last piece, and the conversation is unchanged."""
    limits = JournalLimits(max_conversations=1)
    path, elsewhere = tmp_path / "journal", tmp_path / "elsewhere"
    with runtime_with(str(path), journal_limits=limits) as runtime:
        chat = runtime.conversation()
        chat.send("hi", PARAMS)
        before = chat.history
        path.rename(elsewhere)
        with pytest.raises(JournalError, match="removed or replaced"):
            chat.send("so", PARAMS)
        pieces = []
        with pytest.raises(JournalError, match="removed or replaced"):
            pieces.extend(chat.stream("so", PARAMS))
        assert all(piece.finish_reason is None for piece in pieces)
        elsewhere.rename(path)
        assert chat.history == before
        chat.send("so", PARAMS)
        runtime.conversation("other").send("hi", PARAMS)
        assert [entry.id for entry in runtime.conversations.list()] == ["other"]


def test_bad_journals_are_refused_before_anything_is_built(tmp_path):
    """The error is typed and raised at once."""
    with pytest.raises(JournalError, match="cannot be opened"):
        runtime_with(str(tmp_path))
    with pytest.raises(JournalError, match="cannot be opened"):
        Runtime.from_pretrained("smollm2-135m", conversations=tmp_path / "no" / "file")


def test_threads_that_send_at_once_get_errors_or_answers(runtime):
    """One of two simultaneous turns is refused, and exactly the answered turns are kept."""
    chat = runtime.conversation()
    kept, refused = [], []
    barrier = threading.Barrier(4)

    def send(said: str) -> None:
        barrier.wait()
        try:
            chat.send(said, PARAMS)
            kept.append(said)
        except Exception as error:
            refused.append(type(error).__name__)

    threads = [threading.Thread(target=send, args=(said,)) for said in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [message["content"] for message in chat.history[::2]] == kept and kept
    assert refused == ["ConversationBusyError"] * (4 - len(kept))
