"""The kernels' sizes follow from what a GPU has, which need not be there."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from jaxserve.kernels import gpu
from jaxserve.kernels.cross import targeting
from jaxserve.kernels.fused_matmul.row_shapes import Configuration
from jaxserve.kernels.gpu import GPUS, Gpu


def _device(**about) -> SimpleNamespace:
    given = dict(platform="gpu", device_kind="NVIDIA A10G", compute_capability="8.6", core_count=80)
    return SimpleNamespace(**{**given, **about})


@pytest.mark.parametrize(
    ("about", "capability", "shared_kib"),
    [
        ({}, (8, 6), 99),
        (dict(compute_capability="8.0"), (8, 0), 163),
        (dict(compute_capability="10.3"), (10, 3), 227),
        (dict(compute_capability="13.1"), (13, 1), 99),  # a later one: the least of all
        (dict(compute_capability="13.1", shared_memory_per_block_optin=300 << 10), (13, 1), 300),
    ],
)
def test_a_device_says_what_it_has(about, capability, shared_kib):
    """Where a plug-in does not say how much shared memory a block may have, a table does."""
    found = Gpu.of(_device(**about))
    assert found == Gpu("NVIDIA A10G", capability, shared_kib << 10, 80)


def test_other_devices_are_no_gpu():
    assert Gpu.of(jax.devices()[0]) is None and gpu.target() is None
    assert Gpu.of(_device(compute_capability="gfx942")) is None


@pytest.mark.parametrize(
    ("name", "stages"), [("h100", 6), ("b200", 6), ("l40s", 5), ("rtx5090", 5)]
)
def test_blocks_on_their_way_fit_the_shared_memory(name, stages):
    """A loop has fewer iterations in flight where a block has less shared memory."""
    with targeting(GPUS[name]):
        assert gpu.target() == GPUS[name]
        assert gpu.num_stages(6, 20 << 10, 16 << 10) == stages
        with pytest.raises(NotImplementedError, match=f"{GPUS[name].kind} has"):
            gpu.num_stages(6, 230 << 10)
    assert gpu.num_stages(6, 230 << 10) == 6  # interpreted, it has no limit


@pytest.mark.parametrize(("name", "stages"), [("h100", 4), ("a100", 4), ("rtx5090", 3)])
def test_a_product_is_compiled_with_as_many_stages_as_fit(name, stages):
    """A gated product that is wide has blocks of 40 KiB; 28,672 columns are Llama 3 70B's."""
    product = Configuration(name="gate_up", tokens=64, inputs=8192, columns=28672, is_gated=True)
    function, arguments = product.call()
    with targeting(GPUS[name]):
        traced = jax.jit(function).trace(**arguments)
    assert f"num_stages={stages}" in str(traced.jaxpr)
