"""Ids of rows, which tasks in flight may name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.cells.engine import Lanes
from jaxserve.core.clock import VirtualClock

pytestmark = pytest.mark.fast


class _Handle:
    """A task that has run."""

    def is_ready(self) -> bool:
        return True


def test_rows_are_used_again_when_every_worker_has_read_its_tasks():
    """Tasks of both workers may name a row that is freed; it comes back after the later of them."""
    lanes = Lanes(2, 2, VirtualClock())
    first = lanes.take_rows(3)
    handles: list[Any] = [_Handle(), _Handle()]
    for worker, handle in enumerate(handles):
        lanes.push(worker, [handle])
    lanes.free_rows(first, 3)
    assert lanes.forget_rows() == []
    popped = lanes.pop_ready()
    assert popped is not None and popped[0] == 0
    assert lanes.forget_rows() == []
    popped = lanes.pop_ready()
    assert popped is not None and popped[0] == 1
    assert lanes.forget_rows() == [range(first, first + 3)]
