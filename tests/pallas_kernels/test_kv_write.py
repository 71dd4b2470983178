"""Writing keys and values into pages agrees with the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write
from pallas_kernels.kv_write import reference


def _inputs(seed: int, dtype: str):
    """A ragged step: rows go on at random positions of scattered pages; padding on page 0."""
    random = np.random.default_rng(seed)
    layers, heads, head_dim = random.integers(1, 5, 3)
    page_size = int(random.choice([1, 4, 8]))
    starts, lengths = random.integers(0, 40, 5), random.integers(0, 20, 5)
    width = -(-60 // page_size)
    tables = 1 + random.permutation(5 * width).reshape(5, width)
    page, offset = [], []
    for table, start, length in zip(tables, starts, lengths, strict=True):
        position = start + np.arange(length)
        page.append(table[position // page_size])
        offset.append(position % page_size)
    padding = int(random.integers(0, 9))
    page.append(np.zeros(padding))
    offset.append(random.integers(0, page_size, padding))
    page, offset = (jnp.asarray(np.concatenate(x), jnp.int32) for x in (page, offset))
    pages = random.standard_normal((layers, 1 + tables.size, heads, page_size, head_dim))
    values = random.standard_normal((page.size, heads, head_dim))
    layer = int(random.integers(layers))
    return jnp.asarray(pages, dtype), layer, jnp.asarray(values, jnp.float32), page, offset


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(6))
def test_random_ragged_steps(seed, dtype):
    """Every page but the null page has the reference's bits, the layer static or traced."""
    pages, layer, *step = _inputs(seed, dtype)
    wanted = np.asarray(reference.kv_write(pages, layer, *step))
    assert not np.array_equal(wanted[:, 1:], pages[:, 1:])
    for got in (
        kv_write(pages, layer, *step),
        jax.jit(kv_write, static_argnums=1)(pages, layer, *step),
        jax.jit(kv_write)(pages, jnp.int32(layer), *step),
    ):
        assert got.dtype == pages.dtype
        np.testing.assert_array_equal(got[:, 1:], wanted[:, 1:])


def test_padding_reaches_only_its_place_on_the_null_page():
    """Several tokens at one place of page 0: one of them stays whole, nothing else changes."""
    pages = jnp.zeros((2, 3, 2, 4, 8))
    values = jnp.broadcast_to(jnp.arange(1.0, 4.0)[:, None, None], (3, 2, 8))
    where = jnp.zeros(3, jnp.int32)
    got = np.array(jax.jit(kv_write)(pages, jnp.int32(1), values, where, where + 2))
    assert np.isin(got[1, 0, :, 2], (1, 2, 3)).all()
    got[1, 0, :, 2] = 0
    assert not got.any()
