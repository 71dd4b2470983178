"""Groups of several processes that are threads of one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener

from jaxserve.sharding import ProcessGroup


def connected() -> tuple[ProcessGroup, ProcessGroup]:
    """Return the leader and the follower of a job of two processes, both in this process."""
    with Listener(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        accepted = pool.submit(listener.accept)
        to_leader = Client(listener.address)
        return ProcessGroup(0, 2, {1: accepted.result()}, {}), ProcessGroup(
            1, 2, {0: to_leader}, {}
        )
