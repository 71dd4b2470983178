"""A streamed request's way through the service, while its prompts take time to make."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import JaxserveError, PromptTooLongError
from jaxserve.runtime import Service
from jaxserve.server import ServerOptions
from jaxserve.server.backend import Backend
from jaxserve.server.errors import RefusedError
from jaxserve.server.exchange import Exchange, Group, Job
from tests.server.serving import NAME

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def _backend(rt: Runtime, request_timeout_s: float | None = None) -> Backend:
    options = ServerOptions(model_name=NAME, request_timeout_s=request_timeout_s)
    backend = Backend(options)
    backend.serve(rt, 128)
    return backend


def test_a_stream_has_its_status_while_its_prompt_is_made(rt: Runtime):
    """The time that a prompt or a grammar takes counts, and the pieces come afterwards."""

    async def read() -> list[Group]:
        go_on, found = threading.Event(), []

        def make_jobs(_: Service) -> Sequence[Job]:
            assert go_on.wait(20)
            return [Job([1, 2], PARAMS)]

        exchange = Exchange(_backend(rt), "slow", status_s=0.01)
        async for group in exchange.stream(make_jobs):
            found.append(group)
            go_on.set()
        return found

    first, *others = asyncio.run(read())
    assert first == []
    assert sum(len(piece.token_ids) for group in others for _, piece in group) == 3


@pytest.mark.parametrize("has_status", [False, True])
def test_errors_of_prompts_come_from_the_stream(rt: Runtime, has_status: bool):
    """They are raised before any group, or behind the one that sent the status."""

    async def read() -> list[Group]:
        go_on, found = threading.Event(), []

        def make_jobs(_: Service) -> Sequence[Job]:
            assert go_on.wait(20)
            raise PromptTooLongError("it is too long")

        if not has_status:
            go_on.set()
        exchange = Exchange(_backend(rt), "wrong", status_s=0.01 if has_status else 20)
        with pytest.raises(PromptTooLongError):
            async for group in exchange.stream(make_jobs):
                found.append(group)
                go_on.set()
        return found

    assert asyncio.run(read()) == [[]] * has_status


def test_a_stream_times_out_while_its_prompt_is_made(rt: Runtime):
    """The error does not wait for the prompt, and nothing is open afterwards."""

    async def read() -> tuple[JaxserveError, int]:
        go_on, backend = threading.Event(), _backend(rt, request_timeout_s=0.01)

        def make_jobs(_: Service) -> Sequence[Job]:
            assert go_on.wait(20)
            return [Job([1, 2], PARAMS)]

        with pytest.raises(RefusedError, match=r"after 0\.01 s") as caught:
            async for _ in Exchange(backend, "late", status_s=20).stream(make_jobs):
                pass
        go_on.set()
        return caught.value, backend.num_waiting + backend.num_running

    error, num_open = asyncio.run(read())
    assert isinstance(error, RefusedError) and error.kind.status == 504
    assert num_open == 0
