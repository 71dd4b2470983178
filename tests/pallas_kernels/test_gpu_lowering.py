"""Every configuration of the GPU kernels becomes code for CUDA, on machines without a GPU."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.cross import targeting
from pallas_kernels.paged_attention.configurations import CONFIGURATIONS


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_configurations_are_lowered(configuration):
    """Traced for an H100, each call is made of our kernels alone, and none of them refuses."""
    function, arguments = configuration.call()
    with targeting():
        traced = jax.jit(function).trace(**arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    wanted = {"split", "merge"} if configuration.is_decode else {"tile", "split", "merge"}
    names = ("tile", "split", "merge")
    assert {name for name in names if f"paged_attention_{name}" in text} == wanted
