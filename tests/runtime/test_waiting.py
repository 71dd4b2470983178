"""Nothing waits in silence."""

from __future__ import annotations

import logging
import os
import time
import warnings

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.testing.tiny import OPTIONS, tiny_llama

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def rt():
    with Runtime(tiny_llama(), **OPTIONS) as runtime:
        yield runtime


def _said(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if "requests wait" in each.getMessage()]


@pytest.mark.parametrize(
    ("stop", "go_on", "said"),
    [
        ("pause", "resume", "is paused, until rt.resume"),
        pytest.param("sleep", "wake_up", "is asleep, until rt.wake", marks=pytest.mark.release),
    ],
)
def test_requests_of_a_runtime_that_rests(rt, caplog, stop, go_on, said):
    """A line after a second, once a pause; the requests are answered afterwards."""
    with caplog.at_level(logging.WARNING, "jaxserve"):
        getattr(rt, stop)()
        pending = [rt.submit([1, 2, 3], PARAMS) for _ in range(2)]
        time.sleep(0.3)
        assert not _said(caplog)
        time.sleep(1.5)
        getattr(rt, go_on)()
        assert all(len(one.result().token_ids) == 4 for one in pending)
        (line,) = _said(caplog)
        assert said in line
        # One that is woken up within a second says nothing.
        getattr(rt, stop)()
        one = rt.submit([1, 2, 3], PARAMS)
        getattr(rt, go_on)()
        one.result()
        time.sleep(1.2)
    assert len(_said(caplog)) == 1


def test_a_forked_child_is_refused(rt):
    """It has none of the threads that answer."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of forks, rightly
        child = os.fork()
    if not child:
        try:
            rt.generate([1, 2, 3], PARAMS)
        except RuntimeClosedError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    assert b"belongs to the process that made it" in os.read(reads, 1000)
    os.close(reads)
    assert len(rt.generate([1, 2, 3], PARAMS).token_ids) == 4
