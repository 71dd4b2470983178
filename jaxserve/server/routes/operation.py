"""`/health`, `/ready`, `/version`, `/metrics`, and `/`, a page to chat and to watch the engine."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve import __version__
from jaxserve.server.backend import Status
from jaxserve.server.errors import failed
from jaxserve.server.events import json_response
from jaxserve.server.metrics import CONTENT_TYPE
from jaxserve.server.routes.common import Here, documented
from jaxserve.server.schema import Reply

router = APIRouter()


_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PATHS = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}


class StateReply(Reply):
    """What the server is doing."""

    status: Status = Field(
        description='"compiling" if a request would be accepted, but would wait for a compilation.'
    )


class VersionReply(Reply):
    """The version of jaxserve."""

    version: str


@router.get("/health", response_model=StateReply, responses=documented(500), tags=["operation"])
async def health(backend: Here) -> Response:
    """Say whether the process is alive: 500 if the model could not be loaded or has failed."""
    if backend.phase == "failed":
        raise failed()
    return json_response(StateReply(status=backend.status))


@router.get("/ready", response_model=StateReply, responses=documented(503), tags=["operation"])
async def ready(backend: Here) -> Response:
    """Say whether requests are answered without delay.

    503 while the model is loaded, while a first request would wait for a compilation, and after
    SIGTERM.
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


@cache
def _read(name: str) -> bytes:
    return (files("jaxserve.server") / "page" / name).read_bytes()


@router.get("/", include_in_schema=False)
@router.get("/page.css", include_in_schema=False)
@router.get("/page.js", include_in_schema=False)
async def page(http: Request) -> Response:
    """Return a file of the page."""
    name, media_type = PATHS[http.url.path]
    return Response(_read(name), media_type=media_type, headers=_HEADERS)
