"""What a runtime logs unasked."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import Runtime
from jaxserve.core.clock import WallClock
from jaxserve.engine.recorder import EngineStats
from jaxserve.runtime.status import StatusLog
from jaxserve.testing.tiny import OPTIONS, tiny_llama

NAME = "jaxserve.runtime.status"


def test_a_start_says_what_is_served(caplog):
    """The model, its device, and how much fits."""
    with caplog.at_level(logging.INFO, NAME), Runtime(tiny_llama(), **OPTIONS) as rt:
        model, devices, memory = (each.getMessage() for each in caplog.records)
        tokens = rt.stats().num_pages * rt.stats().page_size
    assert model.startswith("model: Llama, 2 layers, ") and model.endswith("in float32")
    assert devices == "devices: 1 x cpu in 1 replica(s)"
    assert f" of {tokens:,} tokens: {tokens // 1000} requests of 1,000" in memory
    assert memory.endswith("at most 4 run at once")


def _replicas(stats: EngineStats) -> Any:
    usage = SimpleNamespace(num_usable=40, num_owned=10)
    scheduler = SimpleNamespace(running=[1, 2], num_waiting=3, page_usage=lambda: usage)
    return SimpleNamespace(
        all=[SimpleNamespace(engine=SimpleNamespace(stats=stats, scheduler=scheduler))]
    )


@pytest.mark.fast
def test_a_line_for_every_period_of_work(caplog):
    """It has rates since the line before; there is none while nothing is computed."""
    stats = EngineStats(WallClock())
    with caplog.at_level(logging.INFO, NAME):
        log = StatusLog(_replicas(stats), period_s=0.05)
        time.sleep(0.2)
        assert not caplog.records
        stats.num_tokens, stats.num_prefix_queried, stats.num_prefix_hit = 100, 8, 2
        stats.num_preemptions = 5
        for _ in range(200):
            if caplog.records:
                break
            time.sleep(0.05)
        log.close()
    (line,) = [each.getMessage() for each in caplog.records]
    rate, rest = line.split(" tokens/s, ")
    assert 0 < int(rate) <= 2000
    wanted = "2 running, 3 waiting, 25% of pages in use, 25% of prompt tokens cached, 5 preempted"
    assert rest == wanted


@pytest.mark.fast
def test_no_thread_where_nobody_reads(caplog):
    """As in a program that has set up no log."""
    with caplog.at_level(logging.WARNING, NAME):
        log = StatusLog(_replicas(EngineStats(WallClock())), period_s=0.01)
        time.sleep(0.05)
        log.close()
    assert not caplog.records
