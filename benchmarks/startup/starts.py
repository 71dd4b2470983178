"""Starts in new processes, with empty caches and with filled ones."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.processes import result_of
from jaxserve.core.assets import CACHE_VARIABLE, cache_folder

# Caches that a separate variable would put elsewhere.
_ELSEWHERE = ("JAX_COMPILATION_CACHE_DIR", "PALLAS_KERNELS_CACHE")


def start_times(model: str, settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return `ready_s` and `first_token_s` of a `cold` and a `warm` start, each in a new process.

    The cold start finds neither converted weights nor compiled executables (downloads stay); the
    warm start finds those that the cold start left. Both make every executable before they serve.

    Args:
      settings: of `Runtime.from_pretrained`.
    """
    full = {"warmup": "full", **settings}
    with cold_cache() as folder:
        starts = {kind: start(model, full, folder) for kind in ("cold", "warm")}
    return {
        kind: {name: found[name] for name in ("ready_s", "first_token_s")}
        for kind, found in starts.items()
    }


@contextmanager
def cold_cache() -> Iterator[str]:
    """Yield a cache folder that holds only the downloads; it is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-cold-") as folder:
        downloads = cache_folder() / "assets"
        if downloads.is_dir():
            (Path(folder) / "assets").symlink_to(downloads, target_is_directory=True)
        yield folder


def start(model: str, settings: dict[str, Any], cache: str) -> dict[str, Any]:
    """Return the figures of `benchmarks.startup.once` in a new process with this cache folder."""
    arguments = [model, json.dumps(settings), str(time.time())]
    return result_of("-m", "benchmarks.startup.once", *arguments, env=cache_environment(cache))


def cache_environment(cache: str) -> dict[str, str]:
    """Return the variables of a process with this cache folder."""
    inherited = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    return {**inherited, CACHE_VARIABLE: cache}
