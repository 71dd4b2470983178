"""Drawing a token from a truncated distribution, exactly, in integers.

A token's *gap* is (largest logit - its logit) / temperature, so its probability is in proportion to
exp(-gap). Probabilities become 30-bit integers, whose sums do not depend on the order of
addition: a row draws the same token in any batch and however a sum is split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import jax
import jax.numpy as jnp

from jaxserve.steps.sampling.largest import top_k

# Rows whose truncation ends within this many tokens need no search over the vocabulary.
_NEAREST = 128
_SUM_BITS = 30
_BLOCK = 256
_INFINITY_BITS = 0x7F800000


@final
@dataclass(frozen=True)
class RandomChoice:
    """The distributions that R rows draw from, and which tokens are still in them.

    Attributes:
      gap: float32 [R, V], infinity for tokens that cannot be drawn.
      limit: float32 [R], the largest gap that can be drawn.
      least: float32 [R], the least likelihood that can be drawn; None for no such bound.
    """

    gap: jax.Array
    limit: jax.Array
    least: jax.Array | None = None

    def limited(self, limit: jax.Array) -> RandomChoice:
        """Keep only the tokens whose gap is at most `limit`, float32 [R]."""
        return replace(self, limit=jnp.minimum(self.limit, limit))

    def at_least(self, likelihood: jax.Array) -> RandomChoice:
        """Keep only the tokens of at least this likelihood, float32 [R]."""
        least = likelihood if self.least is None else jnp.maximum(self.least, likelihood)
        return replace(self, least=least)

    def likelihood_of(self, gap: jax.Array) -> jax.Array:
        """Return likelihoods, float32 [R, n]: 1 for the likeliest token, 0 for what is out.

        They are in proportion to probabilities.
        """
        likelihood = jnp.where(gap <= self.limit[:, None], jnp.exp(-gap), 0.0)
        if self.least is None:
            return likelihood
        return jnp.where(likelihood >= self.least[:, None], likelihood, 0.0)

    @property
    def likelihood(self) -> jax.Array:
        """`likelihood_of` every token, float32 [R, V]."""
        return self.likelihood_of(self.gap)

    @cached_property
    def nearest(self) -> jax.Array:
        """The n least gaps in increasing order, whether kept or not, float32 [R, n]."""
        return -top_k(-self.gap, min(_NEAREST, self.gap.shape[1]))[0]


def draw(choice: RandomChoice, bits: jax.Array) -> jax.Array:
    """Draw one token a row by the inverse distribution function, int32 [R].

    A token that is out, or of probability under about 2**-30, is never drawn. A row that holds a
    NaN gives any token.

    Args:
      bits: uint32 [R], uniform.
    """
    likelihood = choice.likelihood
    weights = quantize(likelihood, quantum(likelihood))
    num_rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK)))
    blocks = padded.reshape(num_rows, -1, _BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(sums, axis=-1)
    rank = _multiply_high(bits, ends[:, -1].astype(jnp.uint32)).astype(jnp.int32)
    block = jnp.sum(ends <= rank[:, None], axis=-1, dtype=jnp.int32)
    block = jnp.minimum(block, sums.shape[1] - 1)[:, None]
    rank -= jnp.take_along_axis(ends - sums, block, axis=1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    offset = jnp.sum(jnp.cumsum(inside, axis=-1) <= rank[:, None], axis=-1, dtype=jnp.int32)
    return jnp.minimum(block[:, 0] * _BLOCK + offset, vocab - 1)


def quantum(likelihood: jax.Array) -> jax.Array:
    """Return factors, float32 [R], that bring each row's likelihoods [R, V] to a sum near 2**30.

    The sum exceeds 2**30 by rounding at most.
    """
    vocab = likelihood.shape[1]
    coarse = float(2 ** (_SUM_BITS - vocab.bit_length()))
    floor_sum = jnp.sum((likelihood * coarse).astype(jnp.int32), axis=-1)
    return 2.0**_SUM_BITS * coarse / (floor_sum + vocab).astype(jnp.float32)


def quantize(likelihood: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the likelihoods times the row's factor, rounded down, int32 [R, n]."""
    return (likelihood * factor[:, None]).astype(jnp.int32)


def least_gap(gap: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Return the least g, float32 [R], at which the weights of tokens of gap <= g reach the target.

    Bisects the bit patterns of non-negative floats, which are ordered as the floats are, so the
    answer is exact. A target that is never reached gives infinity.

    Args:
      gap: float32 [R, V].
      weights: int32 [R, V].
      target: int32 [R].
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
    """Return the upper half of the 64-bit product, uint32."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
