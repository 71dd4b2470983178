"""Compilations whose executables JAX's persistent cache neither has nor gets."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

# JAX keeps what takes this long to compile; nothing does.
_NEVER_S = 1e9
_LEAST = "jax_persistent_cache_min_compile_time_secs"

_lock = threading.Lock()
# The blocks that are running, and the setting that the last of them restores.
_running = 0
_before_s = 0.0


@contextmanager
def without_jax_cache(platform: str) -> Iterator[dict[str, Any] | None]:
    """Keep the block's executables out of JAX's cache on a CPU; yield options of the compilation.

    On a CPU an executable from that cache lacks its functions when it is serialised again: it
    loads, and fails when it is called (jaxlib 0.10). So it must not be read, and an entry that
    nothing reads would only fill the disk. The option is of GPUs alone, and has no effect here
    except that it is part of the cache's key. The setting is the process's: what other threads
    compile meanwhile is not cached either.
    """
    if platform != "cpu":
        yield None
        return
    _begin()
    try:
        yield {"xla_gpu_algorithm_denylist_path": f"not-cached-{uuid.uuid4()}"}
    finally:
        _end()


def _begin() -> None:
    global _running, _before_s
    with _lock:
        if _running == 0:
            _before_s = jax.config.values[_LEAST]
            jax.config.update(_LEAST, _NEVER_S)
        _running += 1


def _end() -> None:
    global _running
    with _lock:
        _running -= 1
        if _running == 0:
            jax.config.update(_LEAST, _before_s)
