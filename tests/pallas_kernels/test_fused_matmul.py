"""The product that is fused with norm, gate, bias and residual agrees with its parts."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.fused_matmul import fused_matmul
from jaxserve.kernels.fused_matmul.shapes import TEST_CONFIGURATIONS, make_inputs
from tests.common.closeness import assert_close
from tests.common.tiers import some


@pytest.mark.parametrize("configuration", some(TEST_CONFIGURATIONS), ids=str)
def test_the_kernel_agrees_with_its_parts(configuration):
    """It agrees with the parts in float32 as closely as one rounding to bfloat16 allows."""
    function, _ = configuration.call()
    inputs = make_inputs(configuration, seed=1)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs)
    got = jax.jit(partial(function, implementation="triton_interpreted"))(**inputs)
    wanted = np.asarray(function(**wide, implementation="xla"))
    assert got.dtype == jnp.bfloat16
    assert_close(got, wanted, 4e-3)


def test_a_row_has_the_same_bits_beside_other_rows():
    """Other rows of a tile do not change a row's bits."""
    configuration = TEST_CONFIGURATIONS[2]
    function, _ = configuration.call()
    product = partial(function, implementation="triton_interpreted")
    inputs = make_inputs(configuration, seed=2)
    got = product(**inputs)
    inputs["x"] = inputs["x"].at[0].set(7.0)
    np.testing.assert_array_equal(product(**inputs)[1:], got[1:])


def test_what_is_refused():
    """The kernel says what it does not serve; shapes that contradict each other are errors."""
    x, weight = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    fused = partial(fused_matmul, implementation="triton_interpreted")
    with pytest.raises(NotImplementedError, match="not for cpu"):
        fused_matmul(x, weight, implementation="triton")
    with pytest.raises(NotImplementedError, match="1 to 64 tokens, not 65"):
        fused(jnp.ones((65, 64), jnp.bfloat16), weight)
    with pytest.raises(NotImplementedError, match="bfloat16, not float32"):
        fused(x.astype(jnp.float32), weight)
    with pytest.raises(NotImplementedError, match="of 32 columns, not 64 and 30"):
        fused(x, weight[:, :30])
    with pytest.raises(ValueError, match="has no gates"):
        fused(x, weight, is_gated=True)
    with pytest.raises(ValueError, match="residual"):
        fused(x, weight, residual=x)
