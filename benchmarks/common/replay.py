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
    """Submit every item when it arrives, and wait for every answer.

    Args:
      follow_up: returns the item to submit after an answer; None to submit no more.

    Returns:
      The completions of the items in their order, then those of the items that followed, in the
      order of submission; and the seconds of the whole.
    """
    begin_s = time.perf_counter()
    submitted = list(items)
    arriving = [(item.arrival_s, index) for index, item in enumerate(submitted)]
    heapq.heapify(arriving)
    ended: queue.SimpleQueue[tuple[int, Completion]] = queue.SimpleQueue()
    done: dict[int, Completion] = {}
    with tqdm(total=len(submitted), desc=label, unit="req", leave=False, delay=2) as bar:
        while len(done) < len(submitted):
            now_s = time.perf_counter() - begin_s
            together: list[int] = []
            while arriving and arriving[0][0] <= now_s:
                together.append(heapq.heappop(arriving)[1])
            if together:
                _submit(rt, {index: submitted[index] for index in together}, ended)
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
                heapq.heappush(arriving, (item.arrival_s, len(submitted)))
                submitted.append(item)
                bar.total = len(submitted)
    return [done[index] for index in range(len(submitted))], time.perf_counter() - begin_s


def _submit(
    rt: Runtime,
    items: dict[int, WorkloadItem],
    ended: queue.SimpleQueue[tuple[int, Completion]],
) -> None:
    """Submit the items together; each completion goes into `ended` with the index of its item."""
    for index, pending in zip(items, rt.submit_items(list(items.values())), strict=True):

        def put(future: Future[Completion], index: int = index) -> None:
            ended.put((index, future.result()))

        pending.future.add_done_callback(put)
