"""The conversations of a service."""

from __future__ import annotations

import builtins
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from jaxserve.conversations.conversation import Conversation
from jaxserve.conversations.journal import Entry, Journal
from jaxserve.conversations.prompts import as_messages
from jaxserve.conversations.turn_client import TurnClient
from jaxserve.conversations.turns import History, Message
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jaxserve.models.tokenizer import Tokenizer

_MAX_ID_LENGTH = 256


@final
class Conversations:
    """Opens, lists and deletes conversations; see `Service.conversations`. Thread-safe.

    Attributes:
      journal: holds their turns.
      client: answers their turns.
      tokenizer: None restricts conversations to token ids.
      vocabulary: fingerprint of the meaning of token ids; equal for equal tokenizers.
    """

    def __init__(
        self, journal: Journal, client: TurnClient, tokenizer: Tokenizer | None, vocab_size: int
    ):
        self.journal = journal
        self.client = client
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.RLock()
        # One object for each id, so that its turns exclude each other.
        self._open: weakref.WeakValueDictionary[str, Conversation] = weakref.WeakValueDictionary()

    @property
    def vocabulary(self) -> str:
        if self.tokenizer is None:
            return f"{self._vocab_size} token ids"
        return self.tokenizer.fingerprint

    def open(
        self,
        id: str | None = None,
        *,
        system: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Conversation:
        """See `Service.conversation`."""
        instruction = [{"role": "system", "content": system}] if system else []
        start = as_messages([*instruction, *messages])
        id = _checked_id(id)
        with self._lock:
            opened = self._open.get(id)
            if opened is None:
                opened = self._open[id] = Conversation(id, self, start)
        said = opened.history[: len(start)]
        if said != list(start):
            raise InvalidConfigError(
                f"a conversation with the id {id!r} exists and began with other messages "
                f"({said!r}); leave out system and messages to continue it, or choose another id"
            )
        return opened

    def begin(self, id: str | None, start: Sequence[Message], history: History) -> Conversation:
        """Begin a conversation with a history; see `Conversation.fork`.

        Raises:
          InvalidConfigError: not a valid id, or a conversation with this id exists.
        """
        id = _checked_id(id)
        with self._lock:
            if id in self._open or self.journal.find(id) is not None:
                raise InvalidConfigError(
                    f"a conversation with the id {id!r} exists; choose another id"
                )
            if history.turns:
                self.journal.append(id, None, self.vocabulary, history, history.turns)
            begun = self._open[id] = Conversation(id, self, start)
        return begun

    def list(self) -> builtins.list[Entry]:
        """Return the conversations in the journal, the most recently used first."""
        return self.journal.list()

    def delete(self, id: str) -> None:
        """See `Conversation.delete`.

        Raises:
          UnknownConversationError: no conversation has this id.
        """
        with self._lock:
            opened = self._open.get(id)
        if opened is None:
            self.journal.delete(id)
        else:
            opened.delete()

    def __contains__(self, id: str) -> bool:
        return self.journal.find(id) is not None

    def forget(self, conversation: Conversation) -> None:
        """Drop a deleted conversation, so that its id can begin another one."""
        with self._lock:
            if self._open.get(conversation.id) is conversation:
                del self._open[conversation.id]


def _checked_id(id: str | None) -> str:
    if id is None:
        return secrets.token_hex(8)
    if not isinstance(id, str) or not 0 < len(id) <= _MAX_ID_LENGTH or not id.isprintable():
        raise InvalidConfigError(
            f"id={id!r} is not a valid conversation id; give 1 to {_MAX_ID_LENGTH} printable "
            "characters"
        )
    return id
