"""Devices that JAX does not use, and errors of memory."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from jaxserve.core.errors import DeviceMemoryError, GpuUnusedError, is_out_of_memory
from jaxserve.execution.device_errors import check_gpu_is_used, out_of_memory_as

pytestmark = pytest.mark.fast

UNASKED = {"jax_platforms": "", "jax_platform_name": "", "jax_default_device": None}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The file system of a machine with a GPU."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        (None, "its CUDA plug-in is not installed. Install it"),
        ("raise RuntimeError('Unable to load cuDNN.\\nA traceback')", "Unable to load cuDNN. Ins"),
        ("pass", "its CUDA plug-in failed: Unknown backend cuda."),
        ("raise RuntimeError('ALREADY_EXISTS: PJRT_Api')", "its CUDA plug-in failed: Unknown b"),
    ],
)
def test_a_gpu_that_jax_does_not_use_is_an_error(root, monkeypatch, plugin, why):
    """It says why, how to install the plug-in, and how to compute on the CPU."""
    if plugin is None and find_spec("jax_plugins") is not None:
        pytest.skip("a plug-in of JAX is installed")
    if plugin is not None:
        (root / "jax_plugins/xla_cuda13").mkdir(parents=True)
        (root / "jax_plugins/xla_cuda13/__init__.py").write_text(
            f"def initialize():\n    {plugin}\n"
        )
        monkeypatch.syspath_prepend(root)
    try:
        with pytest.raises(GpuUnusedError) as error:
            check_gpu_is_used({}, UNASKED, root)
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "jax_plugins"]:
            del sys.modules[name]
    text = str(error.value)
    assert why in text and "pip install -e '.[cuda13]'" in text
    assert text.endswith("or set JAX_PLATFORMS=cpu to compute on the CPU")


def test_a_gpu_that_does_not_start_is_an_error():
    """JAX's own says nothing of what to install; other platforms' errors stay as they are."""

    def fails(platform: str) -> str:
        raise RuntimeError(f"Unable to initialize backend '{platform}': no devices\nmore")

    with pytest.raises(GpuUnusedError) as error:
        check_gpu_is_used({}, UNASKED | {"jax_platforms": "cuda"}, start=lambda: fails("cuda"))
    text = str(error.value)
    assert "an NVIDIA GPU: Unable to initialize backend 'cuda': no devices. Install" in text
    assert text.endswith("or set JAX_PLATFORMS=cpu to compute on the CPU")
    with pytest.raises(RuntimeError, match="'tpu'"):
        check_gpu_is_used({}, UNASKED, start=lambda: fails("tpu"))


@pytest.mark.parametrize("name", UNASKED)
def test_the_cpu_is_used_where_it_was_asked_for(root, name):
    """JAX itself fails for other platforms that were asked for."""
    assert name in jax.config.values
    check_gpu_is_used({}, UNASKED | {name: "cpu"}, root)
    check_gpu_is_used({"CUDA_VISIBLE_DEVICES": ""}, UNASKED, root)


def test_a_machine_without_a_gpu_computes_on_the_cpu(tmp_path):
    """The user need not ask for it."""
    check_gpu_is_used({}, UNASKED, tmp_path)


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2306867200 bytes.", True),
        ("INTERNAL: Failed to instantiate CUDA graph: CUDA_ERROR_OUT_OF_MEMORY", True),
        (
            "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 110592, available: "
            "101376, context: [fusion]",
            False,
        ),
    ],
)
def test_a_kernel_that_needs_too_much_shared_memory_is_no_lack_of_memory(text, is_memory):
    """No smaller page pool would help, so that the error stays XLA's."""
    error = RuntimeError(text)
    assert is_out_of_memory(error) is is_memory
    wanted = DeviceMemoryError if is_memory else RuntimeError
    with pytest.raises(wanted) as raised, out_of_memory_as("serving", "pass less"):
        raise error
    assert (raised.value is error) is not is_memory
