"""A server that streams what a test says, in the form of OpenAI's API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(said: str, finish_reason: str | None = None) -> bytes:
    """Return the event of a completion that adds this text."""
    return event(choices=[{"index": 0, "text": said, "finish_reason": finish_reason}])


@contextmanager
def streaming(
    answer: Callable[[dict[str, Any]], tuple[int, Sequence[bytes | None]]],
) -> Iterator[str]:
    """Serve within the block, and yield the address.

    `answer` returns the status and the chunks of the answer to a body; at None, the server sends no
    more before the block ends.
    """
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
            self._send(200, [json.dumps({"data": [{"id": "served"}]}).encode()])

        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*answer({**body, "path": self.path}))

        def _send(self, status: int, parts: Sequence[bytes | None]) -> None:
            self.send_response(status)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for part in parts:
                if part is None:
                    is_over.wait()
                    return
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            is_over.set()
            server.shutdown()
            thread.join()
