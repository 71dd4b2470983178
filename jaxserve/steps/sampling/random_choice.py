"""Drawing a token from a truncated distribution, exactly, in integers.

A token's *gap* is (largest logit - its logit) / temperature, so its probability is in proportion to
exp(-gap). Probabilities become 30-bit integers, whose sums do not depend on the order of
addition: a row draws the same token whatever batch it is in and however a sum is split up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.steps.sampling.top_k import top_k

# Rows whose top-k and top-p end within this many tokens need no search over the vocabulary.
_NEAREST = 128
_SUM_BITS = 30
_BLOCK = 256
_INFINITY_BITS = 0x7F800000


def truncation_limit(
    gap: jax.Array,  # f32 [R, V]
    top_k_: jax.Array,  # i32 [R], 0 is off
    top_p: jax.Array,  # f32 [R], 1 is off
) -> jax.Array:
    """F32 [R]: top-k, then top-p of what it left, keep the tokens whose gap is at most this.

    Tokens tied at a threshold are all kept.
    """
    k = min(_NEAREST, gap.shape[1])
    nearest = -top_k(-gap, k)[0]

    last = jnp.take_along_axis(nearest, jnp.clip(top_k_ - 1, 0, k - 1)[:, None], axis=1)[:, 0]
    wide = top_k_ > k
    k_limit = jax.lax.cond(
        jnp.any(wide),
        lambda: jnp.where(wide, _search(gap, jnp.ones(gap.shape, jnp.int32), top_k_), last),
        lambda: last,
    )
    k_limit = jnp.where(top_k_ > 0, k_limit, jnp.inf)

    scale = _scale(_likelihood(gap, k_limit))
    weights = _quantize(_likelihood(gap, k_limit), scale)
    total = jnp.sum(weights, axis=-1)
    target = jnp.ceil(top_p * total.astype(jnp.float32)).astype(jnp.int32)
    target = jnp.clip(target, 1, total)
    reached = jnp.cumsum(_quantize(_likelihood(nearest, k_limit), scale), axis=-1)
    place = jnp.sum(reached < target[:, None], axis=-1, dtype=jnp.int32)
    last = jnp.take_along_axis(nearest, jnp.minimum(place, k - 1)[:, None], axis=1)[:, 0]
    wide = (top_p < 1) & (place == k)
    p_limit = jax.lax.cond(
        jnp.any(wide),
        lambda: jnp.where(wide, _search(gap, weights, target), last),
        lambda: last,
    )
    return jnp.where(top_p < 1, jnp.minimum(p_limit, k_limit), k_limit)


def draw(
    gap: jax.Array,  # f32 [R, V]
    limit: jax.Array,  # f32 [R]: largest gap that may be drawn
    min_p: jax.Array,  # f32 [R]
    bits: jax.Array,  # u32 [R], uniform
) -> jax.Array:
    """I32 [R]: one token a row by inverse distribution function.

    Never a token past `limit`, below `min_p`, or of probability under about 2**-30. A row that
    holds a NaN gives any token.
    """
    likelihood = _likelihood(gap, limit)
    likelihood = jnp.where(likelihood >= min_p[:, None], likelihood, 0.0)
    weights = _quantize(likelihood, _scale(likelihood))
    padded = jnp.pad(weights, ((0, 0), (0, -gap.shape[1] % _BLOCK)))
    blocks = padded.reshape(gap.shape[0], -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    rank = _multiply_high(bits, ends[:, -1].astype(jnp.uint32)).astype(jnp.int32)
    block = jnp.sum(ends <= rank[:, None], axis=-1, dtype=jnp.int32)
    block = jnp.minimum(block, sums.shape[1] - 1)[:, None]
    rank -= jnp.take_along_axis(ends - sums, block, axis=1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    offset = jnp.sum(jnp.cumsum(inside, axis=-1) <= rank[:, None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(block[:, 0] * _BLOCK + offset, gap.shape[1] - 1)


def _likelihood(gap: jax.Array, limit: jax.Array) -> jax.Array:
    """F32 [R, n]: in proportion to probability, 1 for the likeliest, 0 past the limit."""
    return jnp.where(gap <= limit[:, None], jnp.exp(-gap), 0.0)


def _scale(likelihood: jax.Array) -> jax.Array:
    """F32 [R]: brings a row's likelihoods to a sum of at most about 2**30, and near it."""
    vocab = likelihood.shape[1]
    coarse = float(2 ** (_SUM_BITS - vocab.bit_length()))
    floor_sum = jnp.sum((likelihood * coarse).astype(jnp.int32), axis=-1)
    return 2.0**_SUM_BITS * coarse / (floor_sum + vocab).astype(jnp.float32)


def _quantize(likelihood: jax.Array, scale: jax.Array) -> jax.Array:
    return (likelihood * scale[:, None]).astype(jnp.int32)


def _search(gap: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """F32 [R]: the least gap g at which the weights of tokens of gap <= g sum to the target.

    Bisects the bit patterns of non-negative floats, which are ordered as the floats are, so the
    answer is exact. A target that is never reached gives infinity.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        limit = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(gap <= limit[:, None], weights, 0), axis=-1) >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros_like(target)
    _, high = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, _INFINITY_BITS)))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """U32: the upper half of the 64-bit product."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
