"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with the names that vLLM gives them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from anyio import to_thread
from fastapi import APIRouter
from starlette.responses import Response

from jaxserve.core.errors import DeviceMemoryError
from jaxserve.server.backend import Backend
from jaxserve.server.errors import invalid, no_room, not_allowed
from jaxserve.server.events import json_response
from jaxserve.server.routes.common import Here, documented
from jaxserve.server.schema.adapters import (
    LoadAdapterRequest,
    UnloadAdapterReply,
    UnloadAdapterRequest,
)
from jaxserve.server.schema.models import ModelCard

router = APIRouter()
_STATUSES = (400, 401, 404, 408, 409, 413, 503)


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
    return json_response(backend.card_of(body.lora_name))


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
    """Return a folder below another, wherever links lead."""
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
