"""A server without HTTP: what it costs that requests come from another process over sockets."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


@contextmanager
def bare_socket(rt: Runtime) -> Iterator[str]:
    """Answer requests over sockets within the block, and yield the address ("http://...").

    It takes the bodies of `/inference/v1/generate` and sends its events, with no more than what the
    client of these benchmarks reads. It skips the head of a request, and answers with none. A
    thread for each connection submits; the engine's thread writes each piece to the socket.
    """

    @final
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            num_bytes = 0
            while (line := self.rfile.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    num_bytes = int(line.split(b":")[1])
            body = json.loads(self.rfile.read(num_bytes))
            params = SamplingParams(**body["sampling_params"])
            pending = rt.submit(body["token_ids"], params, on_piece=self._write)
            end = f'data: {{"request_id": "{pending.request_id}"}}\n\ndata: [DONE]\n\n'
            pending.result()
            self.wfile.write(end.encode())

        def _write(self, piece: Piece) -> None:
            if piece.token_ids:
                choice = {"token_ids": piece.token_ids}
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 2048

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="bare-socket", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
