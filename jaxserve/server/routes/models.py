"""`/v1/models`, and the LoRA adapters that clients load and unload, under vLLM's names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from jaxserve.core.errors import DeviceMemoryError
from jaxserve.server.backend import Backend
from jaxserve.server.errors import invalid, no_room, not_allowed
from jaxserve.server.events import json_response
from jaxserve.server.routes.common import Here, documented
from jaxserve.server.schema import Reply, Strict

AdapterName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]+$")]

router = APIRouter()
_STATUSES = (400, 401, 404, 408, 409, 413, 503)


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


class LoadAdapterRequest(Strict):
    """A PEFT adapter to load, and the model name that selects it afterwards."""

    lora_name: AdapterName
    lora_path: Annotated[
        str,
        Field(min_length=1, max_length=4096, description="Below the server's folder of adapters."),
    ]


class UnloadAdapterRequest(Strict):
    """A loaded adapter to drop."""

    lora_name: AdapterName


class UnloadAdapterReply(Reply):
    """An adapter that was dropped."""

    id: str
    object: Literal["model"] = "model"
    deleted: Literal[True] = True


@router.get("/v1/models", response_model=ModelList, responses=documented(401), tags=["models"])
async def list_models(backend: Here) -> Response:
    """Return the model that is served, also while it is being loaded, and its adapters."""
    names = (backend.options.model_name, *backend.adapters)
    return json_response(ModelList(data=[_card(name, backend) for name in names]))


@router.get(
    "/v1/models/{model:path}",
    response_model=ModelCard,
    responses=documented(401, 404),
    tags=["models"],
)
async def retrieve_model(model: str, backend: Here) -> Response:
    """Return the model, or one of its adapters."""
    backend.adapter_of(model)
    return json_response(_card(model, backend))


@router.post(
    "/v1/load_lora_adapter",
    response_model=ModelCard,
    responses=documented(*_STATUSES),
    tags=["models"],
)
async def load_adapter(body: LoadAdapterRequest, backend: Here) -> Response:
    """Load an adapter from below the server's folder of adapters, while requests run."""
    root = _root(backend)
    service = backend.ready_service()
    if body.lora_name == backend.options.model_name:
        raise invalid(f"lora_name {body.lora_name!r} is the model's; choose another", "lora_name")
    folder = await to_thread.run_sync(partial(_below, root, body.lora_path))
    try:
        await to_thread.run_sync(partial(service.load_adapter, body.lora_name, folder))
    except DeviceMemoryError as error:
        raise no_room(error) from error
    return json_response(_card(body.lora_name, backend))


@router.post(
    "/v1/unload_lora_adapter",
    response_model=UnloadAdapterReply,
    responses=documented(*_STATUSES),
    tags=["models"],
)
async def unload_adapter(body: UnloadAdapterRequest, backend: Here) -> Response:
    """Drop an adapter; 409 while requests with it have not ended."""
    _root(backend)
    service = backend.ready_service()
    await to_thread.run_sync(partial(service.drop_adapter, body.lora_name))
    return json_response(UnloadAdapterReply(id=body.lora_name))


def _root(backend: Backend) -> Path:
    if backend.options.adapter_folder is None:
        raise not_allowed(
            "this server loads and drops no adapters while it runs; start it with --adapter-folder"
        )
    return backend.options.adapter_folder


def _below(root: Path, path: str) -> Path:
    """Return the path of a folder below `root`, with links resolved."""
    try:
        root, folder = root.resolve(), (root / path).resolve()
        is_below = folder.is_relative_to(root)
    except (OSError, ValueError, RuntimeError) as error:
        raise invalid(f"lora_path {path!r:.80} is no path: {error}", "lora_path") from error
    if not is_below:
        raise invalid(
            f"lora_path {path!r:.80} is not below the server's folder of adapters; pass a path "
            "relative to that folder",
            "lora_path",
        )
    return folder


def _card(name: str, backend: Backend) -> ModelCard:
    return ModelCard(id=name, created=backend.created_s, max_model_len=backend.max_model_len)
