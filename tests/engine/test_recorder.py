"""Seconds of steps are those of the device group that runs them."""

from __future__ import annotations

import pytest

from jaxserve.engine.recorder import Recorder
from jaxserve.scheduling.plan import LINK, Handover, Row, StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import Trace

pytestmark = pytest.mark.fast


def test_a_step_takes_the_time_since_the_last_one_of_its_group():
    """Two groups compute at once, one of them a loop of four iterations, and pages go between."""
    scheduler = Trace(0).engine(PRESETS["exegpt_waa_c"]).scheduler
    recorder = Recorder(scheduler.config)
    rows = (Row(0, 0, 0, 1, 1),)
    mixed = [StepPlan(index=i, rows=rows) for i in (0, 3)]
    loop = StepPlan(index=1, rows=rows, num_iterations=4, window_size=1, group=1)
    pages = StepPlan(index=2, num_iterations=0, handovers=(Handover(0, 0, 1, (1,)),), group=LINK)
    for plan in (mixed[0], loop, pages, mixed[1]):
        recorder.step_submitted(plan, scheduler, 1.0, 0.0)
    collected = [(0, 3.0), (2, 4.0), (1, 5.0), (3, 6.0)]
    assert [recorder.step_collected(*each) for each in collected] == [2.0, 3.0, 4.0, 3.0]
    pace = recorder.pace()
    assert pace is not None
    assert (pace.decode_s, pace.prefill_s) == (1.0, pytest.approx(2.0))
