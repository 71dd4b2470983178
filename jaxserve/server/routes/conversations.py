"""`/conversations`: lists, shows, forks and deletes the conversations that the service keeps."""

from __future__ import annotations

from typing import Any

from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from jaxserve.conversations import Conversation
from jaxserve.core.errors import UnknownConversationError
from jaxserve.server.events import json_response
from jaxserve.server.routes.common import READING, Here, documented
from jaxserve.server.schema import Reply, Strict

router = APIRouter(tags=["conversations"])

_ERRORS = documented(*READING, 409, 500)


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


def _known(backend: Here, id: str) -> Conversation:
    """Return a kept conversation; unlike a chat with its id, this starts no new one."""
    service = backend.ready_service()
    if id not in service.conversations:
        raise UnknownConversationError(
            f"no conversation has the id {id!r}; GET /conversations lists them"
        )
    return service.conversation(id)


@router.get("/conversations", response_model=ConversationList, responses=_ERRORS)
async def list_conversations(backend: Here) -> Response:
    """List the conversations, the most recently used first."""
    kept = await to_thread.run_sync(backend.ready_service().conversations.list)
    cards = [
        ConversationCard(
            id=entry.id, num_turns=entry.num_turns, num_tokens=entry.num_tokens, used=entry.used_s
        )
        for entry in kept
    ]
    return json_response(ConversationList(data=cards))


@router.get("/conversations/{id:path}", response_model=ConversationReply, responses=_ERRORS)
async def show_conversation(id: str, backend: Here) -> Response:
    """Return the messages of a conversation."""
    conversation = await to_thread.run_sync(_known, backend, id)
    return json_response(ConversationReply(id=id, messages=conversation.history))


@router.post("/conversations/{id:path}/fork", response_model=ConversationReply, responses=_ERRORS)
async def fork_conversation(id: str, body: ForkRequest, backend: Here) -> Response:
    """Begin another conversation with the first turns of this one."""

    def fork() -> Conversation:
        return _known(backend, id).fork(body.num_turns)

    forked = await to_thread.run_sync(fork)
    return json_response(ConversationReply(id=forked.id, messages=forked.history))


@router.delete("/conversations/{id:path}", response_model=Deleted, responses=_ERRORS)
async def delete_conversation(id: str, backend: Here) -> Response:
    """Delete a conversation."""
    service = backend.ready_service()
    await to_thread.run_sync(service.conversations.delete, id)
    return json_response(Deleted(id=id))
