"""`/v1/models`, `/health`, `/ready`, `/version` and `/metrics`."""

from __future__ import annotations

from anyio import to_thread
from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from jaxserve import __version__
from jaxserve.server.errors import failed
from jaxserve.server.events import json_response
from jaxserve.server.metrics import CONTENT_TYPE
from jaxserve.server.routes.common import Here, documented
from jaxserve.server.schema.models import ModelCard, ModelList, StateReply, VersionReply

router = APIRouter()


@router.get("/v1/models", response_model=ModelList, responses=documented(401), tags=["models"])
async def list_models(backend: Here) -> Response:
    """Return the model that is served, also while it is being loaded, and its adapters."""
    names = (backend.options.model_name, *backend.adapters)
    return json_response(ModelList(data=[backend.card_of(name) for name in names]))


@router.get(
    "/v1/models/{model:path}",
    response_model=ModelCard,
    responses=documented(401, 404),
    tags=["models"],
)
async def retrieve_model(model: str, backend: Here) -> Response:
    """Return the model, or one of its adapters."""
    backend.adapter_of(model)
    return json_response(backend.card_of(model))


@router.get("/health", response_model=StateReply, responses=documented(500), tags=["operation"])
async def health(backend: Here) -> Response:
    """Say whether the process is alive: 500 if the model could not be loaded or has failed."""
    if backend.phase == "failed":
        raise failed()
    return json_response(StateReply(status=backend.status))


@router.get("/ready", response_model=StateReply, responses=documented(503), tags=["operation"])
async def ready(backend: Here) -> Response:
    """Say whether requests are answered without delay.

    503 while the model is loaded, while what a first request needs is compiled, and from SIGTERM
    on.
    """
    backend.check_is_ready()
    return json_response(StateReply(status=backend.status))


@router.get("/version", response_model=VersionReply, responses=documented(), tags=["operation"])
async def version() -> Response:
    """Return the version of jaxserve."""
    return json_response(VersionReply(version=__version__))


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses={
        200: {"description": "Metrics in the text format of Prometheus."},
        **documented(),
    },
    tags=["operation"],
)
async def metrics(backend: Here) -> Response:
    """Return the metrics of the server and of the engine."""
    content = await to_thread.run_sync(backend.metrics.exposition)
    return Response(content, media_type=CONTENT_TYPE)
