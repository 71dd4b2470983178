"""Compilations that take as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import jax

from jaxserve.steps.step_function import COMPILED_EVENT, LOADED_EVENT

_LIMIT_S = 60.0


@final
@dataclass(frozen=True)
class HeldBack:
    """A function whose executables are being made.

    Attributes:
      has_begun: set when the first of them is nearly made.
      go_on: set it to let them be made.
    """

    has_begun: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)


@contextmanager
def held_back(name: str) -> Iterator[HeldBack]:
    """Let executables of a step's function not be ready within the block before `go_on` is set.

    Each is compiled, or loaded, and then kept from its callers.
    """
    held = HeldBack()

    def on_event(event: str, duration_secs: float, **about: str | int) -> None:
        if event in (COMPILED_EVENT, LOADED_EVENT) and about.get("name") == name:
            held.has_begun.set()
            held.go_on.wait(_LIMIT_S)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield held
    finally:
        held.go_on.set()
        jax.monitoring.unregister_event_duration_listener(on_event)
