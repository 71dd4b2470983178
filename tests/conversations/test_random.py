"""Under random operations journalled conversations behave like lists of messages."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import TurnCancelledError
from tests.common.tiers import examples
from tests.conversations.fakes import END_ID, FakeTurnClient, conversations

pytestmark = pytest.mark.fast

IDS = ("a", "b", "c")
OPERATIONS = st.one_of(
    st.tuples(
        st.sampled_from(("send", "stream", "cancelled")),
        st.sampled_from(IDS),
        st.lists(st.integers(0, END_ID), min_size=1, max_size=3),
    ),
    st.tuples(st.just("fork"), st.sampled_from(IDS), st.sampled_from(IDS)),
    st.tuples(st.just("delete"), st.sampled_from(IDS), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


@examples(8, 250)
@given(st.lists(OPERATIONS, max_size=14), st.booleans())
def test_conversations_are_lists_of_tokens(operations, is_on_disk):
    """Each conversation has its prompts and answers after any sequence of operations."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "journal") if is_on_disk else None
        client = FakeTurnClient()
        home = conversations(path, client=client)
        known: dict[str, tuple[int, ...]] = {}
        for kind, id, given in operations:
            if kind == "restart":
                if is_on_disk:
                    home.journal.close()
                    home = conversations(path, client=client)
            elif kind == "delete":
                if id in known:
                    home.delete(id)
                    del known[id]
            elif kind == "fork":
                if given not in known and id in known:
                    home.open(id).fork(id=given)
                    known[given] = known[id]
            else:
                chat, before = home.open(id), known.get(id, ())
                prompt = (*before, *given)
                if kind == "send":
                    known[id] = (*prompt, *chat.send(given).token_ids)
                elif kind == "stream":
                    pieces = list(chat.stream(given))
                    known[id] = (*prompt, *(t for piece in pieces for t in piece.token_ids))
                else:
                    client.finish_reason = "cancelled"
                    try:
                        chat.send(given)
                    except TurnCancelledError:
                        client.finish_reason = "length"
                assert client.prompts[-1] == prompt
                del chat  # while it is open, no fork can have its id
            assert {entry.id for entry in home.list()} == set(known)
            for one, token_ids in known.items():
                assert home.open(one).token_ids == token_ids
        home.journal.close()
