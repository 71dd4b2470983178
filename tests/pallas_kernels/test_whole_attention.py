"""Attention over whole sequences: the kernels' agrees with XLA's, and has the bits of serving."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import Rows, paged_attention, rotate_and_write, whole_attention
from tests.common.closeness import assert_close
from tests.common.tiers import some

# Compiled as a whole, once for all calls of the same shapes.
_whole_attention, _paged_attention, _rotate_and_write = (
    jax.jit(function, static_argnames=names)
    for function, names in (
        (partial(whole_attention, implementation="cpu"), "length"),
        (partial(paged_attention, implementation="cpu"), "layer"),
        (rotate_and_write, "layer"),
    )
)

# KV heads, query heads of each, head_dim.
SHAPE = (2, 3, 16)


def _draw(
    num_sequences: int, length: int, shape: tuple[int, int, int] = SHAPE
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    rng = np.random.default_rng(length)
    heads, group, width = shape
    qkv = rng.standard_normal((num_sequences * length, heads, group + 2, width), np.float32)
    angle = np.tile(np.arange(length), num_sequences)[:, None] * np.array([1.0, 0.1, 0.01])
    return jnp.asarray(qkv), (
        jnp.asarray(np.cos(angle), jnp.float32),
        jnp.asarray(np.sin(angle), jnp.float32),
    )


@pytest.mark.parametrize(
    "options",
    some(
        [
            dict(),
            dict(scale=0.5),
            dict(sliding_window=7),
            dict(soft_cap=3.0),
            dict(alibi_slopes=(0.5, 0.25, 0.1, 0.7, 0.3, 0.01)),
            dict(sinks=jnp.linspace(-2.0, 3.0, SHAPE[0] * SHAPE[1])),
        ],
        0,
        2,
        5,
    ),
    ids=["plain", "scale", "window", "cap", "alibi", "sinks"],
)
@pytest.mark.parametrize("is_rotated", some([False, True]))
def test_kernels_agree_with_xla(options: dict[str, Any], is_rotated):
    """Values and gradients agree, over page borders and for several sequences."""
    qkv, tables = _draw(3, 70)

    def out(qkv, implementation):
        rope = tables if is_rotated else None
        return whole_attention(qkv, rope, length=70, implementation=implementation, **options)

    def loss(qkv, implementation):
        return jnp.sum(jnp.sin(out(qkv, implementation)))

    for function in (out, jax.grad(loss)):
        function = jax.jit(function, static_argnums=1)
        got, wanted = (np.asarray(function(qkv, each)) for each in ("cpu", "xla"))
        assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize("shape", some([SHAPE, (4, 1, 8), (2, 3, 24), (1, 4, 64)], are_tuples=True))
def test_the_bits_are_those_of_serving(shape):
    """A token has the bits that it gets by chunks from pages of another size, and with padding.

    The kernel computes four queries at a time, and the last ones in threes, twos and ones.
    """
    length, page_size = 50, 8
    qkv, tables = _draw(1, length, shape)
    whole = np.asarray(_whole_attention(qkv, tables, length=length))
    pages = jnp.zeros((1, 8, shape[0], page_size, shape[2]))
    position = jnp.arange(length)
    q, keys, values, _, _ = _rotate_and_write(
        qkv, tables, pages, pages, 0, 1 + position // page_size, position % page_size
    )
    for first, count in ((0, 50), (0, 9), (9, 41), (47, 3), (48, 2), (49, 1)):
        rows = Rows(
            query_start=jnp.zeros(1, jnp.int32),
            query_length=jnp.full(1, count),
            first_position=jnp.full(1, first),
            context_length=jnp.full(1, first + count),
            page_table=1 + jnp.arange(7)[None],
        )
        got = _paged_attention(q[first : first + count], keys, values, 0, rows)
        np.testing.assert_array_equal(got, whole[first : first + count])
    padded = jnp.pad(qkv, ((0, 30), (0, 0), (0, 0), (0, 0)))
    long = [jnp.pad(each, ((0, 30), (0, 0))) for each in tables]
    got = _whole_attention(padded, (long[0], long[1]), length=80)
    np.testing.assert_array_equal(got[:length], whole)


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_is_refused():
    """Lengths that do not divide the tokens, and, for the kernels, other precisions."""
    qkv, _ = _draw(2, 8)
    with pytest.raises(ValueError, match="length=7 do not fit"):
        whole_attention(qkv, None, length=7)
    half = qkv.astype(jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="float32"):
        whole_attention(half, None, length=8, implementation="cpu")
    assert whole_attention(half, None, length=8).dtype == jnp.bfloat16
