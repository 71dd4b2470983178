"""Plans under a latency bound, from observed lengths and measured step times."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion, Request
from jaxserve.planning.schedules.plan import Plan, plan_rra
from jaxserve.runtime.maintenance import Maintenance
from jaxserve.runtime.replicas import Replicas

# Newest answers whose lengths are kept.
_MAX_OBSERVED = 100_000


@final
class ObservedLengths:
    """A `RequestLog` of the prompt and output lengths of whole answers. It is thread-safe.

    Each sample of a request counts. Cancelled and failed answers do not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: deque[tuple[int, int]] = deque(maxlen=_MAX_OBSERVED)

    def append(self, request: Request, completion: Completion, /) -> None:
        num_prompt = len(completion.prompt_token_ids)
        lengths = [
            (num_prompt, len(sample.token_ids))
            for sample in completion.samples
            if sample.finish_reason in ("stop", "length") and sample.token_ids
        ]
        with self._lock:
            self._newest.extend(lengths)

    def newest(self) -> tuple[tuple[int, int], ...]:
        """Return (prompt tokens, output tokens) of the newest answers, oldest first."""
        with self._lock:
            return tuple(self._newest)


@final
class Planner:
    """Finds schedules for the replicas of a runtime, and adopts them."""

    def __init__(self, replicas: Replicas, maintenance: Maintenance, observed: ObservedLengths):
        self._replicas = replicas
        self._maintenance = maintenance
        self._observed = observed

    def plan(
        self, latency_bound: float, lengths: Sequence[tuple[int, int]] | None, adopt: bool
    ) -> Plan:
        """See `Runtime.plan`."""
        self._replicas.check_leads()
        self._replicas.check_may_wait()
        used = self._observed.newest() if lengths is None else lengths
        if lengths is None and not used:
            raise InvalidConfigError(
                "no answer has ended in this runtime, so no lengths are known; pass lengths=[("
                "prompt tokens, output tokens), ...], or plan after some requests"
            )
        times = self._maintenance.step_times()
        plan = plan_rra(times, self._replicas.first.executor.config, used, latency_bound)
        if adopt:
            iteration = plan.iteration()
            for replica in self._replicas.all:
                replica.loop.ask(partial(replica.engine.adopt, iteration))
        return plan
