"""Expected ends of answers, compared with their ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.engine.engine import Engine
from jaxserve.execution.step_cost import FlatCost
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.order import DueFirst
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from tests.scheduling.simulated import certain, engine_of, request_of

# One bucket per length.
BUCKETS = LengthBuckets.equal_width(100, 100)


# Without sequences that go before others later, which an expectation does not know of.
BY_ARRIVAL = replace(PRESETS["auto"], order=DueFirst())


def _engine(
    *, num_pages: int, max_slots: int = 8, policy: Policy = PRESETS["auto"]
) -> tuple[Engine, VirtualClock]:
    clock = VirtualClock()
    config = EngineConfig(
        page_size=4,
        num_pages=1 + num_pages,
        max_slots=max_slots,
        max_context=128,
        max_step_tokens=64,
        max_decode_iterations=1,
    )
    return engine_of(policy, config, clock, cost=FlatCost(per_token_s=0.0)), clock


def _request(name: str, length: int, *, is_predicted: bool = True, num: int = 1) -> Request:
    known = certain(length, BUCKETS) if is_predicted else None
    params = dict(max_tokens=None, forced_length=length, n=num, temperature=float(num > 1))
    return request_of(name, prediction=known, **params)


@pytest.mark.parametrize(
    "sizes, within",
    [
        ({"num_pages": 400, "policy": BY_ARRIVAL}, 0.1),
        ({"num_pages": 400, "max_slots": 3}, 0.1),
        # The memory of others at the time of a free slot is known only on average.
        ({"num_pages": 60}, 0.2),
        # What would end last goes first at some time, and the others wait for it.
        ({"num_pages": 400}, 0.3),
    ],
)
def test_ends_are_as_expected_where_lengths_are(sizes, within):
    """All run at once, or wait for slots or memory; ends agree by the total time."""
    engine, clock = _engine(**sizes)
    rng = np.random.default_rng(0)
    lengths = {f"r{i}": int(length) for i, length in enumerate(rng.integers(5, 100, 24))}
    for name, length in lengths.items():
        engine.add(_request(name, length))
    assert engine.outlook()["r0"].ends_in_s is None
    for _ in range(4):
        engine.step()
    begin_s, expected = clock.now(), engine.outlook()
    running = {sequence.request.id for sequence in engine.scheduler.running}
    assert {name for name, each in expected.items() if each.begins_in_s == 0.0} == running
    ended_s = {}
    while engine.has_work:
        for news in engine.step():
            if news.sequence.finish_reason:
                ended_s[news.sequence.request.id] = clock.now() - begin_s
    assert ended_s.keys() >= expected.keys()
    last = max(ended_s.values())
    for name, each in expected.items():
        assert abs(each.ends_in_s - ended_s[name]) < within * last, name
    assert sum(each.num_tokens for each in expected.values()) <= sum(lengths.values())


def test_samples_count_together_and_the_unknown_to_its_limit():
    """Both of two samples count; without a prediction the length is the rest of the context."""
    engine, _ = _engine(num_pages=400)
    engine.add(_request("two", 30, num=2))
    engine.add(_request("unknown", 30, is_predicted=False))
    outlook = engine.outlook()
    assert outlook["two"].num_tokens == 60
    assert outlook["unknown"].num_tokens == 128 - 3
