"""Fixtures shared by all tests."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.common import shapes, tiers

pytest_plugins = ["tests.common.times"]

# Workers keep every core busy, so that more threads only wait for each other. NumPy, PyTorch and
# XLA read these when they are imported.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
    os.environ.setdefault(name, "1")
# Ray gives its workers a niceness of 15 by default; the other test worker would hold them up.
os.environ.setdefault("RAY_worker_niceness", "0")
# Each module is compiled once, and not by every process that a test starts.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Dtypes are promoted only by explicit casts; child processes inherit the variable.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Tests use meshes of up to eight devices, without accelerators.
os.environ.setdefault(
    "XLA_FLAGS",
    # Code generation is not split over threads, because the workers keep every core busy.
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    # Most of the time is compilation, and the tests do not depend on optimized code.
    " --xla_backend_optimization_level=0"
    # jaxlib 0.10 and 0.11 have the older code generation for fusions; programs compile with it in
    # less than half of the time.
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)


def _this_machine() -> str:
    """Return a name of what executables depend on: JAX, the flags above, and the processor."""
    try:
        about = Path("/proc/cpuinfo").read_text()
        processor = next(line for line in about.splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        processor = platform.processor()
    parts = version("jax"), version("jaxlib"), os.environ["XLA_FLAGS"], processor
    return sha256(repr(parts).encode()).hexdigest()[:16]


# Executables and C++ kernels are kept outside of the checkout, for the next run and for parallel
# workers, also for tests with a cache folder of their own. JAX reads this at its import.
_cache = Path(os.environ.get("JAXSERVE_CACHE", Path.home() / ".cache" / "jaxserve"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache / "test-xla" / _this_machine()))
os.environ.setdefault("PALLAS_KERNELS_CACHE", str(_cache / "kernels"))


tiers.settings.load_profile("test")

# Runs before the import of any module that is checked.
if shapes.is_available():
    shapes.install()


def pytest_report_header() -> str:
    """Report whether array shapes are checked."""
    if shapes.is_available():
        return f"shapes: checked in {', '.join(shapes.CHECKED)}"
    return "shapes: not checked, as beartype is not installed (the extra `test` has it)"


# Files that take a minute or more run first, so that no worker has one of them left at the end.
LONG = (
    "test_families.py",
    "test_notebooks.py",
    "test_processes.py",
    "test_fleet.py",
    "test_encoder_decoder.py",
    "test_deterministic.py",
    "test_regroup.py",
    "test_staged.py",
    "test_speculation.py",
    "test_grouped.py",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose tests are all for `make test-all`, unless it is named."""
    if collection_path.suffix != ".py" or "not release" not in config.getoption("markexpr"):
        return None
    is_named = any(collection_path.name in argument for argument in config.args)
    is_for_release = "\npytestmark = pytest.mark.release\n" in collection_path.read_text()
    return True if is_for_release and not is_named else None


def pytest_collection_finish() -> None:
    """Keep the garbage collector from searching the imported modules again and again.

    Tracing makes many small objects that live, so that searches are rarer than by default, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


# glibc's function that returns freed memory to the system; other C libraries have none.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Return the memory that compilations of a file have freed, which otherwise adds up.

    A worker that has grown large also forgets what it has compiled, which later files seldom share.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    if "jax" in sys.modules and _resident_bytes() > LARGE_WORKER_BYTES:
        sys.modules["jax"].clear_caches()
        gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)


# Above this resident memory a worker forgets its compiled functions; `make test` stays below it.
LARGE_WORKER_BYTES = 4 << 30


def _resident_bytes() -> int:
    """Return this process's resident memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """End the run if a worker was killed: pytest-xdist would wait for its tests for ever."""
    if error:
        work = node.config.pluginmanager.get_plugin("dsession").sched.assigned_work.get(node, {})
        left = [test for tests in work.values() for test, has_run in tests.items() if not has_run]
        pytest.exit(
            f"a worker ended ({error}), perhaps for lack of memory, in {', '.join(left[:1])}",
            returncode=1,
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first, in that order, and keep the order of the others."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Disable shape checks in the test, for tests of the errors that functions raise themselves."""
    with shapes.unchecked():
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Return the path of the default model's GGUF file, which is downloaded at the first use."""
    from jaxserve.models.registry import pull

    return pull("smollm2-135m", progress=False)
