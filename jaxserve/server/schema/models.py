"""`/v1/models`, `/health`, `/ready` and `/version`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxserve.server.schema.base import Reply

Status = Literal["loading", "compiling", "ready", "draining", "failed"]


class ModelCard(Reply):
    """The model that is served, or an adapter of it."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    max_model_len: int | None = None


class ModelList(Reply):
    """The model, and its adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class StateReply(Reply):
    """What the server is doing."""

    status: Status = Field(
        description='"compiling" if a request would be accepted, but would wait for a compilation.'
    )


class VersionReply(Reply):
    """The version of jaxserve."""

    version: str
