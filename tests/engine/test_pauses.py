"""Pauses of a loop, with work that does nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import pytest

from jaxserve.core.clock import WallClock
from jaxserve.core.errors import EngineBusyError, EngineFailedError, JaxserveError
from jaxserve.engine.loop import EngineBase, EngineLoop

pytestmark = pytest.mark.fast

WAIT_S = 10


class _Nothing(EngineBase[str]):
    """There is never anything to do."""

    has_work = False

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.failed: list[tuple[JaxserveError, Sequence[str]]] = []
        self.taken_in: list[str] = []

    def begin(self, job: str) -> None:
        self.taken_in.append(f"begin {job}")

    def cancel(self, id: str) -> None:
        self.taken_in.append(f"cancel {id}")

    def step(self) -> None: ...

    def make_room(self, running: str) -> None: ...

    def cancel_all(self) -> None: ...

    def fail_all(self, error: JaxserveError, not_begun: Sequence[str]) -> None:
        self.failed.append((error, not_begun))


def test_a_pause_waits_for_another_one_no_longer_than_it_is_told():
    """The error comes in time and says what runs; the pause that was there goes on."""
    clock = WallClock()
    loop: EngineLoop[str] = EngineLoop(_Nothing(), clock, name="nothing")
    try:
        with loop.paused():
            for wait_s in (0.0, 0.01, -1.0):
                with pytest.raises(EngineBusyError, match="another call has paused"):
                    with loop.paused(until_s=clock.now() + wait_s):
                        raise AssertionError("two pauses at once")
        for until_s in (clock.now() + 10, math.inf):
            with loop.paused(until_s=until_s):
                pass
    finally:
        loop.close()


def test_others_submit_and_cancel_during_a_pause_without_waiting():
    """As an event loop does that serves other replicas; all is taken in after the pause."""
    work = _Nothing()
    loop: EngineLoop[str] = EngineLoop(work, WallClock(), name="nothing")
    with loop.paused("keep"):
        told = threading.Event()

        def go_on() -> None:
            loop.submit("job")
            loop.cancel("job")
            loop.tell(told.set)

        other = threading.Thread(target=go_on, daemon=True)
        other.start()
        other.join(WAIT_S)
        assert not other.is_alive() and not work.taken_in and not told.is_set()
    assert told.wait(WAIT_S) and work.taken_in == ["begin job", "cancel job"]
    closing = threading.Thread(target=loop.close, daemon=True)
    with loop.paused("keep"):
        closing.start()
        closing.join(0.1)
        assert closing.is_alive()  # what the pause is for may need what closing frees
    closing.join(WAIT_S)
    assert not closing.is_alive()


def test_a_loop_that_another_thread_fails_ends_every_job_with_that_error():
    """In a pause, with the jobs that were submitted before it and in it; and while it is idle."""
    error = EngineFailedError("its weights are gone")
    error.__cause__ = OSError("the device fell off the bus")
    work = _Nothing()
    loop: EngineLoop[str] = EngineLoop(work, WallClock(), name="nothing")
    with loop.paused("keep"):
        loop.submit("held")
        loop.fail(error)
        assert loop.has_failed
        with pytest.raises(EngineFailedError, match="its weights are gone"):
            loop.submit("later")
    loop.close()
    assert work.failed == [(error, ["held"])] and isinstance(error.__cause__, OSError)
    with pytest.raises(EngineFailedError, match="its weights are gone"):
        loop.ask(lambda: None)

    idle = _Nothing()
    loop = EngineLoop(idle, WallClock(), name="nothing")
    loop.fail(error)
    loop.close()
    assert idle.failed == [(error, [])]


class _Later(_Nothing):
    """A step is due as soon as it was asked once when it is: time passes between two questions."""

    def __init__(self) -> None:
        super().__init__()
        self.has_work = False
        self.stepped = threading.Event()
        self._was_asked = False

    def begin(self, job: str) -> None:
        self.has_work, self._was_asked = True, False

    @property
    def idle_until_s(self) -> float | None:
        asked, self._was_asked = self._was_asked, True
        return None if asked else WallClock().now() + 1e-3

    @property
    def plans_late(self) -> bool:
        return not self._was_asked

    def step(self) -> None:
        self.has_work = False
        self.stepped.set()


def test_a_step_that_becomes_due_while_the_loop_looks_is_not_waited_for():
    """Nothing else would wake the loop."""
    work = _Later()
    loop: EngineLoop[str] = EngineLoop(work, WallClock(), name="later")
    try:
        loop.submit("job")
        assert work.stepped.wait(WAIT_S)
    finally:
        loop.close()
