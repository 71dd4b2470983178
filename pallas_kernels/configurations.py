"""Every call of every GPU kernel that is lowered and compiled before it is shipped."""

from __future__ import annotations

from typing import Any, Protocol

from pallas_kernels.kv_write.shapes import CONFIGURATIONS as _WRITES
from pallas_kernels.page_copy.shapes import CONFIGURATIONS as _COPIES
from pallas_kernels.paged_attention.configurations import CONFIGURATIONS as _ATTENTION


class Configuration(Protocol):
    """One kind of call; `str` of it is its name."""

    @property
    def kernels(self) -> frozenset[str]:
        """Names of all kernels that serve it."""
        ...

    @property
    def donated(self) -> tuple[str, ...]:
        """Its arguments that have to be written in place."""
        ...

    def call(self) -> tuple[Any, dict[str, Any]]:
        """A function to jit, and its abstract arguments."""
        ...


CONFIGURATIONS: tuple[Configuration, ...] = (*_ATTENTION, *_WRITES, *_COPIES)
