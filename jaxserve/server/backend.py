"""The service behind the server, the server's phase, and the open requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Literal, final

from anyio import to_thread

from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineFailedError,
    JaxserveError,
    StepMemoryError,
)
from jaxserve.runtime import RuntimeStats, Service
from jaxserve.scheduling.bounds import Outlook
from jaxserve.server.errors import failed, too_busy, unavailable, unknown_model
from jaxserve.server.metrics import Metrics
from jaxserve.server.options import ServerOptions

Phase = Literal["loading", "ready", "draining", "failed"]
Status = Literal["loading", "compiling", "ready", "draining", "failed"]

# Seconds after which a client may retry while the server loads or drains.
_RETRY_S = 5.0
# Number of latest ends from which the rate of ends is computed.
_NUM_RATED = 64
# Seconds for which an estimate of the waiting time is reused.
_ESTIMATE_S = 1.0

OutlookOf = Callable[[], Mapping[str, Outlook]]


@final
class Mailbox:
    """A queue of calls for an event loop to which any thread may append.

    The loop is woken once for all calls that are posted before it runs: a step of the engine brings
    a piece for each running sequence, and a wake-up is a system call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        # Cleared before the calls are taken: a call posted from now on wakes the loop again.
        self._is_woken = False
        while self._calls:
            self._calls.popleft()()


@final
class CountedRequest:
    __slots__ = ("has_begun",)

    def __init__(self) -> None:
        self.has_begun = False


@final
class Backend:
    """The service, and the admission of requests. All methods are called on the event loop."""

    def __init__(self, options: ServerOptions):
        self.options = options
        self.metrics = Metrics(options.model_name, options.metrics_prefix, self._stats)
        self.created_s = int(time.time())
        self.mailbox: Mailbox | None = None
        self.max_model_len: int | None = None
        self.phase: Phase = "loading"
        self.num_waiting = 0
        self.num_running = 0
        self._service: Service | None = None
        self._outlook: OutlookOf | None = None
        self._estimate_s = 1.0
        self._estimated_s = -math.inf
        self._ends_s: deque[float] = deque(maxlen=_NUM_RATED)
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def serve(self, service: Service, max_model_len: int, outlook: OutlookOf | None = None) -> None:
        """Serve requests with this service, unless the server is already shutting down.

        `outlook` estimates when waiting requests begin (`Runtime.outlook`). Without it, retry times
        follow from the recent rate of ended requests. `max_model_len` limits a prompt with its
        answer.
        """
        self._outlook = outlook
        self._service = service
        self.max_model_len = max_model_len
        self.mailbox = Mailbox(asyncio.get_running_loop())
        if self.phase == "loading":
            self.phase = "ready"

    @property
    def status(self) -> Status:
        if self.phase == "ready" and self._service is not None and not self._service.is_ready():
            return "compiling"
        return self.phase

    def fail(self) -> None:
        """Refuse all requests, since the service could not be created or has failed."""
        self.phase = "failed"

    def fail_if_over(self, error: JaxserveError) -> None:
        """Refuse all requests if the error of a request says that the engine has failed for good.

        A service that recovers continues: the error is then that of one request.
        """
        if self._service is None or self._service.recovers or isinstance(error, StepMemoryError):
            return
        # The loop has ended with one of these errors, which no single request causes.
        if isinstance(error, (EngineFailedError, DeviceMemoryError)):
            self.fail()

    def drain(self) -> None:
        self.phase = "draining"

    async def until_idle(self) -> None:
        await self._is_idle.wait()

    def ready_service(self) -> Service:
        if self.phase == "failed":
            raise failed()
        if self._service is None or self.phase != "ready":
            raise unavailable(self.phase, _RETRY_S)
        return self._service

    def check_is_ready(self) -> None:
        """Check that requests are accepted and do not wait for a compilation."""
        self.ready_service()
        status = self.status
        if status != "ready":
            raise unavailable(status, _RETRY_S)

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter that a request names as its model; None for the model itself."""
        if name is None or name == self.options.model_name:
            return None
        if name not in self.adapters:
            raise unknown_model(name, ", ".join((self.options.model_name, *self.adapters)))
        return name

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters; empty before the service is ready."""
        return () if self._service is None else self._service.adapters

    # ---- open requests ----

    async def check_room(self, count: int) -> None:
        if count and self.num_waiting + count > self.options.max_waiting:
            raise too_busy(self.num_waiting, await self._retry_after_s())

    def begin(self) -> CountedRequest:
        self.num_waiting += 1
        self._is_idle.clear()
        self.metrics.set_open(self.num_waiting, self.num_running)
        return CountedRequest()

    def has_token(self, request: CountedRequest) -> None:
        if not request.has_begun:
            request.has_begun = True
            self.num_waiting -= 1
            self.num_running += 1
            self.metrics.set_open(self.num_waiting, self.num_running)

    def end(self, request: CountedRequest) -> None:
        """Stop counting a request. Call it once."""
        if request.has_begun:
            self.num_running -= 1
            self._ends_s.append(time.monotonic())
        else:
            self.num_waiting -= 1
        self.metrics.set_open(self.num_waiting, self.num_running)
        if not self.num_waiting and not self.num_running:
            self._is_idle.set()

    def _stats(self) -> RuntimeStats | None:
        """Return the service's counters without waiting; None if there are none."""
        if self._service is None:
            return None
        try:
            return self._service.stats(wait=False)
        except JaxserveError:  # it is closed, has failed, or no replica serves now
            return None

    async def _retry_after_s(self) -> float:
        """Return an estimate of the seconds until a waiting request begins.

        It is reused for a second, because it is requested most often when the engine is busiest.
        """
        now_s = time.monotonic()
        if now_s > self._estimated_s + _ESTIMATE_S:
            self._estimated_s = now_s
            self._estimate_s = await self._by_outlook_s() or self._by_rate_s()
        return self._estimate_s

    async def _by_outlook_s(self) -> float | None:
        if self._outlook is None:
            return None
        try:
            found = await to_thread.run_sync(self._outlook)
        except JaxserveError:  # closed or failed: the next request gets the error
            return None
        waits = [each.begins_in_s for each in found.values() if each.begins_in_s]
        return max(1.0, min(waits)) if waits else None

    def _by_rate_s(self) -> float:
        """Return the seconds in which an eighth of the queue ends, by the rate of the last ends."""
        if len(self._ends_s) < 2 or self._ends_s[-1] == self._ends_s[0]:
            return 1.0
        each_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return min(60.0, max(1.0, each_s * self.num_waiting / 8))
