"""A server of a few repositories, with the part of the Hugging Face Hub's API that downloads use.

The requests are those that huggingface_hub 2.4.0 makes; 0.34 and 1.0 make the same ones without the
list of the tree.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import final

_API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<kind>revision|tree)/(?P<revision>.+))?"
)
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
COMMIT = "5" * 40


@final
class HubServer:
    """What is served, and what was asked for.

    Attributes:
      repos: files by repository.
      gated: repositories that need a token.
      requests: method and path of each request, and whether it had the token.
    """

    def __init__(self, repos: Mapping[str, Mapping[str, bytes]], gated: tuple[str, ...] = ()):
        self.repos = repos
        self.gated = gated
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    def files_read(self) -> list[str]:
        """Return the names of files whose contents were read."""
        found = [_FILE.fullmatch(path) for method, path, _ in self.requests if method == "GET"]
        return sorted(match["file"] for match in found if match)


@contextmanager
def serving(hub: HubServer) -> Iterator[HubServer]:
    """A block in which the hub is served on a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.split("?")[0].replace("%2F", "/")
            token = self.headers.get("Authorization")
            hub.requests.append((self.command, path, token))
            match = _API.fullmatch(path) or _FILE.fullmatch(path)
            files = hub.repos.get(match["repo"]) if match else None
            if match is None or files is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if match["repo"] in hub.gated and token is None:
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if match["revision"] not in (None, "main", "v1", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            parts = match.groupdict()
            if "file" not in parts:
                sizes = [{"type": "file", "path": n, "size": len(c)} for n, c in files.items()]
                names = [{"rfilename": name} for name in files]
                about = {"id": match["repo"], "sha": COMMIT, "siblings": names}
                found = [each | {"oid": _digest(files[each["path"]])} for each in sizes]
                body = json.dumps(found if parts["kind"] == "tree" else about)
                return self._send(200, body.encode(), {"X-Repo-Commit": COMMIT})
            content = files.get(parts["file"])
            if content is None:
                return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
            start = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if start:
                first = int(start[1])
                headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
                return self._send(206, content[first:], headers)
            return self._send(200, content, headers)

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
