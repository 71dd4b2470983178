"""A counter of compilations, which can raise if one happens after the warm-up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import final

import jax

from jaxserve.core.errors import CompilationAfterWarmupError
from jaxserve.scheduling.plan import StepPlan
from jaxserve.steps.step_function import STALL_EVENT

_EVENTS = ("/jax/core/compile/backend_compile_duration", STALL_EVENT)


@final
class CompilationCounter:
    """A counter of the compilations in its `watch` blocks, on the thread of the block.

    Loading an executable, or waiting for another thread that makes it, counts too, because it also
    stalls the loop.

    Args:
      strict: raise CompilationAfterWarmupError on a compilation after the warm-up.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.count = 0
        self._is_warm = False
        self._strict = strict
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @property
    def is_warm(self) -> bool:
        """Whether the warm-up is over, so that a compilation is a stall."""
        return self._is_warm

    def expect_none(self, is_warm: bool = True) -> None:
        """Set whether a compilation counts as a stall from now on."""
        self._is_warm = is_warm

    @contextmanager
    def watch(self, plan: StepPlan) -> Iterator[None]:
        """Count compilations in the block, which submits `plan`."""
        before = self.count
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
        if self._strict and self._is_warm and self.count > before:
            raise CompilationAfterWarmupError(
                f"step {plan.index} ({len(plan.rows)} rows, {plan.num_tokens} tokens) compiled "
                f"{self.count - before} executables after warm-up; report this as a bug, or serve "
                "without strict=True"
            )

    def close(self) -> None:
        """Stop counting; do nothing if the listener is gone."""
        self._thread = None
        # JAX asserts that it is there, and other libraries clear all listeners (Tunix does).
        with suppress(AssertionError):
            jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _EVENTS and self._thread == threading.get_ident():
            self.count += 1
