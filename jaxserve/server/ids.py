"""Unique ids of requests and answers."""

from __future__ import annotations

from random import Random

# Seeded by the system once. `uuid4` asks it each time, and gives up the GIL for that: on the event
# loop, the way to an answer then waits until another thread's turn is over, which is up to 5 ms.
_random = Random()


def new_id(prefix: str) -> str:
    """Return an id that is unique; it is not a secret."""
    return f"{prefix}-{_random.getrandbits(128):032x}"
