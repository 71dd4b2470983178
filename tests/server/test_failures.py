"""What clients see when the engine fails, when they read slowly, and when thousands wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import httpx2
import openai
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import EngineFailedError, ReplicaDiedError
from jaxserve.core.request import Completion
from jaxserve.engine.answers import Piece
from jaxserve.engine.pending import Pending
from jaxserve.runtime import RuntimeStats, Service
from jaxserve.server import ServerOptions
from jaxserve.server.backend import Backend
from jaxserve.server.exchange import Exchange, Job, merged
from jaxserve.testing import OPTIONS, ExecutorWrapper, FaultyExecutor, letter_tokenizer, tiny_llama
from tests.common.tiers import some
from tests.server.serving import CHAT, NAME, client, connect, post, request_of, runtime, server


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with runtime(max_decode_iterations=1) as rt:
        yield rt


@contextmanager
def _faulty(wrap: Callable[[Any], Any] | None = None) -> Iterator[Runtime]:
    """Yield a runtime whose engine fails after a few steps, or whose executor is wrapped."""
    with Runtime(
        tiny_llama(),
        tokenizer=letter_tokenizer(),
        wrap_executor=wrap or (lambda executor: FaultyExecutor(executor, raises_at=6)),
        **{**OPTIONS, "max_decode_iterations": 1},
    ) as rt:
        yield rt


@pytest.mark.parametrize("stream", some([False, True], 1))
def test_failed_engine(stream: bool):
    """Open requests end with a server error, and from then on /health and /ready say so."""
    with _faulty() as rt, server(rt) as url, client(url) as ai:
        assert httpx2.get(url + "/health").status_code == 200
        with pytest.raises(openai.APIError, match="engine stopped"):
            made: Any = ai.completions.create(model=NAME, prompt="a", max_tokens=50, stream=stream)
            list(made)
        assert httpx2.get(url + "/health").status_code == 500
        with pytest.raises(openai.InternalServerError):
            ai.completions.create(model=NAME, prompt="a")
        assert httpx2.get(url + "/ready").json()["error"]["code"] == "failed"


@pytest.mark.parametrize("by", some(["turn", "stream of a turn", "submit"]))
def test_failed_engine_is_known_to_health(by: str):
    """A failure that a turn meets, or that was before a request came, is the server's, too."""
    with _faulty() as rt, server(rt) as url:
        if by == "submit":
            with pytest.raises(EngineFailedError):
                rt.generate("a", SamplingParams(max_tokens=50))
            assert httpx2.get(url + "/health").status_code == 200  # no request has failed yet
            assert post(url, "/v1/completions", {"prompt": "a"}).status_code == 500
        else:
            asked: Any = {"messages": CHAT, "conversation_id": "c", "max_tokens": 50}
            post(url, "/v1/chat/completions", {**asked, "stream": by != "turn"})
        assert httpx2.get(url + "/health").status_code == 500


def test_a_step_without_memory_fails_its_own_requests():
    """They get 503 and may come again; the engine goes on, and so does the server."""
    with (
        _faulty(lambda executor: FaultyExecutor(executor, out_of_memory_every=6)) as rt,
        server(rt) as url,
    ):
        refused = post(url, "/v1/completions", {"prompt": "a", "max_tokens": 50})
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
        assert refused.json()["error"]["code"] == "step_memory"
        assert httpx2.get(url + "/health").status_code == 200
        assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 2}).is_success


class _CannotReset(ExecutorWrapper):
    """Has no memory for a step, and cannot go on after that, as with stages."""

    def __init__(self, inner: Any):
        super().__init__(FaultyExecutor(inner, out_of_memory_every=6))

    def reset(self) -> bool:
        return False


def test_an_engine_without_memory_has_failed():
    with _faulty(_CannotReset) as rt, server(rt) as url:
        refused = post(url, "/v1/completions", {"prompt": "a", "max_tokens": 50})
        assert refused.status_code == 500 and "out of memory" in refused.text
        assert httpx2.get(url + "/health").status_code == 500


def test_fleet_goes_on_after_a_failed_request():
    """For a service that recovers, a failed engine is the failure of one request."""

    class Recovering:
        recovers = True

    async def phase_after_failure(service: Any) -> str:
        backend = Backend(ServerOptions(model_name=NAME))
        backend.serve(service, 128)
        backend.fail_if_over(EngineFailedError("the fleet could not answer"))
        return backend.phase

    assert asyncio.run(phase_after_failure(Recovering())) == "ready"


def test_metrics_do_not_wait_for_a_replica():
    """While no replica of a fleet serves, metrics have the numbers of the server alone."""

    class Restarting:
        def stats(self, *, wait: bool = True) -> RuntimeStats:
            assert not wait
            raise ReplicaDiedError("no replica serves now")

    async def metrics_of(service: Any) -> str:
        backend = Backend(ServerOptions(model_name=NAME))
        backend.serve(service, 128)
        return backend.metrics.exposition().decode()

    told = asyncio.run(metrics_of(Restarting()))
    assert "num_requests_waiting" in told and "engine_steps" not in told


def test_disconnect_while_prompts_are_submitted(rt: Runtime):
    """A client that leaves while its prompts are submitted leaves none of them running."""
    submitted: list[Pending[Completion]] = []

    class Watched:
        """The runtime, whose first request is submitted just before the client leaves."""

        def submit(self, *arguments: Any, **options: Any) -> Pending[Completion]:
            exchange.close()
            submitted.append(rt.submit(*arguments, **options))
            return submitted[-1]

    def jobs(_: Service) -> list[Job]:
        return [Job([1, 2], SamplingParams(max_tokens=100)) for _ in range(3)]

    async def leave() -> None:
        nonlocal exchange
        backend = Backend(ServerOptions(model_name=NAME))
        backend.serve(cast(Service, Watched()), 128)
        exchange = Exchange(backend, "test")
        await exchange.start(jobs)

    exchange: Any = None
    asyncio.run(leave())
    (pending,) = submitted
    assert len(pending.result(60).token_ids) < 100


def test_slow_reader_holds_up_nobody(rt: Runtime):
    """While a client does not read its stream, others are answered; then it gets all of it."""
    with server(rt) as url:
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 120, "n": 4, "logprobs": 20}
        with connect(url) as slow:
            slow.sendall(request_of("/v1/completions", {**body, "stream": True}))
            for _ in range(3):
                assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 3}).is_success
            while rt.outlook():
                time.sleep(0.01)
            received = b"".join(iter(lambda: slow.recv(65536), b""))
        assert received.count(b'"finish_reason":"length"') == 4
        assert b"data: [DONE]" in received


@pytest.mark.release
def test_a_slow_reader_does_not_prolong_the_drain():
    """A client that does not read has what is left of the limit, and not a limit of its own."""
    schema = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    body = {"prompt": "a", "max_tokens": 40}
    with runtime(step_s=0.02, max_decode_iterations=1) as rt, ExitStack() as served:
        url = served.enter_context(server(rt, drain_timeout_s=2.5))
        with connect(url, receive_buffer=4096) as slow, connect(url) as asking:
            slow.sendall(schema * 200)  # more than the buffers hold
            asking.sendall(request_of("/v1/completions", body))
            while not rt.outlook():
                time.sleep(0.01)
            begun_s = time.monotonic()
            served.close()
            took_s = time.monotonic() - begun_s
            assert b'"completion_tokens":40' in b"".join(iter(lambda: asking.recv(65536), b""))
    assert 2.0 < took_s < 3.2


def test_pieces_of_a_sample_are_joined():
    """Pieces that came together are one event for each sample, without those of a failure."""
    pieces = [
        (0, Piece(text="a", token_ids=(1,))),
        (1, Piece(text="b", token_ids=(2,))),
        (0, Piece(text="c", token_ids=(3,), finish_reason="stop")),
        (1, Piece(text="", token_ids=(), finish_reason="error")),
    ]
    assert merged(pieces) == [
        (0, Piece(text="ac", token_ids=(1, 3), finish_reason="stop")),
        (1, Piece(text="b", token_ids=(2,))),
    ]


def test_errors_say_whether_to_retry(rt: Runtime):
    """Clients that retry on their own are told not to where that cannot help."""
    with server(rt, request_timeout_s=0.001) as url:
        late = post(url, "/v1/completions", {"prompt": "a", "max_tokens": 100})
        assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
