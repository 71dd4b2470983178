"""A pytest plugin that writes what each test did with its time: `pytest --times FILE`.

FILE gets one line of JSON a test; `python -m tests.common.time_table FILE` prints them as tables.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

TRACING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
)
COMPILING = "/jax/core/compile/backend_compile_duration"
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", help="append what each test did with its time")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--times"):
        config.pluginmanager.register(Times(path))


class Times:
    """Measures each test, its fixtures included, and appends a line to `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._spans: dict[str, list[tuple[float, float]]] = {"trace": [], "compile": []}
        self._counts = {"compiled": 0, "processes": 0, "runtimes": 0}
        sys.addaudithook(self._on_audit)

    def pytest_collection_finish(self) -> None:
        if "jax" in sys.modules:
            import jax.monitoring

            jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        if runtime := sys.modules.get("jaxserve.runtime"):
            self._count_runtimes(runtime.Runtime)

    def _count_runtimes(self, runtime: Any) -> None:
        construct = runtime.__init__

        def counted(*args: Any, **kwargs: Any) -> None:
            self._counts["runtimes"] += 1
            construct(*args, **kwargs)

        runtime.__init__ = counted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for spans in self._spans.values():
            spans.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        began, own, children = time.perf_counter(), time.process_time(), _children_s()
        result = yield
        line = {
            "test": item.nodeid,
            "tiers": [
                mark.name for mark in item.iter_markers() if mark.name in ("fast", "release")
            ],
            "wall_s": time.perf_counter() - began,
            "own_cpu_s": time.process_time() - own,
            "children_cpu_s": _children_s() - children,
            "trace_s": _union(self._spans["trace"]),
            "compile_s": _union(self._spans["compile"]),
            "torch": any(name in ("torch", "transformers") for name in vars(item.module)),
            **self._counts,
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    def _on_duration(self, event: str, seconds: float, **_: Any) -> None:
        now = time.perf_counter()
        if event == COMPILING:
            self._counts["compiled"] += 1
            self._spans["compile"].append((now - seconds, now))
        elif event in TRACING:
            self._spans["trace"].append((now - seconds, now))

    def _on_audit(self, event: str, _: Any) -> None:
        if event in STARTS:
            self._counts["processes"] += 1


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _union(spans: list[tuple[float, float]]) -> float:
    """Return the seconds that some span covers: functions are traced inside others."""
    total, end = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total
