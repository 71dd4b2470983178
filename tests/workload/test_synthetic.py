"""Synthetic traces: one request a second, with the shared prefixes and bursts that they promise."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.synthetic import SYNTHETIC
from jaxserve.workload.traces import Replay, read_trace

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("name", SYNTHETIC)
def test_one_request_a_second(name):
    """Arrivals are in order, one a second; the same seed draws the same, another one another."""
    trace = read_trace(name, num=3000, progress=False)
    times = [request.arrival_s for request in trace.requests]
    assert times == sorted(times) and times[0] == 0
    assert 0.85 < len(times) / times[-1] < 1.15
    assert all(
        request.num_prompt_tokens and request.num_output_tokens for request in trace.requests
    )
    assert trace.requests[:5] == read_trace(name, num=5, progress=False).requests
    assert trace.requests[:5] != read_trace(name, num=5, seed=1, progress=False).requests


def test_bursts_are_burstier_than_chats():
    """The gaps' coefficients of variation are 2 and 1."""
    found = {}
    for name in ("chat", "bursts"):
        times = [each.arrival_s for each in read_trace(name, num=4000, progress=False).requests]
        gaps = [b - a for a, b in pairwise(times)]
        found[name] = np.std(gaps) / np.mean(gaps)
    assert found == {"chat": pytest.approx(1, rel=0.1), "bursts": pytest.approx(2, rel=0.1)}


def test_sessions_share_system_prompts_and_history():
    """There are four beginnings of 1,024 tokens, and a turn is longer than the one before it."""
    trace = read_trace("sessions", num=300, progress=False)
    prompts = [each.prompt_token_ids for each in Replay(trace, max_tokens=9, vocab_size=999).items]
    assert len({prompt[:1024] for prompt in prompts}) == 4
    assert len({prompt[:1088] for prompt in prompts}) > 10
    lengths: dict[str, int] = {}
    for request in trace.requests:
        assert request.num_prompt_tokens > lengths.get(request.session, 1024)
        lengths[request.session] = request.num_prompt_tokens + request.num_output_tokens
    assert len(lengths) < len(trace.requests) / 2


def test_a_synthetic_trace_needs_a_number_and_room():
    """It has no end, and a context that nothing fits into is an error, not a search without one."""
    with pytest.raises(InvalidConfigError, match="chat, which has no end"):
        read_trace("chat")
    with pytest.raises(InvalidConfigError, match="that fits"):
        read_trace("sessions", num=2, max_context=100, progress=False)
