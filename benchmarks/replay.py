"""A workload played against a runtime in real time."""

from __future__ import annotations

import itertools
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
    order = sorted(range(len(items)), key=lambda i: items[i].arrival_s)
    for arrival_s, group in itertools.groupby(order, key=lambda i: items[i].arrival_s):
        wait_s = begin_s + arrival_s - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)
        together = list(group)
        pending.update(zip(together, rt.submit_items([items[i] for i in together]), strict=True))
    bar = tqdm(range(len(items)), desc=label, unit="req", leave=False, delay=2)
    done = [pending[index].result() for index in bar]
    return done, time.perf_counter() - begin_s
