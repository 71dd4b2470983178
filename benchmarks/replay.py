"""A workload played against a runtime in real time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from jaxserve.core.request import Completion
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


def replay(
    rt: Runtime, items: Sequence[WorkloadItem], *, label: str
) -> tuple[list[Completion], float]:
    """Submit every item when it arrives; completions in the order given, and seconds in all."""
    begin_s = time.perf_counter()
    pending = {}
    for index in sorted(range(len(items)), key=lambda i: items[i].arrival_s):
        item = items[index]
        wait_s = begin_s + item.arrival_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        pending[index] = rt.submit(
            item.prompt_token_ids,
            item.params(),
            priority=item.priority,
            deadline_s=item.deadline_s,
        )
    order = tqdm(range(len(items)), desc=label, unit="req", leave=False, delay=2)
    done = [pending[index].result() for index in order]
    return done, time.perf_counter() - begin_s
