"""Seconds of steps are those of the device group that runs them."""

from __future__ import annotations

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.engine.recorder import EngineStats, Recorder
from jaxserve.scheduling.plan import LINK, Handover, Row, StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import Trace

pytestmark = pytest.mark.fast


def test_a_step_takes_the_time_since_the_last_one_of_its_group():
    """Two groups compute at once, one of them a loop of four iterations, and pages go between."""
    scheduler = Trace(0).engine(PRESETS["exegpt_waa_c"]).scheduler
    clock = VirtualClock()
    recorder = Recorder(scheduler.config, EngineStats(clock))
    clock.advance_to(1.0)
    rows = (Row(0, 0, 0, 1, 1),)
    mixed = [StepPlan(index=i, rows=rows) for i in (0, 3)]
    loop = StepPlan(index=1, rows=rows, num_iterations=4, window_size=1, group=1)
    pages = StepPlan(index=2, num_iterations=0, handovers=(Handover(0, 0, 1, (1,)),), group=LINK)
    for plan in (mixed[0], loop, pages, mixed[1]):
        recorder.on_planned(plan, scheduler, is_idle=True)
    seconds = []
    for plan, now_s in ((mixed[0], 3.0), (pages, 4.0), (loop, 5.0), (mixed[1], 6.0)):
        clock.advance_to(now_s)
        recorder.on_collected(plan, is_idle=True)
        seconds.append(recorder.newest_step_s)
    assert seconds == [2.0, 3.0, 4.0, 3.0]
    pace = recorder.pace()
    assert pace is not None
    assert (pace.decode_s, pace.prefill_s) == (1.0, pytest.approx(2.0))
