"""A cell engine as the work of a loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import final

from jaxserve.cells.answers import CellAnswer
from jaxserve.cells.engine import CellEngine
from jaxserve.core.clock import Clock
from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineFailedError,
    InvalidConfigError,
    JaxserveError,
)
from jaxserve.engine.device_loop import Running
from jaxserve.execution.device_errors import is_out_of_memory


@final
class CellWork:
    """See `DeviceWork`."""

    def __init__(self, engine: CellEngine, clock: Clock):
        self._engine = engine
        self._clock = clock

    @property
    def changed(self) -> threading.Condition:
        return self._engine.changed

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def idle_until_s(self) -> float | None:
        return self._engine.idle_until_s

    def begin(self, job: CellAnswer) -> None:
        self._engine.add(job)

    def cancel(self, id: str) -> None:
        self._engine.cancel(id)

    def step(self) -> None:
        self._engine.step()

    @property
    def has_idle_work(self) -> bool:
        return False

    def use_idle_time(self) -> None:
        """Do nothing: a cell engine measures nothing while it runs."""

    def rest(self) -> None:
        """Do nothing: a cell engine counts no idle time."""

    def make_room(self, running: Running) -> None:
        """See `DeviceWork`.

        Raises:
          InvalidConfigError: `running` is "restart".
        """
        if running == "restart":
            raise InvalidConfigError(
                'requests of cells cannot restart; pass "finish", "abort" or "keep"'
            )
        if running == "finish":
            return
        self._engine.drain()
        if running == "abort":
            self.cancel_all()

    def settle(self) -> None:
        """Do nothing: no request ends in a pause."""

    def cancel_all(self) -> None:
        for request_id in self._engine.request_ids():
            self._engine.cancel(request_id)

    def fail_all(self, error: JaxserveError, not_begun: Sequence[CellAnswer]) -> None:
        self._engine.fail(error)
        for answer in not_begun:
            answer.end("error", {}, self._clock.now(), error)

    def failure_of(self, cause: Exception) -> JaxserveError:
        if isinstance(cause, JaxserveError):
            return cause
        if is_out_of_memory(cause):
            return DeviceMemoryError(
                f"the device ran out of memory while running cells ({cause}); pass a smaller "
                "slot_memory or smaller batch_sizes"
            )
        return EngineFailedError(
            f"the cell engine stopped: {type(cause).__name__}: {cause}; create a new runtime, and "
            "report this with the traceback of __cause__"
        )
