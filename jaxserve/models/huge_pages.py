"""Memory in huge pages for weights on a CPU.

A step reads every weight from memory. In pages of 4 KiB the translation of addresses takes a part
of that time, and the processor's prefetcher stops at the end of each page.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

_PAGE = 2 << 20
# Arrays share mappings of this size, which are given back when all of a mapping's arrays are gone.
_MAPPING = 32 * _PAGE
_SMALL = 1 << 18  # bytes; smaller arrays stay where they are
_ALIGNMENT = 64  # of arrays that JAX uses without a copy
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@final
class HugePages:
    """An allocator of arrays that lie in huge pages one after the other."""

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array whose contents are undefined."""
        size = int(np.prod(shape)) * dtype.itemsize
        taken = -(-size // _ALIGNMENT) * _ALIGNMENT
        if taken > self._rest.size:
            self._rest = _mapped(max(-(-taken // _PAGE) * _PAGE, _MAPPING))
        own, self._rest = self._rest[:size], self._rest[taken:]
        return own.view(dtype).reshape(shape)

    def copied(self, array: jax.Array) -> jax.Array:
        """Return a copy in huge pages of an array on one CPU, and any other array itself."""
        devices = array.devices()
        if len(devices) != 1 or next(iter(devices)).platform != "cpu" or not is_useful(array):
            return array
        own = self.empty(array.shape, np.dtype(array.dtype))
        np.copyto(own, np.asarray(array))
        return jax.device_put(own, array.sharding)


def is_useful(array: Any) -> bool:
    """Return whether the array is large enough, and the operating system has huge pages."""
    return array.nbytes >= _SMALL and are_available()


def are_available() -> bool:
    """Return whether the operating system gives huge pages to those who ask."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _SETTING.read_text()
    except OSError:
        return False


def read(files: Sequence[np.memmap]) -> list[np.ndarray]:
    """Return the contents of mapped files in huge pages, and small files as they are mapped.

    The maps are not touched, so that their pages do not count as this process's memory.
    """
    memory = HugePages()
    arrays = [memory.empty(f.shape, f.dtype) if is_useful(f) else f for f in files]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        list(threads.map(_fill, arrays, files))
    return arrays


def _fill(array: np.ndarray, mapped: np.memmap) -> None:
    if array is mapped:
        return
    assert mapped.filename is not None
    with open(mapped.filename, "rb", buffering=0) as file:
        file.seek(mapped.offset)
        rest = memoryview(array.reshape(-1).view(np.uint8))
        while rest:
            done = file.readinto(rest)
            if not done:
                raise ValueError(f"{mapped.filename} is cut off")
            rest = rest[done:]


def _mapped(size: int) -> np.ndarray:
    """Return memory of `size` bytes that begins at a huge page."""
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % _PAGE
    return whole[first : first + size]
