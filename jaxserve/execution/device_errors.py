"""Conversion of device failures to typed errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxserve.core.errors import DeviceMemoryError


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that memory could not be allocated, by XLA or by jaxserve."""
    return isinstance(error, DeviceMemoryError) or _is_by_xla(error)


def _is_by_xla(error: BaseException) -> bool:
    """Return whether XLA could not allocate memory; it has no type for that."""
    return "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def out_of_memory_as(doing: str, remedy: str) -> Iterator[None]:
    """Raise XLA's out-of-memory error as a `DeviceMemoryError` with an operation and a remedy."""
    try:
        yield
    except Exception as error:  # the module of XLA's type differs between versions
        if not _is_by_xla(error):
            raise
        raise DeviceMemoryError(
            f"the device ran out of memory while {doing} ({error}); {remedy}"
        ) from error
