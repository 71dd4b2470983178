"""A workload played against a runtime in real time."""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tqdm import tqdm

from jaxserve.core.request import Completion
from jaxserve.workload import WorkloadItem
from jaxserve.workload.conversations import FollowUp

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime


def replay(
    rt: Runtime, items: Sequence[WorkloadItem], *, label: str, follow_up: FollowUp | None = None
) -> tuple[list[Completion], float]:
    """Submit every item when it arrives; completions in the order given, and seconds in all.

    Args:
      follow_up: what is asked after an answer; its completions come after the items' own, in the
        order in which it gave them.
    """
    begin_s = time.perf_counter()
    asked = list(items)
    arriving = [(item.arrival_s, index) for index, item in enumerate(asked)]
    heapq.heapify(arriving)
    ended: queue.SimpleQueue[tuple[int, Completion]] = queue.SimpleQueue()
    done: dict[int, Completion] = {}
    with tqdm(total=len(asked), desc=label, unit="req", leave=False, delay=2) as bar:
        while len(done) < len(asked):
            now_s = time.perf_counter() - begin_s
            together: list[int] = []
            while arriving and arriving[0][0] <= now_s:
                together.append(heapq.heappop(arriving)[1])
            if together:
                _submit(rt, {index: asked[index] for index in together}, ended)
            try:
                wait_s = max(0.0, arriving[0][0] - now_s) if arriving else None
                index, done_now = ended.get(timeout=wait_s)
            except queue.Empty:
                continue
            done[index] = done_now
            bar.update()
            if follow_up is None:
                continue
            item = follow_up(index, done_now, time.perf_counter() - begin_s)
            if item is not None:
                heapq.heappush(arriving, (item.arrival_s, len(asked)))
                asked.append(item)
                bar.total = len(asked)
    return [done[index] for index in range(len(asked))], time.perf_counter() - begin_s


def _submit(
    rt: Runtime,
    items: dict[int, WorkloadItem],
    ended: queue.SimpleQueue[tuple[int, Completion]],
) -> None:
    """Hand the items in together; each goes into `ended` with its index when it is answered."""
    for index, pending in zip(items, rt.submit_items(list(items.values())), strict=True):

        def tell(future: Future[Completion], index: int = index) -> None:
            ended.put((index, future.result()))

        pending.future.add_done_callback(tell)
