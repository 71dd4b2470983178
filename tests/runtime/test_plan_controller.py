"""The thread that adapts a schedule: it survives a failed search, and every thread may stop it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.core.clock import VirtualClock, WallClock
from jaxserve.core.errors import RuntimeClosedError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.planning.schedules import LatencyBounds, RRAPlanner
from jaxserve.planning.schedules.adaptation import Adaptation
from jaxserve.planning.schedules.observed import AnswerLength
from jaxserve.runtime.planner import PlanController
from jaxserve.runtime.replicas import Replicas
from jaxserve.scheduling.presets import get_policy
from tests.common.waiting import until
from tests.planning.schedules.step_times import CONFIG, like_a_small_model

pytestmark = pytest.mark.fast

PLANNER = RRAPlanner.measured(like_a_small_model(), lambda: CONFIG)
ANSWERS = [AnswerLength(admitted_s=i, num_prompt=20, num_output=8 + i % 9) for i in range(64)]
WAIT_S = 30


@pytest.fixture
def replicas():
    executors: Any = [(SimulatedExecutor(CONFIG, VirtualClock()), None)]
    made = Replicas(executors, get_policy("auto"), WallClock(), RuntimeOptions())
    yield made
    made.close()


def _threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "jaxserve-controller"}


def test_an_engines_thread_may_close(replicas: Replicas):
    """The controller's thread waits for the engine then; it ends when the engine does."""
    controller = PlanController(replicas)
    before = _threads()
    controller.adopt(None, Adaptation(PLANNER, LatencyBounds()))
    [thread] = _threads() - before
    closed = threading.Event()

    def close() -> None:
        controller.put(ANSWERS)
        time.sleep(0.2)  # the controller asks this engine for its running answers
        controller.close()
        closed.set()

    asking = threading.Thread(target=replicas.first.loop.ask, args=(close,), daemon=True)
    asking.start()
    assert closed.wait(WAIT_S)
    replicas.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    with pytest.raises(RuntimeClosedError):
        controller.running()


def test_adaptation_begins_again_after_a_failed_search(
    replicas: Replicas, caplog: pytest.LogCaptureFixture
):
    """Lengths below zero end one adaptation, which is logged; the next one finds a plan."""
    controller = PlanController(replicas)
    try:
        with caplog.at_level(logging.INFO):
            controller.adopt(None, Adaptation(PLANNER, LatencyBounds()))
            controller.put([replace(each, num_prompt=-1) for each in ANSWERS])
            until(lambda: "adapted no more" in caplog.text)
        assert not controller.num_adopted
        controller.adopt(None, Adaptation(PLANNER, LatencyBounds()))
        controller.put(ANSWERS)
        until(lambda: controller.num_adopted == 1)
        assert controller.in_force is not None and controller.in_force.num_lengths == len(ANSWERS)
    finally:
        controller.close()
