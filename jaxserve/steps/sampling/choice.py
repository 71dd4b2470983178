"""Drawing a token from a truncated distribution, exactly, in integers.

A token's *gap* is (largest logit - its logit) / temperature, so its probability is proportional to
exp(-gap). Probabilities become 30-bit integers, whose sums do not depend on the order of
addition: a row draws the same token in any batch and however a sum is split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from jaxserve.kernels import log_sum_exp, row_maximum
from jaxserve.kernels.pointwise.xla import BLOCK, blocks_of


def argmax(
    x: Float32[Array, "rows vocab"],
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
    """Return the index (lowest of equals) and value of each row's maximum.

    A row that holds a NaN gives any index below `vocab` and any value.
    """
    return row_maximum(x)[:2]


def top_k(
    x: Float32[Array, "rows vocab"], k: int
) -> tuple[Float32[Array, "rows {k}"], Int32[Array, "rows {k}"]]:
    """Return values and indices as `jax.lax.top_k`: largest first, lower index of equals.

    The k largest entries are in the k blocks with the largest maxima. The blocks stay in index
    order, so that equal entries do too. A row that holds a NaN gives arbitrary values.
    """
    num_blocks = -(-x.shape[1] // BLOCK)
    if k >= num_blocks:
        values, index = jax.lax.top_k(x, k)
        return values, index
    blocks = blocks_of(x)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(x.shape[0], -1)
    values, places = jax.lax.top_k(candidates, k)
    block = jnp.take_along_axis(chosen, places // BLOCK, axis=1)
    return values, jnp.minimum(block * BLOCK + places % BLOCK, x.shape[1] - 1)


# Rows whose truncation ends within this many tokens need no search over the vocabulary.
_NEAREST = 128
_SUM_BITS = 30
_BLOCK = 256
_INFINITY_BITS = 0x7F800000


@final
@dataclass(frozen=True)
class RandomChoice:
    """The distributions that rows draw from, and which tokens are still in them."""

    gap: Float32[Array, "rows vocab"]  # infinity for tokens that cannot be drawn
    limit: Float32[Array, " rows"]  # the largest gap that can be drawn
    # The least likelihood that can be drawn; None for no such bound.
    least: Float32[Array, " rows"] | None = None

    def limited(self, limit: Float32[Array, " rows"]) -> RandomChoice:
        return replace(self, limit=jnp.minimum(self.limit, limit))

    def at_least(self, likelihood: Float32[Array, " rows"]) -> RandomChoice:
        least = likelihood if self.least is None else jnp.maximum(self.least, likelihood)
        return replace(self, least=least)

    def likelihood_of(self, gap: Float32[Array, "rows num"]) -> Float32[Array, "rows num"]:
        """Return likelihoods, proportional to probabilities: at most 1; 0 for excluded tokens."""
        likelihood = jnp.where(gap <= self.limit[:, None], jnp.exp(-gap), 0.0)
        if self.least is None:
            return likelihood
        return jnp.where(likelihood >= self.least[:, None], likelihood, 0.0)

    def logprob_of(self, token: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
        """Return the log-probability of one token a row, minus infinity for an excluded one."""
        is_kept = self.gap <= self.limit[:, None]
        if self.least is not None:
            is_kept &= jnp.exp(-self.gap) >= self.least[:, None]
        kept = jnp.where(is_kept, -self.gap, -jnp.inf)
        return jnp.take_along_axis(kept, token[:, None], axis=1)[:, 0] - log_sum_exp(kept)

    @property
    def likelihood(self) -> Float32[Array, "rows vocab"]:
        return self.likelihood_of(self.gap)

    @cached_property
    def nearest(self) -> Float32[Array, "rows num"]:
        """Return the least gaps in increasing order, whether kept or not."""
        gap = jax.lax.stop_gradient(self.gap)
        return -top_k(-gap, min(_NEAREST, gap.shape[1]))[0]


def draw(choice: RandomChoice, bits: UInt32[Array, " rows"]) -> Int32[Array, " rows"]:
    """Draw one token a row by the inverse distribution function, from uniform bits.

    An excluded token, or one of probability below about 2**-30, is never drawn. A row that holds a
    NaN gives any token.
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


def quantum(likelihood: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """Return factors that scale each row's likelihoods to a sum of 2**30, up to rounding."""
    vocab = likelihood.shape[1]
    coarse = float(2 ** (_SUM_BITS - vocab.bit_length()))
    floor_sum = jnp.sum((likelihood * coarse).astype(jnp.int32), axis=-1)
    return 2.0**_SUM_BITS * coarse / (floor_sum + vocab).astype(jnp.float32)


def quantize(
    likelihood: Float32[Array, "rows num"], factor: Float32[Array, " rows"]
) -> Int32[Array, "rows num"]:
    """Return the likelihoods times the row's factor, rounded down."""
    return (likelihood * factor[:, None]).astype(jnp.int32)


def least_gap(
    gap: Float32[Array, "rows vocab"],
    weights: Int32[Array, "rows vocab"],
    target: Int32[Array, " rows"],
) -> Float32[Array, " rows"]:
    """Return the least g at which the weights of tokens of gap <= g reach the target.

    Bisects the bit patterns of non-negative floats, which are ordered as the floats are, so the
    answer is exact. A target that is never reached gives infinity.
    """

    def halve(
        _: Int32[Array, ""], bounds: tuple[Int32[Array, " rows"], Int32[Array, " rows"]]
    ) -> tuple[Int32[Array, " rows"], Int32[Array, " rows"]]:
        low, high = bounds
        middle = low + (high - low) // 2
        limit = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(gap <= limit[:, None], weights, 0), axis=-1) >= target
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    low = jnp.zeros_like(target)
    _, high = jax.lax.fori_loop(0, 31, halve, (low, jnp.full_like(low, _INFINITY_BITS)))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _multiply_high(a: UInt32[Array, " rows"], b: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
    """Return the upper half of the 64-bit product."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
