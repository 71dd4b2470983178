"""Clients that leave at any stage, bodies without an end, and thousands of requests that wait."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import pytest

from jaxserve import Runtime
from jaxserve.execution.executor import StepHandle
from jaxserve.scheduling.plan import StepPlan
from jaxserve.server import ServerOptions, listen
from jaxserve.testing import OPTIONS, ExecutorWrapper, letter_tokenizer, tiny_llama
from tests.common.tiers import some
from tests.common.waiting import until
from tests.server.serving import NAME, connect, metrics, num_open, post, request_of, runtime, server

BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 100, "stream": True}
# Bytes of a request after which its client is gone, and what it has received by then.
STAGES = ["connected", "in the head", "in the body", "asked", "streaming", "half closed"]


@pytest.fixture(scope="module")
def slow() -> Iterator[Runtime]:
    """A runtime whose long answers take seconds."""
    with runtime(step_s=0.02, max_decode_iterations=1) as rt:
        yield rt


@pytest.fixture(scope="module")
def url(slow: Runtime) -> Iterator[str]:
    with server(slow, max_waiting=20_000) as url:
        yield url


class _Held(ExecutorWrapper):
    """Holds back the steps of an answer after the first few, until it is told to go on."""

    NUM_FREE = 6

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.num_submitted = 0
        self.go_on = threading.Event()

    def submit(self, plan: StepPlan) -> StepHandle:
        self.num_submitted += 1
        if self.num_submitted > self.NUM_FREE:
            assert self.go_on.wait(60)
        return self.inner.submit(plan)


@pytest.mark.parametrize("stream", some([False, True]))
def test_no_step_follows_a_client_that_has_left(stream: bool):
    """When the server has noticed it, the step that was planned already is the last one."""
    made: list[_Held] = []

    def hold(inner: Any) -> _Held:
        made.append(_Held(inner))
        return made[-1]

    options: dict[str, Any] = {**OPTIONS, "max_decode_iterations": 1}
    with (
        Runtime(tiny_llama(), tokenizer=letter_tokenizer(), wrap_executor=hold, **options) as rt,
        server(rt) as url,
    ):
        (held,) = made
        assert held.num_submitted == 0
        with connect(url) as leaving:
            leaving.sendall(request_of("/v1/completions", {**BODY, "stream": stream}))
            until(lambda: held.num_submitted > held.NUM_FREE)
            assert num_open(url) == 1
        until(lambda: not num_open(url))  # the server has noticed that it left
        held.go_on.set()
        until(lambda: not rt.outlook())
        assert held.num_submitted == held.NUM_FREE + 1  # of 100 that the answer takes
        assert metrics(url)["jaxserve:request_success_total['abort']"] == 1


@pytest.mark.parametrize("is_reset", some([False, True]))
@pytest.mark.parametrize("stage", some(STAGES, 0, 2, 4))
def test_clients_may_leave_at_any_stage(slow: Runtime, url: str, stage: str, is_reset: bool):
    """Whether it closes or resets the connection, nothing of the request is left."""
    sent = request_of("/v1/completions", BODY)
    num_sent = {"connected": 0, "in the head": 30, "in the body": len(sent) - 5}
    with connect(url) as leaving:
        leaving.sendall(sent[: num_sent.get(stage, len(sent))])
        if stage in ("streaming", "half closed"):
            received = b""
            while b"data:" not in received:
                part = leaving.recv(1000)
                assert part, f"the connection ended after {received!r}"
                received += part
        if stage == "half closed":
            leaving.shutdown(socket.SHUT_WR)
            until(lambda: not slow.outlook())
        if is_reset:
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    until(lambda: not slow.outlook() and not num_open(url))
    slow.check_integrity()
    assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).is_success


def test_dead_connections_are_noticed():
    """Connections are probed, so that a client without a network is known to be gone."""
    listener = listen(ServerOptions(model_name=NAME, port=0))
    address = listener.getsockname()
    with listener, socket.create_connection(address), listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        every_s = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        count = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
    assert idle_s + every_s * count <= 60


@pytest.mark.parametrize("is_announced", [False, True])
def test_bodies_of_100_mb(url: str, is_announced: bool):
    """They are refused before they are received, and others are answered."""
    length = b"content-length: 104857600" if is_announced else b"transfer-encoding: chunked"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    part = b"x" * (1 << 20)
    chunk = part if is_announced else b"100000\r\n" + part + b"\r\n"
    num_sent = 0
    with connect(url) as large:
        large.sendall(head + length + b"\r\n\r\n")
        with suppress(ConnectionError):
            for _ in range(100):
                large.sendall(chunk)
                num_sent += len(part)
                large.setblocking(False)
                with suppress(BlockingIOError):
                    assert large.recv(12) == b"HTTP/1.1 413"
                    break
                large.settimeout(20)
    assert num_sent < 60 << 20
    assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).is_success


def test_large_bodies_that_do_not_end(slow: Runtime):
    """Beyond 64 of the largest ones another is 503; small ones are read, and later large ones."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
    with server(slow, max_body_bytes=100_000) as url:
        with ExitStack() as clients:
            sent = [clients.enter_context(connect(url)) for _ in range(66)]
            for large in sent:
                large.sendall(head + b" " * 99_000)
            refused, _, _ = select.select(sent, [], [], 20)
            answer = ""
            while "bodies_busy" not in answer:
                part = refused[0].recv(4096)
                assert part, f"the connection ended after {answer!r}"
                answer += part.decode()
            assert answer.startswith("HTTP/1.1 503")
            assert "retry-after: 1\r\n" in answer and "x-should-retry: true\r\n" in answer
            assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).is_success
        large = json.dumps({"prompt": "a", "max_tokens": 1}).encode().ljust(99_000)
        until(lambda: post(url, "/v1/completions", large).is_success)


@pytest.mark.release
def test_ten_thousand_wait(slow: Runtime, url: str):
    """They are accepted, one more than the limit is 429, and when their clients leave all end."""
    sent = request_of("/v1/completions", {**BODY, "prompt": ["a"] * 128})
    with ExitStack() as clients:
        for _ in range(79):
            clients.enter_context(connect(url)).sendall(sent)
        until(lambda: num_open(url) >= 10_000, 60)
        assert httpx2.get(url + "/health").is_success
        with server(slow, max_waiting=1) as strict:
            answers = [post(strict, "/v1/completions", {"prompt": ["a"] * 2}) for _ in range(2)]
            assert {answer.status_code for answer in answers} == {429}
    until(lambda: not slow.outlook() and not num_open(url), 60)
    slow.check_integrity()
    assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).is_success


@pytest.mark.release
def test_every_accepted_request_ends_under_load(slow: Runtime):
    """With a short queue and clients that come and go, each one gets an answer or a typed error."""
    answers: list[httpx2.Response] = []

    def ask(url: str, number: int) -> None:
        body = {"prompt": "a" * (1 + number % 9), "max_tokens": 1 + number % 7}
        answers.append(post(url, "/v1/completions", {**body, "stream": bool(number % 2)}))

    with server(slow, max_waiting=6) as url:
        threads = [threading.Thread(target=ask, args=(url, number)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(answers) == 40
    for answer in answers:
        assert answer.status_code in (200, 429)
        if answer.status_code == 429:
            assert json.loads(answer.text)["error"]["code"] == "queue_full"
        else:
            assert "length" in answer.text
