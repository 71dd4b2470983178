"""Devices that JAX does not use."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxserve.core.errors import GpuUnusedError
from jaxserve.execution.device_errors import check_gpu_is_used

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
        ("xla_cuda13", "its CUDA plug-in failed: Unknown backend cuda."),
    ],
)
def test_a_gpu_that_jax_does_not_use_is_an_error(root, monkeypatch, plugin, why):
    """It says why, how to install the plug-in, and how to compute on the CPU."""
    if plugin is not None:
        (root / "jax_plugins" / plugin).mkdir(parents=True)
        (root / "jax_plugins" / plugin / "__init__.py").touch()
        monkeypatch.syspath_prepend(root)
    with pytest.raises(GpuUnusedError) as error:
        check_gpu_is_used({}, UNASKED, root)
    text = str(error.value)
    assert why in text and "pip install -e '.[cuda13]'" in text
    assert text.endswith("or set JAX_PLATFORMS=cpu to compute on the CPU")


@pytest.mark.parametrize("name", UNASKED)
def test_the_cpu_is_used_where_it_was_asked_for(root, name):
    """JAX itself fails for other platforms that were asked for."""
    assert name in jax.config.values
    check_gpu_is_used({}, UNASKED | {name: "cpu"}, root)
    check_gpu_is_used({"CUDA_VISIBLE_DEVICES": ""}, UNASKED, root)


def test_a_machine_without_a_gpu_computes_on_the_cpu(tmp_path):
    """The user need not ask for it."""
    check_gpu_is_used({}, UNASKED, tmp_path)
