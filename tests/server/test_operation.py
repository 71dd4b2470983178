"""Keys, limits, the queue, disconnects, timeouts, metrics and the access log."""

from __future__ import annotations

import ast
import json
import re
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.server import ServerOptions, is_loopback, url_of
from tests.common.compiling import held_back
from tests.common.tiers import some
from tests.common.waiting import until
from tests.server.serving import (
    CHAT,
    NAME,
    client,
    connect,
    metrics,
    num_open,
    post,
    request_of,
    runtime,
    server,
)

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 100, "temperature": 0}


@pytest.fixture(scope="module")
def slow() -> Iterator[Runtime]:
    """A runtime whose long answers take seconds."""
    with runtime(step_s=0.05, max_decode_iterations=1) as rt:
        yield rt


def test_keys_are_needed(slow: Runtime):
    """With keys, a request without one of them is an AuthenticationError; probes need none."""
    with server(slow, api_keys=("first", "second")) as url:
        for key in ("first", "second"):
            with client(url, key) as ai:
                assert ai.models.list().data
        for key in ("third", "firs", "first2"):
            with client(url, key) as ai, pytest.raises(openai.AuthenticationError):
                ai.models.list()
        assert httpx2.get(url + "/v1/models").status_code == 401
        until(slow.is_ready)
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert httpx2.get(url + path).status_code == 200


@pytest.mark.release
def test_ready_is_false_while_it_compiles():
    """Probes get 503 until a first request would not wait; requests are accepted all the time."""
    # No other test has steps of this size, so that they are compiled here.
    options: dict[str, Any] = {"max_slots": 7, "max_step_tokens": 128}
    with runtime(**options):
        pass  # measures the largest steps, which a constructor waits for
    options |= {"warmup": "background"}
    with held_back("mixed_body") as compiling, runtime(**options) as rt, server(rt) as url:
        assert compiling.has_begun.wait(60)
        probed = httpx2.get(url + "/ready")
        assert (probed.status_code, probed.json()["error"]["code"]) == (503, "compiling")
        assert int(probed.headers["retry-after"]) >= 1
        health = httpx2.get(url + "/health")
        assert (health.status_code, health.json()) == (200, {"status": "compiling"})
        with connect(url) as connection:
            connection.sendall(request_of("/v1/completions", {"prompt": "a", "max_tokens": 1}))
            until(lambda: metrics(url)["jaxserve:num_requests_waiting"] == 1)
            compiling.go_on.set()
            until(lambda: httpx2.get(url + "/ready").status_code == 200)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert httpx2.get(url + "/health").json() == {"status": "ready"}


def test_pages_of_allowed_sites(slow: Runtime):
    """Their browsers get leave, without a key, to send one; other sites' browsers do not."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    with server(slow, api_keys=("key",), allowed_origins=("https://a.example",)) as url:
        for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
            leave = httpx2.options(
                f"{url}/v1/chat/completions", headers={"origin": origin, **asked}
            )
            assert (leave.status_code == 200) is allowed
            given = httpx2.get(
                f"{url}/v1/models", headers={"origin": origin, "authorization": "Bearer key"}
            )
            named = given.headers.get("access-control-allow-origin")
            assert named == (origin if allowed else None)
        assert (
            httpx2.get(f"{url}/v1/models", headers={"origin": "https://a.example"}).status_code
            == 401
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"port": 70_000}, "port=70000"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens=-1"),
        ({"header_timeout_s": 0}, "header_timeout_s=0"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s=inf"),
        ({"api_keys": ("a b\n",)}, "API key"),
        ({"metrics_prefix": "a:b"}, "metrics_prefix"),
        ({"allowed_origins": ("example.org/page",)}, "allowed_origins has 'example.org/page'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str):
    with pytest.raises(InvalidConfigError, match=said):
        ServerOptions(model_name=NAME, **options)


def test_loopback():
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "host")] == [False] * 4


def test_urls_of_addresses():
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url_of("::1", 8000) == "http://[::1]:8000"


def test_other_hosts_are_refused(slow: Runtime):
    """A server for this machine refuses requests under a name that a site could have rebound."""
    with server(slow) as url:
        port = url.rpartition(":")[2]
        for host in ("localhost", "LOCALHOST", f"127.0.0.1:{port}", f"[::1]:{port}", "[::1]"):
            assert httpx2.get(url + "/v1/models", headers={"host": host}).status_code == 200
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "::1"):
            refused = httpx2.get(url + "/v1/models", headers={"host": host})
            assert refused.status_code == 421
            assert refused.json()["error"]["code"] == "unknown_host"


def test_disconnect_before_the_first_token_cancels():
    """A client that leaves a stream while its request still waits for a slot ends the request."""
    with runtime(step_s=0.05, max_decode_iterations=1, max_slots=1) as busy, server(busy) as url:
        first = busy.submit("a", SamplingParams(max_tokens=100))
        body = json.dumps({**LONG, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n"
        with connect(url) as connection:
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            until(lambda: len(busy.outlook()) == 2)
        until(lambda: len(busy.outlook()) < 2)
        assert not first.future.done()  # so the other was not run to its end
        first.cancel()
        assert metrics(url)["jaxserve:num_requests_waiting"] == 0


def test_connections_are_bounded(slow: Runtime):
    with server(slow, max_connections=1) as url:
        with httpx2.Client() as first:
            assert first.get(url + "/version").status_code == 200
            assert httpx2.get(url + "/version").status_code == 503
            # The server has yet to see that the refused connection was closed.
            until(lambda: first.get(url + "/version").status_code == 200)


def test_open_files_have_room_for_the_connections(slow: Runtime):
    """A process with a low limit of open files serves as many connections as it allows."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with server(slow, max_connections=400) as url, ExitStack() as connections:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 400
            for _ in range(300):
                last = connections.enter_context(connect(url))
            last.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert last.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("stream", some([False, True], 1))
def test_a_turn_waits_until_its_first_token(slow: Runtime, stream: bool):
    """A turn of a conversation counts as running as soon as it has a token, streamed or not."""
    with server(slow) as url:
        said = {"messages": CHAT, "max_tokens": 30, "conversation_id": f"runs {stream}"}
        with connect(url) as connection:
            connection.sendall(request_of("/v1/chat/completions", {**said, "stream": stream}))
            until(lambda: metrics(url)["jaxserve:num_requests_running"] == 1)
            found = metrics(url)
            assert found["jaxserve:num_requests_waiting"] == 0
            assert found["jaxserve:generation_tokens_total"] > 0  # before its end
        until(lambda: metrics(url)["jaxserve:num_requests_running"] == 0)


@pytest.mark.release
def test_a_conversation_has_one_turn_at_a_time(slow: Runtime):
    """While a turn is being answered, another one is a ConflictError; then it is answered."""
    asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 10, "temperature": 0}
    asked["extra_body"] = {"conversation_id": "busy"}
    with server(slow) as url, client(url) as ai:
        stream: Any = ai.chat.completions.create(**asked, stream=True)
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as caught:
            ai.chat.completions.create(**asked)
        assert (caught.value.type, caught.value.code) == ("conflict_error", "conversation_busy")
        assert len(list(stream)) > 1
        assert ai.chat.completions.create(**asked).choices[0].finish_reason == "length"


def test_a_queue_takes_as_many_as_it_has_room_for(slow: Runtime):
    """Two prompts fill a queue of two, and are answered; three are refused."""
    with server(slow, max_waiting=2) as url:
        body: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 1}
        assert post(url, "/v1/completions", body).status_code == 200
        refused = post(url, "/v1/completions", {**body, "prompt": ["a", "b", "c"]})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", some([False, True]))
def test_request_timeout(slow: Runtime, stream: bool):
    with server(slow, request_timeout_s=0.4) as url, client(url) as ai:
        with pytest.raises(openai.APIError, match=r"after 0\.4 s"):
            made: Any = ai.completions.create(model=NAME, prompt="a", max_tokens=100, stream=stream)
            list(made)
        until(lambda: not slow.outlook())


@pytest.mark.release
def test_late_heads_and_bodies(slow: Runtime):
    """A connection whose head does not come is closed, and a body that does not come is 408."""
    with server(slow, header_timeout_s=0.3, body_timeout_s=0.3) as url:
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"):
            with connect(url) as connection:
                connection.sendall(sent)
                assert connection.recv(100) == b""
        with connect(url) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
            connection.sendall(b"content-length: 100\r\n\r\n{")
            assert connection.recv(100).startswith(b"HTTP/1.1 408")
        assert post(url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_header_floods_are_refused(slow: Runtime):
    with server(slow) as url:
        with connect(url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n" + b"x-a: " + b"y" * 100_000)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
        assert httpx2.get(url + "/health").status_code == 200


@pytest.mark.release
def test_drain_drops_nothing(slow: Runtime):
    """From the end's beginning new requests get 503, and accepted ones their whole answers."""
    answers: list[Any] = []
    with server(slow) as url:
        ended = threading.Event()

        def ask() -> None:
            answers.append(post(url, "/v1/completions", {**LONG, "max_tokens": 30}))
            ended.set()

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: metrics(url)["jaxserve:num_requests_running"] == 1)
    thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 30
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url + "/health")


def test_metrics(slow: Runtime):
    """Metrics have vLLM's names, counts and sums of the requests, and the engine's counters."""
    with server(slow, metrics_prefix="vllm") as url:
        post(url, "/v1/completions", {"prompt": "abc", "max_tokens": 4, "n": 2})
        post(url, "/v1/completions", {"prompt": "abcd", "max_tokens": 4, "stream": True})
        found = metrics(url)
    assert found["vllm:prompt_tokens_total"] == 7
    assert found["vllm:generation_tokens_total"] == 12
    assert found["vllm:request_success_total['length']"] == 2
    assert found["vllm:num_requests_waiting"] == found["vllm:num_requests_running"] == 0
    assert 0 <= found["vllm:kv_cache_usage_perc"] <= 1
    assert found["vllm:inter_token_latency_seconds_count"] == 9
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert found[f"vllm:{name}_seconds_count"] == 2
    assert found["vllm:engine_steps_total"] > 0
    assert found["vllm:prefix_cache_tier_hits_total['device']"] >= 0
    states = ("owned", "reserved", "cached", "free")
    assert sum(found[f"vllm:kv_pages{sorted(['device', state])}"] for state in states) > 0


@pytest.mark.parametrize("kind", ["completion", "turn"])
def test_tokens_of_aborted_answers_are_counted(slow: Runtime, kind: str):
    """They count by step, as in vLLM, so also where the client leaves; and so does the prompt."""
    with server(slow) as url, client(url) as ai:
        if kind == "turn":
            said = [{"role": "user", "content": "a"}]
            assert slow.tokenizer is not None
            num_prompt = len(slow.tokenizer.apply_chat_template(said))
            body = {"model": NAME, "messages": said, "stream": True, "max_tokens": 100}
            chat = ai.chat.completions.create(**body, extra_body={"conversation_id": "a"})
            with chat as chunks:
                texts = (next(chunks).choices[0].delta.content for _ in range(4))
                shown = "".join(text or "" for text in texts)
        else:
            num_prompt = 1
            with ai.completions.create(model=NAME, stream=True, **LONG) as pieces:
                shown = "".join(next(pieces).choices[0].text for _ in range(3))
        until(lambda: not num_open(url))
        found = metrics(url)
    assert found["jaxserve:request_success_total['abort']"] == 1
    assert found["jaxserve:prompt_tokens_total"] == num_prompt
    assert len(shown) <= found["jaxserve:generation_tokens_total"] < LONG["max_tokens"]
    assert found["jaxserve:request_generation_tokens_count"] == 0


@pytest.mark.release
def test_bounds_are_counted(slow: Runtime):
    """Each bound counts as kept, missed, or refused; a request without one does not count.

    On an idle engine no time per token is refused, and one that cannot be kept is missed.
    """
    with server(slow) as url:
        for bounds in (
            {},
            {"latency_bound": 1000, "token_bound": 1e-6},
            {"first_token_bound": 1000},
        ):
            body = {"prompt": "a", "max_tokens": 2, **bounds}
            assert post(url, "/v1/completions", body).status_code == 200
        with ThreadPoolExecutor() as pool:
            running = pool.submit(post, url, "/v1/completions", LONG)
            until(lambda: metrics(url)["jaxserve:num_requests_running"] == 1)
            body = {"prompt": "a", "max_tokens": 2, "token_bound": 1e-6}
            assert post(url, "/v1/completions", body).status_code == 503
            running.result()
        found = metrics(url)
    counted = {
        tuple(sorted(ast.literal_eval(name.removeprefix("jaxserve:latency_bounds_total")))): value
        for name, value in found.items()
        if name.startswith("jaxserve:latency_bounds_total") and value
    }
    assert counted == {
        ("kept", "latency"): 1,
        ("missed", "token"): 1,
        ("first_token", "kept"): 1,
        ("refused", "token"): 1,
    }
    stats = slow.stats()
    assert stats.num_bounds_kept == (1, 1, 0) and stats.num_bounds_missed == (0, 0, 1)
    assert stats.num_bounds_refused == (0, 0, 1)
    assert slow.report().figures()["latency_bounds"]["token_bound"] == {
        "kept": 0,
        "missed": 1,
        "refused": 1,
    }


def test_dashboard_reads_metrics_that_exist(slow: Runtime):
    """Every metric in the Grafana dashboard is one that the server has."""
    text = (Path(__file__).parents[2] / "docs" / "grafana_dashboard.json").read_text()
    named = {name for panel in json.loads(text)["panels"] for name in _named(panel)}
    with server(slow) as url:
        post(url, "/v1/completions", {"prompt": "abc", "max_tokens": 4})
        found = {name.partition("[")[0] for name in metrics(url)}
    # Those of the schedule in force, which the policies that plan have.
    planned = {f"jaxserve:schedule_{what}_seconds" for what in ("bound", "expected")}
    assert planned < named <= found | planned


def _named(panel: dict[str, Any]) -> list[str]:
    return [n for t in panel["targets"] for n in re.findall(r"jaxserve:\w+", t["expr"])]


@pytest.mark.release
def test_access_log(slow: Runtime, capsys: pytest.CaptureFixture[str]):
    """A line of JSON tells of each request, without its prompt unless that is asked for."""
    body = {"prompt": "secret", "max_tokens": 1}
    for log_prompts in (False, True):
        with server(slow, log_requests=True, log_prompts=log_prompts) as url:
            post(url, "/v1/completions", {**body, "user": "me"}, **{"x-request-id": "mine"})
            httpx2.get(url + "/health")
        (line,) = capsys.readouterr().out.splitlines()
        told = json.loads(line)
        assert (told["path"], told["status"], told["request_id"]) == (
            "/v1/completions",
            200,
            "mine",
        )
        assert (told["user"], told["prompt_tokens"], told["completion_tokens"]) == ("me", 6, 1)
        assert ("secret" in line) == log_prompts


def test_request_id_is_returned(slow: Runtime):
    """Every answer has an id, the client's own if it sent one."""
    with server(slow) as url:
        mine = httpx2.get(url + "/v1/models", headers={"x-request-id": "abc"})
        assert mine.headers["x-request-id"] == "abc"
        assert httpx2.get(url + "/v1/models").headers["x-request-id"].startswith("req-")
