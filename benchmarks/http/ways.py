"""The ways in which requests reach a model: in process, over our HTTP API, over OpenAI's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.common.processes import PeerError
from benchmarks.http.load import Seen, send
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

# Answers requests that arrive at given seconds.
Way = Callable[[Sequence[WorkloadItem], Sequence[float]], list[Seen]]


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
    """Return the way over a server's `/v1/completions`.

    Args:
      fields: that each body has in addition.
    """

    def answer(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[Seen]:
        bodies = [
            {
                "model": model,
                "prompt": list(map(int, item.prompt_token_ids)),
                **_params(item),
                "stream": True,
                "stream_options": {"include_usage": True},
                **(fields or {}),
            }
            for item in items
        ]
        return _checked(send(url, bodies, arrivals_s, "/v1/completions"), items)

    return answer


def _generate(url: str) -> Way:
    def answer(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[Seen]:
        bodies = [
            {
                "token_ids": list(map(int, item.prompt_token_ids)),
                "sampling_params": _params(item),
                "stream": True,
            }
            for item in items
        ]
        return _checked(send(url, bodies, arrivals_s), items)

    return answer


def _in_process(rt: Runtime) -> Way:
    def answer(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[Seen]:
        """Submit each request at its time, on this thread."""
        begun_s = time.perf_counter() + 0.1
        seen = [Seen([], 0, 0.0) for _ in items]
        ended = threading.Semaphore(0)

        def sink(one: Seen, at_s: float) -> Callable[[Piece], None]:
            def take(piece: Piece) -> None:
                now_s = time.perf_counter() - at_s
                if piece.token_ids:
                    one.times_s.append(now_s)
                    one.num_tokens += len(piece.token_ids)
                if piece.finish_reason is not None:
                    one.end_s = now_s
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
    def answer(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[Seen]:
        # A step that was submitted ahead may still compute for answers that have ended.
        rt.generate([1], SamplingParams(max_tokens=1), progress=False)
        rt.forget_kept_pages()
        return way(items, arrivals_s)

    return answer


def _checked(seen: list[Seen], items: Sequence[WorkloadItem]) -> list[Seen]:
    """Return what came, if all answers are as long as was asked for."""
    for i, (one, item) in enumerate(zip(seen, items, strict=True)):
        if one.num_tokens != item.num_output_tokens:
            raise PeerError(
                f"answer {i} has {one.num_tokens} tokens in place of {item.num_output_tokens}"
            )
        if not one.times_s:
            raise PeerError(f"answer {i} has no text, so its first token has no time")
    return seen
