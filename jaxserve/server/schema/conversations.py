"""`/conversations`: the conversations that the service keeps."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jaxserve.server.schema.base import Reply, Strict


class ConversationCard(Reply):
    """A kept conversation. `used` is in seconds since 1970."""

    id: str
    num_turns: int
    num_tokens: int
    used: float


class ConversationList(Reply):
    """All kept conversations, the most recently used first."""

    data: list[ConversationCard]


class ConversationReply(Reply):
    """The messages of a conversation."""

    id: str
    messages: list[dict[str, Any]]


class ForkRequest(Strict):
    """How a conversation is continued differently."""

    num_turns: int | None = Field(None, ge=1, description="Turns to keep; all by default.")


class Deleted(Reply):
    """A conversation that is kept no longer."""

    id: str
    deleted: bool = True
