"""The seconds in which steps wait for executables."""

from __future__ import annotations

import threading
import time

import pytest

from jaxserve.core.stalls import Stalls

pytestmark = pytest.mark.fast


def test_waits_at_once_count_once():
    """Two threads that wait for the same 50 ms count them once; a present wait counts, too."""
    stalls = Stalls()
    together = threading.Barrier(2)

    def wait() -> None:
        with stalls.waiting():
            together.wait()
            time.sleep(0.05)
            assert stalls.is_waiting and stalls.seconds() >= 0.05

    begin_s = time.monotonic()
    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed_s = time.monotonic() - begin_s
    assert not stalls.is_waiting
    assert 0.05 <= stalls.seconds() <= passed_s
    assert stalls.seconds() == stalls.seconds()  # it stands still
