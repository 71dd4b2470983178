"""Noticing compilations where none should happen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


@final
class CompilationCounter:
    """Counts what is compiled inside its `watch` blocks, in the same thread.

    Loading an executable from the persistent cache counts too: it stalls the loop as well.
    """

    def __init__(self) -> None:
        self.count = 0
        self._thread: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def close(self) -> None:
        self._thread = None
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT and self._thread == threading.get_ident():
            self.count += 1
