"""`/health`, `/ready`, `/version`, `/metrics`, and the pages `/`, to chat, and `/docs`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import APIRouter
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve import __version__
from jaxserve.server.backend import Status
from jaxserve.server.errors import failed
from jaxserve.server.events import json_response
from jaxserve.server.guard import PAGE_PATH
from jaxserve.server.metrics import CONTENT_TYPE
from jaxserve.server.routes.common import Here, documented
from jaxserve.server.schema import Reply

router = APIRouter()


_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
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
    responses={200: {"description": "Metrics in the text format of Prometheus."}, **documented()},
    tags=["operation"],
)
async def metrics(backend: Here) -> Response:
    """Return the metrics of the server and of the engine."""
    content = await to_thread.run_sync(backend.metrics.exposition)
    return Response(content, media_type=CONTENT_TYPE)


@cache
def _page_files() -> dict[str, bytes]:
    """Return the files of the page, by their paths below its folder."""
    folder = Path(__file__).parents[1] / "page"
    found = (path for path in folder.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """Return the page."""
    return await page_file("index.html")


@router.get(PAGE_PATH + "{name:path}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Return a file of the page."""
    content = _page_files().get(name)
    if content is None:
        raise HTTPException(404)
    return Response(content, media_type=_TYPES[Path(name).suffix], headers=_HEADERS)


@router.get("/docs", include_in_schema=False)
async def docs(http: Request) -> Response:
    """Return a page of the endpoints and their fields, which loads nothing and has no scripts.

    Swagger's page would load its scripts from another site, and begin with one that the policy of
    this server's pages forbids.
    """
    text = "\n".join(_docs(http.app.openapi()))
    return Response(text, media_type="text/html", headers=_HEADERS)


def _docs(schema: Mapping[str, Any]) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><meta charset="utf-8"><title>jaxserve: endpoints</title>'
    yield f"<h1>{escape(schema['info']['title'])} {escape(schema['info']['version'])}</h1>"
    yield f"<p>{escape(schema['info']['description'])}"
    yield '<p><a href="/openapi.json">/openapi.json</a> is the schema for programs, and'
    yield '<a href="/">/</a> a page to chat.'
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p>{escape(operation.get('description', ''))}"
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                yield from _fields(_resolved(body["schema"], schema))


def _fields(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of a body's fields, without those that may only be null."""
    required = body.get("required", ())
    yield "<details><summary>Fields</summary><table>"
    for name, field in body.get("properties", {}).items():
        if (kind := _kind(field)) == "null":
            continue
        told = ["required. "] if name in required else []
        told.append(field.get("description", ""))
        cells = (f"<code>{escape(name)}</code>", escape(kind), escape("".join(told)))
        yield f"<tr>{''.join(f'<td>{cell}' for cell in cells)}"
    yield "</table></details>"


def _resolved(found: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = found.get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else found


def _kind(field: Mapping[str, Any]) -> str:
    """Return the type of a field in words."""
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    for name in ("anyOf", "oneOf"):
        if name in field:
            return " | ".join(dict.fromkeys(map(_kind, field[name])))
    values = field.get("enum", [field["const"]] if "const" in field else [])
    if values:
        return " | ".join(map(json.dumps, values))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return field.get("type", "any")
