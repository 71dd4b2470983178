"""Every configuration of the GPU kernels is lowered for CUDA, on machines without a GPU."""

from __future__ import annotations

import re

import jax
import pytest

from jaxserve.kernels.configurations import CONFIGURATIONS
from jaxserve.kernels.cross import targeting
from tests.common.tiers import some


@pytest.mark.parametrize(
    "configuration", some(CONFIGURATIONS, *range(0, len(CONFIGURATIONS), 40)), ids=str
)
def test_configurations_are_lowered(configuration):
    """Each call, traced for an H100, has only our kernels, and none of them refuses."""
    function, arguments = configuration.call()
    with targeting():
        traced = jax.jit(function).trace(**arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r'name = "(\w+)"', text)) == configuration.kernels
    assert "stablehlo.scatter" not in text and "stablehlo.gather" not in text
