"""Counters of a runtime."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

from jaxserve.engine.recorder import EngineCounters
from jaxserve.planning.schedules.plan import SchedulePlan
from jaxserve.runtime.adapters import AdapterUsage
from jaxserve.runtime.planner import Planner
from jaxserve.runtime.replicas import Replicas

# Fields of `RuntimeStats` that are equal for all replicas and are not summed.
_SIZES = {"num_pages", "page_size", "pool_bytes", "weights_bytes", "step_bytes", "plan", "adapters"}
# Fields that say how things are now, which those of a runtime that has ended do not.
_NOW = {
    *("num_pages_owned", "num_pages_usable", "num_pages_reserved", "num_pages_cached"),
    *("num_host_pages", "num_host_pages_used", "num_disk_pages"),
}


@final
@dataclass(kw_only=True)
class RuntimeStats(EngineCounters):
    """A snapshot of counters since the start, with sizes of memory.

    Counters and times are sums over the replicas, `max_pages_owned` is the maximum, and sizes are
    those of one replica.

    Attributes:
      predicting_s: seconds that the prediction of lengths took on the submitting threads.
      num_plans: schedules that were adopted (`Runtime.plan`, policy "exegpt").
      num_moves: moves of devices between two groups (`Runtime.plan`, `Runtime.regroup`).
      move_pause_s: seconds for which moves have paused the engine.
      adapters: adapters of open requests; None for a runtime without adapters.
      plan: the schedule in force, its bounds, and what is expected of it; None without one.
      num_pages_owned, num_pages_usable: pages of the device that sequences own now, and that they
        can own, over all replicas.
      num_pages_reserved, num_pages_cached: pages that are reserved and not allocated yet, and pages
        with contents that no sequence owns, over all replicas.
      num_host_pages, num_host_pages_used: pages of the host, and the number that have contents.
      num_disk_pages: pages on the disk, including pages of former runs.
      num_pages_to_disk, num_pages_from_disk: pages written to the disk and read back.
    """

    num_compilations: int
    predicting_s: float
    num_pages_owned: int
    num_pages_usable: int
    num_pages_reserved: int
    num_pages_cached: int
    num_host_pages: int
    num_host_pages_used: int
    num_disk_pages: int
    num_pages_to_disk: int
    num_pages_from_disk: int
    num_pages: int
    page_size: int
    pool_bytes: int
    weights_bytes: int
    step_bytes: int | None
    num_plans: int = 0
    num_moves: int = 0
    move_pause_s: float = 0.0
    plan: SchedulePlan | None = None
    adapters: AdapterUsage | None = None

    @classmethod
    def of(
        cls,
        replicas: Replicas,
        planner: Planner,
        *,
        weights_bytes: int,
        predicting_s: float,
        adapters: AdapterUsage | None,
    ) -> RuntimeStats:
        """Return the counters of all replicas of a runtime."""
        names = [field.name for field in fields(EngineCounters)]
        stats = [replica.engine.stats for replica in replicas.all]
        counters: dict[str, Any] = {name: _total(stats, name) for name in names}
        counters["max_pages_owned"] = max(each.max_pages_owned for each in stats)
        usages = [replica.engine.scheduler.page_usage() for replica in replicas.all]
        first = replicas.first
        return cls(
            **counters,
            num_pages_owned=sum(usage.num_owned for usage in usages),
            num_pages_usable=sum(usage.num_usable for usage in usages),
            num_pages_reserved=sum(usage.num_reserved for usage in usages),
            num_pages_cached=sum(usage.num_cached for usage in usages),
            num_host_pages=sum(usage.num_host for usage in usages),
            num_host_pages_used=sum(usage.num_host - usage.num_host_free for usage in usages),
            num_disk_pages=sum(usage.disk.num_pages for usage in usages),
            num_pages_to_disk=sum(usage.disk.num_written for usage in usages),
            num_pages_from_disk=sum(usage.disk.num_read for usage in usages),
            num_compilations=sum(r.executor.num_compilations for r in replicas.all),
            predicting_s=predicting_s,
            num_pages=first.executor.config.num_pages,
            page_size=first.executor.config.page_size,
            pool_bytes=first.pool_size.pool_bytes,
            weights_bytes=weights_bytes,
            step_bytes=first.pool_size.step.known,
            num_plans=planner.num_adopted,
            num_moves=planner.num_moves,
            move_pause_s=planner.move_pause_s,
            plan=planner.in_force,
            adapters=adapters,
        )

    @classmethod
    def total(
        cls, parts: Sequence[RuntimeStats], former: Sequence[RuntimeStats] = ()
    ) -> RuntimeStats:
        """Return the total of several runtimes' counters; model and options must be the same.

        `former` are the last known counters of runtimes that do not serve any more: their pages do
        not count.
        """
        names = {field.name for field in fields(cls)} - _SIZES - {"max_pages_owned"}
        every = [*parts, *former]
        sums = {name: _total(parts if name in _NOW else every, name) for name in names}
        most = max(part.max_pages_owned for part in every)
        return replace(parts[0], **sums, max_pages_owned=most)


def _total(parts: Sequence[Any], name: str) -> Any:
    """Return the sum of a field, or the sums of the entries of a field that holds several."""
    values = [getattr(part, name) for part in parts]
    if not isinstance(values[0], tuple):
        return sum(values)
    return tuple(map(sum, itertools.zip_longest(*values, fillvalue=0)))
