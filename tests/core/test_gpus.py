"""What is found and set about NVIDIA GPUs before JAX starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.core.gpus import describe_memory, has_nvidia_gpu, reserve_memory

pytestmark = pytest.mark.fast

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


class _Gpu:
    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 60 * 10**9, "bytes_in_use": 0}

    def __str__(self) -> str:
        return "cuda:0"


def test_the_command_line_lets_jax_use_more_than_its_default():
    """An empty variable is as good as none, to jaxlib too."""
    for environ in ({}, {OLD: ""}, {NEW: ""}):
        reserve_memory(environ)
        assert environ[NEW] == "0.92"


@pytest.mark.parametrize("name", [OLD, NEW])
def test_a_fraction_that_the_user_has_set_stays(name):
    """Jaxlib refuses to start with both names set, so the other one stays unset as well."""
    environ = {name: "0.5"}
    reserve_memory(environ)
    assert environ == {name: "0.5"}


def test_jaxlib_reads_the_variable_that_is_set(monkeypatch):
    """A version with other names would start with its default, and say nothing."""
    from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

    environ: dict[str, str] = {}
    reserve_memory(environ)
    for name in (OLD, NEW):
        monkeypatch.delenv(name, raising=False)
    assert "memory_fraction" not in generate_pjrt_gpu_plugin_options()
    monkeypatch.setenv(*next(iter(environ.items())))
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.92


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        (
            {},
            "JAX may use 60 GB of cuda:0, 75% of it, which is JAX's default; with "
            f"{NEW}=0.92 in the environment before JAX starts, about 73.6 GB",
        ),
        ({OLD: "0.6"}, f"JAX may use 60 GB of cuda:0 ({OLD}=0.6)"),
        (
            {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"},
            "JAX may use 60 GB of cuda:0 (allocator cuda_async)",
        ),
    ],
)
def test_a_line_says_what_jax_may_use_and_what_to_set(environ, wanted):
    """The advice is given only where JAX has its default."""
    gpu: Any = _Gpu()
    assert describe_memory(gpu, environ) == wanted


@pytest.mark.parametrize(
    ("files", "environ", "wanted"),
    [
        (("dev/nvidia0",), {}, True),
        (("dev/nvidia3", "dev/nvidiactl"), {"CUDA_VISIBLE_DEVICES": "3"}, True),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": ""}, False),
        (("dev/nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        # A container without a GPU, on a host with one.
        (("proc/driver/nvidia/version", "dev/nvidiactl", "dev/null"), {}, False),
        (("dev/dxg",), {}, False),
        (("dev/dxg", "usr/lib/wsl/lib/nvidia-smi"), {}, True),
        ((), {}, False),
    ],
)
def test_a_gpu_counts_where_cuda_could_use_it(tmp_path: Path, files, environ, wanted):
    """Device files decide, and the variable with which users hide GPUs."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert has_nvidia_gpu(environ, tmp_path) is wanted
