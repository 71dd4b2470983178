"""Turns that build on each other: their tokens, their messages, and the effect of bad turns."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from jaxserve.core.errors import (
    ConversationBusyError,
    ConversationConflictError,
    ConversationTooLongError,
    EmptyPromptError,
    InvalidConfigError,
    InvalidRequestError,
    InvalidSamplingParamsError,
    OtherModelError,
    TurnCancelledError,
    UnknownConversationError,
)
from jaxserve.core.sampling_params import SamplingParams
from tests.conversations.chats import TEMPLATE, chat_tokenizer
from tests.conversations.fakes import FakeTurnClient, conversations

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_prompt_begins_with_all_that_was_before(tokenizer, finish_reason):
    """The tokens are unchanged; the end of a turn is there once, also after a cut answer."""
    client = FakeTurnClient(tokenizer, finish_reason)
    chat = conversations(client=client, tokenizer=tokenizer).open(system="be brief")
    before: tuple[int, ...] = ()
    for said in ("hi", "and then?", "<|e|> no"):
        completion = chat.send(said)
        assert completion.prompt_token_ids[: len(before)] == before
        before = (*completion.prompt_token_ids, *completion.token_ids)
        assert chat.token_ids == before
    # Answers of single letters: the whole history, tokenized again, has the same tokens.
    assert client.prompts[-1] == tuple(tokenizer.apply_chat_template(chat.history[:-1]))
    assert [message["role"] for message in chat.history] == ["system", *(("user", "assistant") * 3)]


def test_streams_are_turns_too(tokenizer):
    """A stream has the tokens and history of `send`; its last piece comes when the turn is kept."""
    one, two = (conversations(tokenizer=tokenizer) for _ in range(2))
    sent, streamed = one.open("a"), two.open("a")
    for said in ("hi", "so?"):
        completion = sent.send(said)
        pieces = []
        for piece in streamed.stream(said):
            pieces.append(piece)
            is_last = piece.finish_reason is not None
            assert (two.journal.find("a") is not None or not is_last) and (
                len(streamed.turns) == len(sent.turns) - (not is_last)
            )
        assert tuple(t for p in pieces for t in p.token_ids) == completion.token_ids
    assert streamed.history == sent.history and streamed.token_ids == sent.token_ids


def test_token_ids_go_on_as_they_are():
    """Without tokenizer or template no tokens are inserted; tokens and messages do not mix."""
    home = conversations()
    chat = home.open()
    first = chat.send([1, 2, 3])
    second = chat.send([4])
    assert second.prompt_token_ids == (1, 2, 3, *first.token_ids, 4)
    assert repr(chat) == f"Conversation({chat.id!r}, 2 turns, {len(chat.token_ids)} tokens)"
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        home.open().send("hi")
    tokenizer = chat_tokenizer()
    for said, other in (([1], "hi"), ("hi", [1])):
        chat = conversations(tokenizer=tokenizer).open()
        chat.send(said)
        with pytest.raises(InvalidRequestError, match="cannot go on"):
            chat.send(other)


def test_a_template_that_rewrites_is_noticed(caplog):
    """If it renders earlier turns differently, all is tokenized again, with a warning."""
    last_only = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last else '-' }}")
    tokenizer = chat_tokenizer(last_only)
    chat = conversations(tokenizer=tokenizer).open()
    first = chat.send("hi")
    assert not caplog.text
    second = chat.send("so?")
    expected = tokenizer.apply_chat_template(chat.history[:-1])
    assert second.prompt_token_ids == tuple(expected)
    assert caplog.text.count("tokenized again") == 1
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] != first.prompt_token_ids
    assert chat.turns[1].num_kept == len("?user ")  # START and "user " are the same
    assert chat.token_ids == (*second.prompt_token_ids, *second.token_ids)


class _WithTool:
    """Writes chats that begin with a tool."""

    def __init__(self, tokenizer, tool):
        self._tokenizer, self._first = tokenizer, {"role": "system", "content": tool}

    def prompt(self, messages):
        return self._tokenizer.apply_chat_template([self._first, *messages])

    def continuation(self, asked, answer, new):
        return self._tokenizer.chat_continuation([self._first, *asked], answer, new)


def test_a_history_is_rewritten_once_for_new_tools(caplog):
    """Later turns with the same tools go on with its tokens; other tools rewrite it again."""

    async def answers() -> None:
        for render in (None, one, one, one, two, two):
            num_logged, before = caplog.text.count("tokenized again"), chat.token_ids
            pieces = [piece async for piece in chat.astream("hi", render=render)]
            is_new = render is not None and render not in used
            used.append(render)
            assert pieces and caplog.text.count("tokenized again") - num_logged == is_new
            assert (chat.token_ids[: len(before)] == before) != is_new

    tokenizer = chat_tokenizer()
    chat = conversations(tokenizer=tokenizer).open()
    used: list[Any] = []
    one, two = (_WithTool(tokenizer, tool) for tool in ("add", "now"))
    asyncio.run(answers())


def test_a_rewritten_history_is_read_back(tmp_path):
    """The journal returns the same tokens, also if a turn did not keep all of them."""
    tokenizer = chat_tokenizer(TEMPLATE.replace("m.content", "m.content if loop.last else '-'"))
    path = str(tmp_path / "journal")
    chat = conversations(path, tokenizer=tokenizer).open("a")
    for said in ("hi", "so?", "well"):
        chat.send(said)
    again = conversations(path, tokenizer=tokenizer).open("a")
    assert again.token_ids == chat.token_ids and again.history == chat.history


@pytest.mark.parametrize("fault", ["error", "interrupt", "cancelled", "left"])
def test_a_turn_that_fails_leaves_no_trace(tokenizer, fault):
    """Whatever ends the turn early, the next turn finds the conversation unchanged."""
    client = FakeTurnClient(tokenizer)
    home = conversations(client=client, tokenizer=tokenizer)
    chat = home.open()
    chat.send("hi")
    before, entry = (chat.history, chat.token_ids), home.journal.find(chat.id)

    def fail():
        raise KeyboardInterrupt if fault == "interrupt" else RuntimeError("lost")

    if fault == "cancelled":
        client.finish_reason = "cancelled"
        with pytest.raises(TurnCancelledError, match="as it was before"):
            chat.send("so?")
        with pytest.raises(TurnCancelledError):
            list(chat.stream("so?"))
    elif fault == "left":
        stream = chat.stream("so?")
        next(stream)
        stream.close()
    else:
        client.during = fail
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            chat.send("so?")
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            list(chat.stream("so?"))
    assert (chat.history, chat.token_ids) == before
    assert home.journal.find(chat.id) == entry
    client.during, client.finish_reason = (lambda: None), "length"
    assert chat.send("so?").prompt_token_ids[: len(before[1])] == before[1]


def test_turns_come_one_after_the_other(tokenizer):
    """During an answer a second turn and a deletion are refused; other conversations continue."""
    answering, go_on = threading.Event(), threading.Event()
    client = FakeTurnClient(tokenizer)

    def wait():
        client.during = lambda: None
        answering.set()
        go_on.wait(10)

    client.during = wait
    home = conversations(client=client, tokenizer=tokenizer)
    chat = home.open("a")
    thread = threading.Thread(target=chat.send, args=("hi",))
    thread.start()
    answering.wait(10)
    for refused in (lambda: chat.send("ho"), lambda: list(chat.stream("ho")), chat.delete):
        with pytest.raises(ConversationBusyError, match="still being answered"):
            refused()
    home.open("b").send("hi")
    go_on.set()
    thread.join(10)
    chat.send("ho")
    assert [message["content"] for message in chat.history[::2]] == ["hi", "ho"]


def test_forks_go_their_own_ways(tokenizer):
    """A fork begins with the tokens of all or some turns, and is stored."""
    home = conversations(tokenizer=tokenizer)
    chat = home.open("a", system="be brief")
    assert chat.fork().history == chat.history
    for said in ("one", "two", "three"):
        chat.send(said)
    whole, part = chat.fork(), chat.fork(1, id="part")
    assert (whole.token_ids, whole.history) == (chat.token_ids, chat.history)
    assert part.history == chat.history[:3]
    same = part.send("two")
    assert same.token_ids == chat.turns[1].answer
    part.send("else")
    assert len(chat.turns) == 3 and len(part.turns) == 3
    assert {entry.id for entry in home.list()} == {"a", "part", whole.id}
    for num_turns in (0, 4, -1):
        with pytest.raises(InvalidConfigError, match="has 3 turns"):
            chat.fork(num_turns)
    with pytest.raises(InvalidConfigError, match="exists"):
        chat.fork(id="part")


def test_deleted_conversations_are_over(tokenizer):
    """Their objects raise, however they were deleted; a new conversation may have the same id."""
    home = conversations(tokenizer=tokenizer)
    chat, other = home.open("a"), home.open("b")
    chat.send("hi")
    other.send("hi")
    home.delete("a")
    other.delete()
    for gone in (chat, other):
        with pytest.raises(UnknownConversationError, match="was deleted"):
            gone.send("ho")
        assert gone.history == []
    with pytest.raises(UnknownConversationError):
        home.delete("a")
    assert home.list() == [] and "a" not in home
    assert len(home.open("a").send("new").prompt_token_ids) == len("?user new??assistant ")


def test_one_id_is_one_conversation(tokenizer):
    """Opening an id twice gives the same object; an existing one cannot begin differently."""
    home = conversations(tokenizer=tokenizer)
    chat = home.open("a", system="be brief")
    assert home.open("a") is chat and home.open("a", system="be brief") is chat
    chat.send("hi")
    with pytest.raises(InvalidConfigError, match="began with other messages"):
        home.open("a", system="be long")
    assert home.open().id != home.open().id
    for bad in ("", "a\nb", "x" * 300, 3):
        with pytest.raises(InvalidConfigError, match="not a valid conversation id"):
            home.open(bad)


def test_a_conversation_may_begin_with_messages(tokenizer):
    """The messages, for instance of another conversation, are in its first prompt."""
    home = conversations(tokenizer=tokenizer)
    old = home.open(system="be brief")
    old.send("hi")
    new = home.open(messages=old.history)
    prompt = new.send([{"role": "user", "content": "so?"}]).prompt_token_ids
    assert prompt == tuple(tokenizer.apply_chat_template(new.history[:-1]))
    assert new.history[: len(old.history)] == old.history


def test_two_runtimes_may_share_a_journal(tmp_path, tokenizer):
    """Each continues after the other's turns; a turn that was overtaken raises."""
    path = str(tmp_path / "journal")
    client = FakeTurnClient(tokenizer)
    here = conversations(path, client=client, tokenizer=tokenizer)
    there = conversations(path, tokenizer=tokenizer)
    mine = here.open("a")
    mine.send("one")
    theirs = there.open("a")
    theirs.send("two")
    assert mine.send("three").prompt_token_ids[: len(theirs.token_ids)] == theirs.token_ids

    def overtake():
        client.during = lambda: None
        theirs.send("first")

    client.during = overtake
    with pytest.raises(ConversationConflictError, match="not kept"):
        mine.send("late")
    mine.send("after")
    said = [message["content"] for message in mine.history if message["role"] == "user"]
    assert said == ["one", "two", "three", "first", "after"]
    there.delete("a")
    with pytest.raises(UnknownConversationError, match="was deleted"):
        mine.send("gone")


def test_another_vocabulary_is_refused(tmp_path, tokenizer):
    """Its tokens mean different text; the messages can begin a new conversation."""
    path = str(tmp_path / "journal")
    conversations(path, tokenizer=tokenizer).open("a").send("hi")
    with pytest.raises(OtherModelError, match="conversations export"):
        conversations(path, tokenizer=chat_tokenizer(TEMPLATE + " ")).open("a")
    with pytest.raises(OtherModelError):
        conversations(path).open("a")
    assert conversations(path, tokenizer=chat_tokenizer()).open("a").history


def test_a_full_context_is_explained(tokenizer):
    """The error has the tokens of the history, the limit and a remedy; nothing changes."""
    client = FakeTurnClient(tokenizer, max_prompt_tokens=60)
    chat = conversations(client=client, tokenizer=tokenizer).open("a")
    chat.send("hi")
    num_tokens = len(chat.token_ids)
    with pytest.raises(ConversationTooLongError, match="fork.*max_context") as caught:
        chat.send("x" * 40)
    error = caught.value
    assert (error.num_history_tokens, error.max_prompt_tokens) == (num_tokens, 60)
    assert error.num_new_tokens == len("?" + "?user ??assistant ") + 40
    assert f"has {num_tokens} tokens" in str(error)
    assert f"leaves {60 - num_tokens} for a turn" in str(error)
    assert len(chat.turns) == 1
    chat.send("x")


BAD = {
    "nothing": ("", EmptyPromptError),
    "no messages": ([], EmptyPromptError),
    "a number": (3, InvalidRequestError),
    "mixed": ([{"role": "user", "content": "a"}, 3], InvalidRequestError),
    "strings": (["a"], InvalidRequestError),
    "not JSON": ([{"role": "user", "content": object()}], InvalidRequestError),
    "surrogate": ("a\ud83d", InvalidRequestError),
    "no role": ([{"content": "a"}], InvalidRequestError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_turns_are_refused(tokenizer, name):
    """The error is typed, no request is made, and nothing is stored."""
    said, error = BAD[name]
    strict = chat_tokenizer("{{ raise_exception('no') if not messages[0].role }}" + TEMPLATE)
    client = FakeTurnClient(strict)
    chat = conversations(client=client, tokenizer=strict).open()
    with pytest.raises(error):
        chat.send(said)
    assert not client.prompts and not chat.history
    with pytest.raises(InvalidSamplingParamsError, match="n=1"):
        chat.send("hi", SamplingParams(n=2, temperature=1.0))
