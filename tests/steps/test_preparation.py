"""Threads that make executables: their order, their delay, and when the first ones are made."""

from __future__ import annotations

import threading

from jaxserve.steps.preparation import Preparation


def _until(preparation: Preparation) -> None:
    """Wait until the first functions have ended."""
    pause = threading.Event()
    while not preparation.has_first():
        pause.wait(0.001)


def test_the_first_ones_are_waited_for_alone():
    """`has_first` waits for the slow one of the first functions, and for none behind them."""
    slow, later = threading.Event(), threading.Event()
    steps = [("slow", slow.wait), ("quick", lambda: None), ("later", later.wait)]
    ended = threading.Event()
    preparation = Preparation(steps, ended.set, num_first=2)
    try:
        assert not preparation.has_first()
        slow.set()
        _until(preparation)
        assert not ended.is_set()
        later.set()
        assert ended.wait(20)
        assert preparation.has_first()
    finally:
        slow.set()
        later.set()
        preparation.close()


def test_a_function_that_fails_counts_as_made():
    """A call makes it again, so that waiting for it would never end."""

    def fail() -> None:
        raise MemoryError

    preparation = Preparation([("fails", fail)], num_first=1)
    _until(preparation)
    preparation.close()


def test_asking_ends_the_delay():
    """Nothing begins within the delay, until the first ones are asked for."""
    called = threading.Event()
    preparation = Preparation([("first", called.set)], num_first=1, delay_s=1000.0)
    assert not called.wait(0.05)
    _until(preparation)
    assert called.is_set()
    preparation.close()


def test_closing_ends_the_delay():
    """Functions that have not begun are dropped."""
    called = threading.Event()
    preparation = Preparation([("first", called.set)], num_first=1, delay_s=1000.0)
    preparation.close()
    assert not called.is_set()
