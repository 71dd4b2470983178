"""A step of the simulated device, which is ready at its virtual time."""

from __future__ import annotations

from typing import final

from jaxserve.core.clock import VirtualClock
from jaxserve.scheduling.plan import StepResult


@final
class SimulatedHandle:
    """See `StepHandle`; collecting it advances the clock."""

    def __init__(self, result: StepResult, ready_s: float, clock: VirtualClock):
        self._result, self._ready_s, self._clock = result, ready_s, clock

    def is_ready(self) -> bool:
        return self._clock.now() >= self._ready_s

    def collect(self) -> StepResult:
        self._clock.advance_to(self._ready_s)
        return self._result
