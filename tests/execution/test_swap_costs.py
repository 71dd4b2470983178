"""Costs of page swaps are measured piece by piece, while nothing runs."""

from __future__ import annotations

import threading
import time

from jaxserve import Runtime, SamplingParams
from jaxserve.execution.pages import measured_costs
from jaxserve.testing.executors import ExecutorWrapper, WrapAll
from jaxserve.testing.tiny import OPTIONS, tiny_llama


def test_costs_are_the_minimum_of_a_few_timings():
    """Each timing is a piece, and the first of each kind, which compiles, does not count."""
    calls = []

    def swap():
        calls.append("swap")
        time.sleep(0.02 if len(calls) == 1 else 0)

    *timings, costs = measured_costs(
        swap, lambda: calls.append("prefill"), num_pages=2, num_tokens=10, position_work=0.5
    )
    assert calls == ["swap"] * 4 + ["prefill"] * 4
    assert timings == [None] * 8 and costs is not None
    assert 0 <= costs.page_s < 0.005 and costs.position_s == costs.token_s / 2


class _WithPieces(ExecutorWrapper):
    """An executor with three pieces of work for idle time; notes what was running."""

    def __init__(self, inner):
        super().__init__(inner)
        self.num_left = 3
        self.is_done = threading.Event()
        self.handles = []

    def submit(self, plan):
        self.handles.append(self.inner.submit(plan))
        return self.handles[-1]

    def use_idle_time(self) -> bool:
        assert all(handle.is_ready() for handle in self.handles)
        if self.num_left == 0:
            self.is_done.set()
            return False
        self.num_left -= 1
        return True


def test_idle_time_is_used_between_requests():
    """The pieces are done one after the other once nothing runs, and requests go on."""
    wrapped = WrapAll(_WithPieces)
    with Runtime(tiny_llama(), wrap_executor=wrapped, **OPTIONS) as rt:
        [executor] = wrapped.executors
        assert executor.num_left == 3
        three = SamplingParams(max_tokens=3, ignore_eos=True)
        first = rt.generate([1, 2, 3], three).token_ids
        assert executor.is_done.wait(30) and executor.num_left == 0
        assert rt.generate([1, 2, 3], three).token_ids == first
