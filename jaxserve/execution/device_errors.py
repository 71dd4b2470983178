"""Turns failures of the device into typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxserve.core.errors import DeviceMemoryError


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether XLA could not allocate memory, for which it has no exception type."""
    return "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def out_of_memory_as(doing: str, remedy: str) -> Iterator[None]:
    """Turn XLA's out-of-memory error into a `DeviceMemoryError`.

    Args:
      doing: the operation, for the message.
      remedy: what the user can do.
    """
    try:
        yield
    except Exception as error:  # XLA's own type moved between versions
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(
            f"the device ran out of memory while {doing} ({error}); {remedy}"
        ) from error
