"""Executors that wrap another one: slow, faulty, recorded, or with free page copies.

A `Runtime` gets a wrapper by `wrap_executor`, an `Engine` instead of its executor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import numpy as np

from jaxserve.execution.executor import StepHandle
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.plan import StepPlan, StepResult, nothing_computed

if TYPE_CHECKING:
    from jaxserve.execution.model_executor import ModelExecutor

_Wrapped = TypeVar("_Wrapped")


class ExecutorWrapper:
    """An executor that forwards every member to another one, except those that a subclass replaces.

    Args:
      inner: carries out the plans; closed with this one.
    """

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@final
class SlowExecutor(ExecutorWrapper):
    """Delays each submission by `step_s` seconds, so that tests can act while answers run.

    `step_s` may be changed at any time, for the next step on.
    """

    def __init__(self, inner: Any, step_s: float = 0.02):
        super().__init__(inner)
        self.step_s = step_s

    def submit(self, plan: StepPlan) -> StepHandle:
        time.sleep(self.step_s)
        return self.inner.submit(plan)


@final
class FaultyExecutor(ExecutorWrapper):
    """Fails at one of its steps, counted from 0.

    Args:
      raises_at: the step whose `submit` raises `error`, and every later one.
      not_finite_at: the step whose sampling rows come back with logits that are not finite.
      not_finite_every: n for every n-th step to come back so; None for none.
      out_of_memory_every: n for every n-th step to run out of the device's memory, alternately when
        it is submitted and when it is collected; None for none.
      loses_every: n for pages that do not arrive in every n-th plan of the link between two device
        groups; None for none.
    """

    def __init__(
        self,
        inner: Any,
        *,
        raises_at: int | None = None,
        error: Exception | None = None,
        not_finite_at: int | None = None,
        not_finite_every: int | None = None,
        out_of_memory_every: int | None = None,
        loses_every: int | None = None,
    ):
        super().__init__(inner)
        self.num_submitted = 0
        self._raises_at = raises_at
        self._error = error or RuntimeError("the device fell over")
        self._not_finite_at = not_finite_at
        self._not_finite_every = not_finite_every or sys.maxsize
        self._out_of_memory_every = out_of_memory_every or sys.maxsize
        self._loses_every = loses_every
        self._num_handovers = 0
        self._is_lost = False

    def reset(self) -> bool:
        self._is_lost = False
        return self.inner.reset()

    def submit(self, plan: StepPlan) -> StepHandle:
        index = self.num_submitted
        self.num_submitted += 1
        if self._raises_at is not None and index >= self._raises_at:
            raise self._error
        self._num_handovers += bool(plan.handovers)
        if plan.handovers and self._loses_every and self._num_handovers % self._loses_every == 0:
            return _Lost(plan)
        num_failed, rest = divmod(index + 1, self._out_of_memory_every)
        if num_failed % 2 and not rest:
            raise _out_of_memory()
        self._is_lost = self._is_lost or (num_failed > 0 and not rest)
        if self._is_lost:  # later steps read what this one should have written
            return _OutOfMemory()
        handle = self.inner.submit(plan)
        is_finite = index != self._not_finite_at and (index + 1) % self._not_finite_every
        return handle if is_finite else _NotFinite(plan, handle)


@final
class _Lost:
    """A plan of the link whose pages do not arrive."""

    def __init__(self, plan: StepPlan):
        self._plan = plan

    def is_ready(self) -> bool:
        return True

    def collect(self) -> StepResult:
        return nothing_computed(np.zeros(len(self._plan.handovers), np.bool_))


@final
class _OutOfMemory:
    """A submitted step that fails on the device."""

    def is_ready(self) -> bool:
        return True

    def collect(self) -> StepResult:
        raise _out_of_memory()


def _out_of_memory() -> Exception:
    """Return an error as XLA raises it."""
    return RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")


@final
class _NotFinite:
    """A submitted step whose rows that sample or pool all fail."""

    def __init__(self, plan: StepPlan, handle: StepHandle):
        self._plan = plan
        self._handle = handle

    def is_ready(self) -> bool:
        return self._handle.is_ready()

    def collect(self) -> StepResult:
        result = self._handle.collect()
        return replace(
            result,
            num_tokens=np.zeros_like(result.num_tokens),
            finite=np.array(
                [not (row.samples or row.num_pooled) for row in self._plan.rows], np.bool_
            ),
        )


@final
class RecordingExecutor(ExecutorWrapper):
    """Keeps every submitted plan, and every collected result.

    Attributes:
      plans, results: oldest first. Results come in the plans' order, some steps later.
    """

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return _Kept(self.inner.submit(plan), self.results)


@final
class _Kept:
    """A submitted step whose result is appended to a list."""

    def __init__(self, handle: StepHandle, results: list[StepResult]):
        self._handle = handle
        self._results = results

    def is_ready(self) -> bool:
        return self._handle.is_ready()

    def collect(self) -> StepResult:
        self._results.append(self._handle.collect())
        return self._results[-1]


@final
class FreeCopiesExecutor(ExecutorWrapper):
    """Has no measured costs of copies, so that pages are copied rather than recomputed.

    With a model as small as a test's, it depends on the machine which of the two is faster.
    """

    @property
    def swap_costs(self) -> SwapCosts | None:
        return None


@final
class WrapAll(Generic[_Wrapped]):
    """For `Runtime(wrap_executor=...)`: wraps the executor of each replica, and keeps the wrappers.

    Args:
      wrap: makes a wrapper, such as `SlowExecutor`; by default the executor is not wrapped.

    Attributes:
      executors: results of `wrap`, one a replica.
    """

    def __init__(self, wrap: Callable[[Any], _Wrapped] = lambda executor: executor):
        self.executors: list[_Wrapped] = []
        self._wrap = wrap

    def __call__(self, executor: ModelExecutor) -> _Wrapped:
        self.executors.append(self._wrap(executor))
        return self.executors[-1]
