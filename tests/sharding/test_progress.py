"""Processes that keep others waiting inside a collective are found, and named."""

from __future__ import annotations

import pytest

from jaxserve.sharding.processes import Timeouts
from jaxserve.sharding.progress import Progress, StepCounts, describe_behind
from tests.common.process_groups import connected

pytestmark = pytest.mark.fast


def test_a_step_waits_from_the_end_of_the_one_before():
    """Two steps are in flight; the second one has the devices after the first."""
    now, ended = [0.0], set()
    progress = Progress(clock=lambda: now[0])
    for number in (1, 2):
        with progress.step() as step:
            step.submitted(lambda number=number: number in ended)
    now[0] = 9.0
    assert (progress.waiting_s(), progress.counts()) == (9.0, StepCounts(2, 0))
    ended.add(1)
    assert (progress.waiting_s(), progress.counts()) == (0.0, StepCounts(2, 1))
    now[0] = 12.0
    assert progress.waiting_s() == 3.0
    ended.add(2)
    assert (progress.waiting_s(), progress.counts()) == (0.0, StepCounts(2, 2))


def test_a_step_that_is_being_submitted_counts():
    """A program may hang there; one that fails, or has nothing for these devices, has ended."""
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    with progress.step():
        now[0] = 5.0
        assert (progress.waiting_s(), progress.counts()) == (5.0, StepCounts(1, 0))
    assert (progress.waiting_s(), progress.counts()) == (0.0, StepCounts(1, 1))
    with pytest.raises(ValueError), progress.step():
        raise ValueError
    assert progress.counts() == StepCounts(2, 2)

    def failed() -> bool:
        raise RuntimeError("the array has been deleted")

    with progress.step() as step:
        step.submitted(failed)
    assert progress.counts() == StepCounts(3, 3)


@pytest.mark.parametrize(
    ("counts", "wanted"),
    [
        ({0: (7, 6), 2: (7, 6)}, "p1 did not answer"),
        ({0: (7, 6), 1: (6, 6), 2: (7, 6)}, "p1 began 6 steps, and others 7"),
        ({0: (7, 7), 1: (7, 6), 2: (7, 6)}, "the devices of p1 and p2 have not ended the step"),
        ({0: (7, 6), 1: (7, 6), 2: (7, 6)}, "the devices of all processes are inside the step"),
    ],
)
def test_who_is_behind(counts, wanted):
    """It does not answer, begins fewer steps, or ends fewer; or none is."""
    given = {each: StepCounts(*pair) for each, pair in counts.items()}
    assert describe_behind(given, "p{}".format, 3).startswith(wanted)


def test_the_leader_asks_every_process():
    """Each answers from a thread of its own, also while its program hangs in a step."""
    leader, follower = connected()
    with leader.step() as step:
        step.submitted(lambda: False)
    with follower.step():
        assert leader.step_counts(30) == {0: StepCounts(1, 0), 1: StepCounts(1, 0)}
    assert leader.step_counts(30) == {0: StepCounts(1, 0), 1: StepCounts(1, 1)}


def test_timeouts_come_from_arguments_then_the_environment():
    """The defaults are those of `Timeouts`; one below a second is refused."""
    environ = {"JAXSERVE_START_TIMEOUT": "7", "JAXSERVE_STEP_TIMEOUT": "8"}
    assert Timeouts.of(environ, start_s=5, heartbeat_s=None) == Timeouts(start_s=5, step_s=8)
    with pytest.raises(ValueError, match="heartbeat timeout of 0 s .* --heartbeat-timeout"):
        Timeouts.of({"JAXSERVE_HEARTBEAT_TIMEOUT": "0"})
