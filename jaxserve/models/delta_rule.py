"""The gated delta rule (Yang et al., arXiv:2412.06464), a linear attention that overwrites.

A value head has a memory M [key_dim, value_dim]. A token decays it, replaces a part of the value
that it holds at the token's key, and reads it at the token's query:

  M = decay * M        M = M + k (rate * (v - M^T k))^T        y = M^T q

q, k and v come from a short causal convolution over the layer's inputs; q and k have length one.
Several tokens are computed at once (section 3.3 of the paper): what each of them adds at its key
is the solution of a triangular system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.convolution import CausalConvolution, check_kernel_size
from jaxserve.models.linear import Linear
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.recurrence import Advances, Arrays, Inputs, State, computed_once
from jaxserve.sharding.shards import whole

_LENGTH_EPS = 1e-6  # the number that is added to the square of a length


@final
@dataclass(frozen=True, kw_only=True)
class DeltaRuleSizes:
    """The sizes of a layer with the gated delta rule; see `Recurrence`."""

    # num_key_heads: heads of queries and keys; value heads of a group share one.
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int  # inputs that the convolution sees

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise UnsupportedModelError(
                f"{self.num_value_heads} heads of values for {self.num_key_heads} heads of keys in "
                "linear attention: the first number must be a multiple of the second"
            )
        check_kernel_size(self.kernel_size)

    @property
    def group(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def keys(self) -> int:
        """The width of all heads' keys."""
        return self.num_key_heads * self.key_dim

    @property
    def inner(self) -> int:
        """The width of all heads' values."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The width of the convolution: queries, keys and values."""
        return 2 * self.keys + self.inner

    def mixer(self, config: DecoderConfig, new: ParamMaker) -> DeltaRuleMixer:
        return DeltaRuleMixer(config, new)

    def arrays(self, dtype: jax.typing.DTypeLike) -> Arrays:
        """Return `Recurrence.arrays`. The memory is a long sum, so it is in float32."""
        return {
            "window": ((self.kernel_size - 1, self.channels), dtype),
            "memory": ((self.num_value_heads, self.key_dim, self.value_dim), jnp.float32),
        }


@final
class DeltaRuleMixer(nnx.Module):
    """The part of a layer that mixes tokens, instead of attention.

    project      [embed, channels + inner]           q, k, v of all heads; gate
    rates        [embed, 2, key_heads, group]        rate and decay of each value head
    convolution                                      a `CausalConvolution` over q, k and v
    out          [inner, embed]
    scale        [value_dim]    of the norm before the gate
    a_log, step_bias  [key_heads, group], float32    of the decay
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        assert isinstance(config.recurrence, DeltaRuleSizes)
        self.sizes = sizes = config.recurrence
        self.dtype, self.eps = config.dtype, config.norm_eps
        embed, heads = config.hidden_size, (sizes.num_key_heads, sizes.group)
        wide = new.with_dtype("float32")
        width = sizes.channels + sizes.inner
        self.project = new.weight(("embed", "channels"), (embed, width))
        self.rates = new.weight(("embed", None, None, None), (embed, 2, *heads))
        self.convolution = CausalConvolution(sizes.kernel_size, sizes.channels, new, has_bias=False)
        self.out = new.weight(("channels", "embed"), (sizes.inner, embed))
        self.scale = new.ones((None,), (sizes.value_dim,))
        self.a_log = wide.zeros((None, None), heads)
        self.step_bias = wide.ones((None, None), heads)

    @property
    def advances(self) -> Advances:
        return ((self._advance, self.sizes.arrays(self.dtype)),)

    def __call__(
        self, x: Float[Array, "tokens embed"], context: LayerContext
    ) -> Float[Array, "tokens embed"]:
        """Return the mixer's addition to the residual stream, for `x` after the norm."""
        sizes = self.sizes
        projected = whole(Linear(self.project)(x, context.adapter))
        qkv, gate = whole(jnp.split(projected, [sizes.channels], axis=-1))
        inputs = {"qkv": qkv, "rates": Linear(self.rates)(x, context.adapter)}
        y = context.recur(*self.advances[0], inputs)
        return Linear(self.out)(self._gated_norm(y, gate), context.adapter)

    def _gated_norm(
        self, y: Float32[Array, "tokens inner"], gate: Float[Array, "tokens inner"]
    ) -> Float[Array, "tokens inner"]:
        """Return silu(gate) times an RMS norm of y over each head."""
        heads = y.reshape(y.shape[0], self.sizes.num_value_heads, self.sizes.value_dim)
        mean = jnp.mean(jnp.square(heads), axis=-1, keepdims=True)
        normed = heads * lax.rsqrt(mean + self.eps) * self.scale[...].astype(jnp.float32)
        return (normed.reshape(y.shape) * jax.nn.silu(gate.astype(jnp.float32))).astype(self.dtype)

    def _advance(
        self, state: State, inputs: Inputs, count: Int32[Array, ""]
    ) -> tuple[Float32[Array, "tokens inner"], State]:
        sizes, qkv = self.sizes, inputs["qkv"]
        convolved, window = self.convolution(state["window"], qkv, count)
        borders = [sizes.keys, 2 * sizes.keys]
        q, k, v = whole(jnp.split(jax.nn.silu(convolved), borders, axis=-1))
        num_tokens, heads = qkv.shape[0], sizes.num_key_heads
        is_valid = (jnp.arange(num_tokens) < count)[:, None, None]
        rates = inputs["rates"].astype(jnp.float32)
        decay = -jnp.exp(self.a_log[...]) * jax.nn.softplus(rates[:, 1] + self.step_bias[...])
        memory = state["memory"]
        y, new = delta_rule(
            _of_length_one(q.reshape(num_tokens, heads, -1)) * sizes.key_dim**-0.5,
            _of_length_one(k.reshape(num_tokens, heads, -1)),
            v.reshape(num_tokens, heads, sizes.group, -1),
            jnp.where(is_valid, jax.nn.sigmoid(rates[:, 0]), 0.0),
            jnp.where(is_valid, decay, 0.0),
            memory.reshape(heads, sizes.group, *memory.shape[1:]),
        )
        return y.reshape(num_tokens, -1), {"window": window, "memory": new.reshape(memory.shape)}


def delta_rule(
    q: Float32[Array, "tokens key_heads key_dim"],
    k: Float32[Array, "tokens key_heads key_dim"],
    v: Float32[Array, "tokens key_heads group value_dim"],
    rate: Float32[Array, "tokens key_heads group"],
    decay: Float32[Array, "tokens key_heads group"],  # a logarithm, at most 0
    memory: Float32[Array, "key_heads group key_dim value_dim"],
) -> tuple[
    Float32[Array, "tokens key_heads group value_dim"],
    Float32[Array, "key_heads group key_dim value_dim"],
]:
    """Return outputs and memory after tokens of one sequence.

    A token whose rate and decay are 0 changes nothing. Tokens read the memory before all of them
    only once, with all keys and queries.
    """
    # Heads come first, because XLA's products on the CPU are slow with batch axes elsewhere.
    num_tokens, group = q.shape[0], v.shape[2]
    q, k = (jnp.repeat(x.swapaxes(0, 1)[:, None], group, axis=1) for x in (q, k))
    v = v.transpose(1, 2, 0, 3)
    rate, total = rate.transpose(1, 2, 0), jnp.cumsum(decay.transpose(1, 2, 0), axis=-1)
    old = jnp.einsum("hgxk,hgkv->hgxv", jnp.concatenate([k, q], axis=2), memory)
    q, k, v = map(computed_once, (q, k, v))
    kept = computed_once(jnp.exp(total))[..., None]
    at_key, y = kept * old[:, :, :num_tokens], kept * old[:, :, num_tokens:]
    added = computed_once(rate[..., None] * (v - at_key))
    if num_tokens == 1:
        y += jnp.sum(q * k, axis=-1, keepdims=True) * added
        new = kept * memory + k[:, :, 0, :, None] * added
    else:
        added, more = _added(q, k, added, rate, total)
        y += more
        left = jnp.exp(total[..., -1:] - total)[..., None] * added
        new = kept[:, :, -1:] * memory + jnp.einsum("hgtk,hgtv->hgkv", k, left)
    return y.transpose(2, 0, 1, 3), new


def _added(
    q: Float32[Array, "key_heads group tokens key_dim"],
    k: Float32[Array, "key_heads group tokens key_dim"],
    alone: Float32[Array, "key_heads group tokens value_dim"],
    rate: Float32[Array, "key_heads group tokens"],
    total: Float32[Array, "key_heads group tokens"],
) -> tuple[
    Float32[Array, "key_heads group tokens value_dim"],
    Float32[Array, "key_heads group tokens value_dim"],
]:
    """Return what each token adds at its key, and what queries read of these additions.

    `alone` is what it would add without the tokens before it, `total` the decay so far.
    """
    order = jnp.arange(q.shape[2])
    between = total[..., :, None] - total[..., None, :]
    between = jnp.exp(jnp.where(order[:, None] >= order, between, -jnp.inf))
    # Keys and queries are the same for all heads of a group.
    both = jnp.einsum("hxk,huk->hxu", jnp.concatenate([k, q], axis=2)[:, 0], k[:, 0])
    at_keys, at_queries = jnp.split(both[:, None], 2, axis=2)
    before = jnp.where(order[:, None] > order, at_keys * between * rate[..., None], 0.0)
    added = jnp.einsum("hgtu,hguv->hgtv", _inverse_of_one_plus(before), alone)
    return added, jnp.einsum("hgtu,hguv->hgtv", at_queries * between, added)


def _inverse_of_one_plus(
    x: Float32[Array, "*batch tokens tokens"],
) -> Float32[Array, "*batch tokens tokens"]:
    """Return the inverse of 1 + x, for x with numbers below the diagonal only.

    It is computed from the inverses of both halves of the diagonal: few products of many matrices,
    which are faster than to solve row by row.
    """
    size = x.shape[-1]
    if size == 1:
        return jnp.ones_like(x)
    half = -(-size // 2)
    # The second block has a row of zeros more if the size is odd.
    rest = [(0, 0)] * (x.ndim - 2) + [(0, 2 * half - size)] * 2
    x = jnp.pad(x, rest)
    blocks = jnp.stack([x[..., :half, :half], x[..., half:, half:]])
    first, second = _inverse_of_one_plus(blocks)
    corner = -_times(second, _times(x[..., half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    lower = jnp.concatenate([corner, second], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)[..., :size, :size]


def _times(
    x: Float32[Array, "*batch tokens tokens"], y: Float32[Array, "*batch tokens tokens"]
) -> Float32[Array, "*batch tokens tokens"]:
    """Return the products of many matrices, which XLA on the CPU does not expect to be small."""
    if x.shape[-1] < 8:
        return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)
    return jnp.einsum("...ij,...jk->...ik", x, y)


def _of_length_one(
    x: Float32[Array, "tokens heads key_dim"],
) -> Float32[Array, "tokens heads key_dim"]:
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(square + _LENGTH_EPS)
