"""`/`: a page to chat with the model and to watch the engine, without resources of other sites."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

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


@cache
def _read(name: str) -> bytes:
    return (files("jaxserve.server") / "page" / name).read_bytes()


@router.get("/")
@router.get("/page.css")
@router.get("/page.js")
async def page(http: Request) -> Response:
    """Return a file of the page."""
    name, media_type = PATHS[http.url.path]
    return Response(_read(name), media_type=media_type, headers=_HEADERS)
