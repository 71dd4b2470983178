"""A bias by the distance from key to query, as T5 has it, in paged attention."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import paged_attention
from jaxserve.kernels.paged_attention.shapes import TEST_SHAPES, make_inputs
from tests.common.tiers import some

_SHAPES = {shape.name: shape for shape in TEST_SHAPES}


@pytest.mark.parametrize("distances", some([30, 1, 2, 200]))
@pytest.mark.parametrize("name", some(["mixed", "chunk", "decode", "multi_head"]))
@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_agrees_with_the_reference(implementation, name, distances):
    """Biases of near keys, and one for all keys that are further away, agree in any batch."""
    shape = _SHAPES[name]
    bias = jax.random.normal(jax.random.key(1), (shape.num_heads, distances))
    attend = partial(
        paged_attention,
        scale=1.0,
        distance_bias=bias,
        max_query_length=1 if shape.is_decode else None,
    )
    q, k_pages, v_pages, rows = make_inputs(shape, seed=3)
    got = jax.jit(partial(attend, implementation=implementation))(q, k_pages, v_pages, 1, rows)
    wanted = attend(q, k_pages, v_pages, 1, rows, implementation="reference")
    has_row = np.zeros(len(q), bool)
    of_rows = np.asarray(rows.query_start), np.asarray(rows.query_length)
    for start, length in zip(*of_rows, strict=True):
        has_row[start : start + length] = True
    without = paged_attention(q, k_pages, v_pages, 1, rows, scale=1.0, implementation="reference")
    got, wanted, without = (np.asarray(each)[has_row] for each in (got, wanted, without))
    assert distances == 1 or np.abs(wanted - without).max() > 1e-2
    np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_kernels_without_biases_refuse():
    """A kernel that has no biases, or not beside ALiBi, says so."""
    shape = _SHAPES["mixed"]
    q, k_pages, v_pages, rows = make_inputs(shape, seed=3)
    attend = partial(paged_attention, q, k_pages, v_pages, 1, rows)
    bias = jnp.zeros((shape.num_heads, 3))
    for name in ("triton_interpreted", "mosaic_interpreted"):
        with pytest.raises(NotImplementedError):
            attend(distance_bias=bias, implementation=name)
    with pytest.raises(NotImplementedError, match="not both"):
        attend(distance_bias=bias, alibi_slopes=jnp.zeros(shape.num_heads), implementation="cpu")
