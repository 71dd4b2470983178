"""The ways in which requests reach a model: in process, over our HTTP API, over OpenAI's."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from benchmarks.common.processes import PeerError
from benchmarks.http.load import send
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.workload import WorkloadItem
from jaxserve.workload.load import TimedAnswer, unanswered

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


@contextmanager
def bare_socket(rt: Runtime) -> Iterator[str]:
    """Answer requests over sockets within the block, and yield the address ("http://...").

    It accepts the bodies of `/inference/v1/generate` and sends its events, with only the fields
    that the client of these benchmarks reads. It skips the head of a request, and answers with one
    that has no fields. A thread for each connection submits; the engine's thread writes each piece
    to the socket.
    """

    @final
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            num_bytes = 0
            while (line := self.rfile.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    num_bytes = int(line.split(b":")[1])
            body = json.loads(self.rfile.read(num_bytes))
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
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


# Answers requests that arrive at given seconds.
Way = Callable[[Sequence[WorkloadItem], Sequence[float]], list[TimedAnswer]]


def of_ours(rt: Runtime, socket_url: str, url: str, *, completions: bool) -> dict[str, Way]:
    """Return the ways to a runtime and to its server; each begins with an empty prefix cache.

    Args:
      socket_url: of the server without HTTP, see `bare_socket`.
      url: of the HTTP server.
      completions: also the way over `/v1/completions`, which other servers have.
    """
    ways: dict[str, Way] = {
        "in process": _in_process(rt),
        "socket": _generate(socket_url),
        "http": _generate(url),
    }
    if completions:
        ways["completions"] = completions_of(url, "model")
    return {name: _cleared(rt, way) for name, way in ways.items()}


def completions_of(url: str, model: str, fields: Mapping[str, Any] | None = None) -> Way:
    """Return the way over a server's `/v1/completions`, with `fields` added to each body."""
    common = {"model": model, "stream_options": {"include_usage": True}, **(fields or {})}

    def body(prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": prompt, **params, **common}

    return _streamed(f"{url.rstrip('/')}/v1/completions", body)


def _generate(url: str) -> Way:
    def body(prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        return {"token_ids": prompt, "sampling_params": params}

    return _streamed(f"{url}/inference/v1/generate", body)


def _streamed(url: str, body: Callable[[list[int], dict[str, Any]], dict[str, Any]]) -> Way:
    def answer(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[TimedAnswer]:
        prompts = [list(map(int, item.prompt_token_ids)) for item in items]
        bodies = [
            {**body(prompt, _params(item)), "stream": True}
            for prompt, item in zip(prompts, items, strict=True)
        ]
        return _checked(send(url, bodies, arrivals_s), items)

    return answer


def _in_process(rt: Runtime) -> Way:
    def answer(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[TimedAnswer]:
        """Submit each request at its time, on this thread."""
        begun_s = time.perf_counter() + 0.1
        seen = unanswered(len(items))
        ended = threading.Semaphore(0)

        def sink(one: TimedAnswer, at_s: float) -> Callable[[Piece], None]:
            def take(piece: Piece) -> None:
                if piece.token_ids:
                    one.note_tokens(len(piece.token_ids))
                if piece.finish_reason is not None:
                    one.end_s = time.perf_counter() - at_s
                    ended.release()

            return take

        for item, arrival_s, one in zip(items, arrivals_s, seen, strict=True):
            at_s = begun_s + arrival_s
            time.sleep(max(0.0, at_s - time.perf_counter()))
            params = SamplingParams(**_params(item))
            one.at_s, one.sent_s = at_s, time.perf_counter() - at_s
            pending = rt.submit(item.prompt_token_ids, params, on_piece=sink(one, at_s))
            one.request_id = pending.request_id
        for _ in items:
            ended.acquire()
        return _checked(seen, items)

    return answer


def _params(item: WorkloadItem) -> dict[str, Any]:
    return {"max_tokens": item.num_output_tokens, "ignore_eos": True, "temperature": 0.0}


def _cleared(rt: Runtime, way: Way) -> Way:
    def answer(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[TimedAnswer]:
        # A step that was submitted ahead may still compute for answers that have ended.
        rt.generate([1], SamplingParams(max_tokens=1), progress=False)
        rt.forget_kept_pages()
        return way(items, arrivals_s)

    return answer


def _checked(seen: list[TimedAnswer], items: Sequence[WorkloadItem]) -> list[TimedAnswer]:
    """Return the results, if all answers have the requested lengths."""
    for i, (one, item) in enumerate(zip(seen, items, strict=True)):
        if one.num_tokens != item.num_output_tokens:
            raise PeerError(
                f"answer {i} has {one.num_tokens} tokens in place of {item.num_output_tokens}"
            )
        if not one.times_s:
            raise PeerError(f"answer {i} has no text, so its first token has no time")
    return seen


# Leading tokens of a prompt that are replaced. With ten tokens in a workload, they tell 10,000
# requests apart.
_NUM_REPLACED = 4


@final
class DistinctPrompts:
    """Gives every request of a benchmark a prompt with a unique beginning.

    A few leading tokens are replaced by the number of the request, in tokens of the workload. So
    prompts keep their length, and no prefix cache saves the work for an earlier prompt. Shorter
    prompts may repeat; caches keep no page of that few tokens.
    """

    def __init__(self, items: Sequence[WorkloadItem]):
        self._tokens = sorted({token for item in items for token in item.prompt_token_ids})
        self._num_given = 0

    def of(self, items: Sequence[WorkloadItem]) -> list[WorkloadItem]:
        """Return the requests with prompts that were not returned before."""
        return [self._next(item) for item in items]

    def _next(self, item: WorkloadItem) -> WorkloadItem:
        number = self._num_given
        self._num_given += 1
        digits = []
        for _ in item.prompt_token_ids[:_NUM_REPLACED]:
            number, digit = divmod(number, len(self._tokens))
            digits.append(self._tokens[digit])
        rest = item.prompt_token_ids[len(digits) :]
        return replace(item, prompt_token_ids=(*digits, *rest))
