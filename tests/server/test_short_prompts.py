"""On which thread the server makes prompts and submits them, and how threads take turns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.pending import Pending
from jaxserve.runtime import Service
from jaxserve.server import ServerOptions, running
from tests.common.tiers import some
from tests.predictor.tiny import tiny_predictor
from tests.server.serving import CHAT, NAME, post, runtime, server

ON_LOOP = "jaxserve-server"


class Watched:
    """A service that notes the threads on which requests are submitted."""

    def __init__(self, service: Any):
        self._service = service
        self.threads: list[str] = []
        self.tenants: list[str | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def submit(self, *arguments: Any, **options: Any) -> Pending[Completion]:
        self.threads.append(threading.current_thread().name)
        self.tenants.append(next(a for a in arguments if isinstance(a, SamplingParams)).tenant)
        return self._service.submit(*arguments, **options)


@pytest.fixture(scope="module", params=[False, True])
def served(request) -> Iterator[tuple[str, Watched, bool]]:
    with runtime(predictor=tiny_predictor() if request.param else None) as rt:
        watched = Watched(rt)
        options = ServerOptions(model_name=NAME, port=0, log_requests=False)
        with running(cast(Service, watched), options) as url:
            yield url, watched, request.param


@pytest.mark.parametrize(
    ("path", "body"),
    some(
        [
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": CHAT}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
            ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
        ],
        0,
        1,
        3,
    ),
)
def test_short_prompts_need_no_thread(served, path, body):
    """They are submitted by the event loop itself, unless a prediction is waited for."""
    url, watched, predicts = served
    if path.startswith("/v1/c"):
        body = {**body, "max_tokens": 2}
    assert post(url, path, body).is_success
    assert (watched.threads[-1] == ON_LOOP) is not predicts


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "user": "u" * 5000, "max_tokens": 2},
        {"prompt": "a", "guided_regex": "[ab]", "max_tokens": 2},
        {"prompt": ["a", "b"], "max_tokens": 2},
    ],
)
def test_what_takes_time_has_a_thread(served, body):
    """Long bodies, grammars, and prompts behind the first, which wait for room in the queue."""
    url, watched, _ = served
    assert post(url, "/v1/completions", body).is_success
    assert watched.threads[-1] != ON_LOOP


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "user": "me"}),
        ("/v1/chat/completions", {"messages": CHAT, "user": "me"}),
        ("/v1/responses", {"input": "a", "user": "me", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": CHAT, "metadata": {"user_id": "me"}}),
    ],
)
def test_who_asks_is_the_tenant(served, path, body):
    """A policy can then serve all of them equally; without a name there is no tenant."""
    url, watched, _ = served
    if "max_output_tokens" not in body:
        body = {**body, "max_tokens": 2}
    for given, tenant in ((body, "me"), ({k: v for k, v in body.items() if v != "me"}, None)):
        if "metadata" in given and tenant is None:
            given = {**given, "metadata": {}}
        assert post(url, path, given).is_success
        assert watched.tenants[-1] == tenant


def test_threads_take_turns_sooner_while_a_server_runs():
    """The event loop waits half a millisecond for the interpreter; afterwards it is as before."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        with runtime() as rt:
            with server(rt):
                assert sys.getswitchinterval() == pytest.approx(0.0005)
            assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(before_s)
