"""Attention: which keys a query sees, and the layers that project queries, keys and values.

Three kinds share the contract of `jaxserve.kernels.paged_attention`, which is causal by position: a
query at position p sees the keys of its row's page table at positions up to p, and below the
context's length. The kinds differ in the rows that they make, and in what they write:

=============  =====================  ==========================  ================================
kind           rows                   pages that a row names      writes
=============  =====================  ==========================  ================================
causal         `causal_rows`          of its own sequence         its keys and values, at each step
bidirectional  `bidirectional_rows`   of its own sequence         likewise; a sequence in one step
cross          `cross_rows`           of the encoder's sequence   nothing; `CrossAttention.write`
                                                                  does, once a sequence
=============  =====================  ==========================  ================================

A position in `Rows` only says what a query sees. Rotary embeddings and learned positions follow
`AttentionBatch.positions`, the place of a token in its own sequence for all kinds. Sliding windows
and ALiBi count from the position in the rows, so they belong to causal attention only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jaxserve.kernels import Rows
from jaxserve.models.config import DecoderConfig, QueryGrowth
from jaxserve.models.context import CrossContext, LayerContext
from jaxserve.models.linear import Linear, SumsRows
from jaxserve.models.norms import HeadLayerNorm, LayerNorm, Norm, RMSNorm, UnitRMSNorm, WideRMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.projection import projected
from jaxserve.models.weights import Tensor, Weight


def causal_rows(
    *,
    query_start: Int32[Array, " rows"],
    query_length: Int32[Array, " rows"],
    first_position: Int32[Array, " rows"],
    page_table: Int32[Array, "rows row_pages"],
) -> Rows:
    """Return rows whose queries see the keys up to their own positions.

    The last query of a row is the last token of its sequence whose key exists.
    """
    return Rows(
        query_start=query_start,
        query_length=query_length,
        first_position=first_position,
        context_length=first_position + query_length,
        page_table=page_table,
    )


def bidirectional_rows(
    *,
    query_start: Int32[Array, " rows"],
    length: Int32[Array, " rows"],
    page_table: Int32[Array, "rows row_pages"],
) -> Rows:
    """Return rows of whole sequences, whose queries see the keys of all their `length` tokens.

    All tokens of a sequence are in one step: each layer writes all their keys before the first
    query reads.
    """
    return _seeing_all(query_start, length, length, page_table)


def cross_rows(
    *,
    query_start: Int32[Array, " rows"],
    query_length: Int32[Array, " rows"],
    encoded_length: Int32[Array, " rows"],
    encoded_page_table: Int32[Array, "rows row_pages"],
) -> Rows:
    """Return rows whose queries see all `encoded_length` keys of another sequence's pages.

    `CrossAttention.write` has written that sequence's keys and values before.
    """
    return _seeing_all(query_start, query_length, encoded_length, encoded_page_table)


def _seeing_all(
    query_start: Int32[Array, " rows"],
    query_length: Int32[Array, " rows"],
    num_keys: Int32[Array, " rows"],
    page_table: Int32[Array, "rows row_pages"],
) -> Rows:
    """Return rows whose first query is at the last key, and whose other queries follow it."""
    return Rows(
        query_start=query_start,
        query_length=query_length,
        first_position=jnp.maximum(num_keys - 1, 0),
        context_length=num_keys,
        page_table=page_table,
    )


@final
class Attention(SumsRows):
    """Grouped-query attention of sequences over their own keys, causal or bidirectional.

    wqkv   [embed, kv_heads, group + 2, head_dim]   a KV head: its queries, k, v
    wo     [kv_heads, group, head_dim, embed]
    sinks  [kv_heads, group]
    bqkv, bo, q_norm, k_norm and sinks              where the config has them

    With `attention_gate`, a KV head of wqkv begins with a gate for each of its queries.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.config = config
        embed, head_dim = config.hidden_size, config.head_dim
        kv_heads, group = config.num_kv_heads, config.group
        columns = group + 2 + group * config.attention_gate
        heads, shape = ("kv_heads", None, None), (kv_heads, columns, head_dim)
        if config.has_sinks:
            self.sinks = new.zeros(("kv_heads", None), (kv_heads, group))
        self.wqkv = new.weight(("embed", *heads), (embed, *shape))
        self.wo = new.weight((*heads, "embed"), (kv_heads, group, head_dim, embed), num_in=3)
        self.bqkv = new.zeros(heads, shape) if config.qkv_bias else None
        self.bo = new.zeros(("embed",), (embed,)) if config.o_bias else None
        if config.qk_norm:
            self.q_norm = RMSNorm(config, new, of_heads=True)
            self.k_norm = RMSNorm(config, new, of_heads=True)
        elif config.unit_qk_norm:
            self.q_norm, self.k_norm = UnitRMSNorm(config), UnitRMSNorm(config)
        elif config.wide_qk_norm:
            self.q_norm = WideRMSNorm(config, new, num_heads=group)
            self.k_norm = WideRMSNorm(config, new, num_heads=1)
        elif config.layer_qk_norm:
            self.q_norm = HeadLayerNorm(config, new, num_heads=group)
            self.k_norm = HeadLayerNorm(config, new, num_heads=1)
        elif config.shared_layer_qk_norm:
            of_heads = replace(config, hidden_size=head_dim)
            self.q_norm, self.k_norm = LayerNorm(of_heads, new), LayerNorm(of_heads, new)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        """Return attention's addition to the residual stream, or with `residual` their sum.

        `norm` is applied to `x` first.
        """
        config, group = self.config, self.config.group
        # [tokens, kv_heads, columns, head_dim]
        kernels = self.row_kernels
        linear = Linear(self.wqkv, self.bqkv, row_kernels=kernels)
        qkv = projected(linear, x, context.adapter, norm=norm)
        gate = None
        if config.attention_gate:
            gate, qkv = jnp.split(qkv, (group,), axis=2)
        if config.has_qk_norm:
            q, k, v = jnp.split(qkv, (group, group + 1), axis=2)
            if config.rotates_before_norm:
                q, k = context.rotated(q), context.rotated(k)
            qkv = jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=2)
        if config.qkv_clip is not None:
            qkv = jnp.clip(qkv, -config.qkv_clip, config.qkv_clip)
        if config.query_growth is not None:
            q, kv = jnp.split(qkv, (group,), axis=2)
            q = q * _growth(config.query_growth, context.positions(len(q)), q.dtype)
            qkv = jnp.concatenate([q, kv], axis=2)
        out = context.attend(
            qkv,
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            alibi_slopes=config.alibi_slopes,
            sinks=self.sinks[...].reshape(-1) if config.has_sinks else None,
            is_rotated=config.rotates_before_norm,
        )
        out = out.reshape(-1, config.num_kv_heads, group, config.head_dim)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        linear = Linear(self.wo, self.bo, row_kernels=kernels)
        return projected(linear, out, context.adapter, residual=residual)


def _growth(
    growth: QueryGrowth, positions: Int32[Array, " tokens"], dtype: jax.typing.DTypeLike
) -> Float[Array, "tokens 1 1 1"]:
    """Return the factor of each token's queries."""
    periods = ((positions + growth.offset) // growth.period).astype(jnp.float32)
    return (1.0 + growth.beta * jnp.log1p(periods)).astype(dtype)[:, None, None, None]


@final
class PaddedAttention(SumsRows):
    """Causal attention of a layer whose heads are narrower than those of the cache, as in Gemma 4.

    wqkv  [embed, kv_heads, group + 2, head_dim]   or wqk without values, or wq of shared keys
    wo    [kv_heads, group, head_dim, embed]
    q_norm, k_norm  [head_dim]                     values have a norm without a scale
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        assert config.layer_heads is not None, "a layer without heads of its own"
        self.heads = heads = config.layer_heads
        self.padded_dim, self.scale = config.head_dim, config.attention_scale
        kv_heads, head_dim, is_shared = heads.num_kv_heads, heads.head_dim, heads.is_shared
        self.group = group = config.num_heads // kv_heads
        axes, embed = ("kv_heads", None, None), config.hidden_size
        columns = group + (0 if is_shared else 1 + heads.has_values)
        weight = new.weight(("embed", *axes), (embed, kv_heads, columns, head_dim))
        if is_shared:
            self.wq = weight
        elif heads.has_values:
            self.wqkv = weight
        else:
            self.wqk = weight
        self.wo = new.weight((*axes, "embed"), (kv_heads, group, head_dim, embed), num_in=3)
        of_heads = replace(config, hidden_size=head_dim)
        self.q_norm = RMSNorm(of_heads, new)
        if not is_shared:
            self.k_norm, self.v_norm = RMSNorm(of_heads, new), UnitRMSNorm(config)

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        """Return `Attention`'s result."""
        heads, group, kernels = self.heads, self.group, self.row_kernels
        weight = self.wq if heads.is_shared else self.wqkv if heads.has_values else self.wqk
        qkv = projected(Linear(weight, row_kernels=kernels), x, context.adapter, norm=norm)
        q = self.q_norm(qkv[:, :, :group])
        if heads.is_shared:
            out = context.attend_shared(self._padded(q), scale=self.scale)
        else:
            k, v = qkv[:, :, group : group + 1], qkv[:, :, -1:]
            qkv = jnp.concatenate([q, self.k_norm(k), self.v_norm(v)], axis=2)
            out = context.attend(self._padded(qkv), scale=self.scale, soft_cap=None)
        out = out[..., : heads.head_dim].reshape(-1, heads.num_kv_heads, group, heads.head_dim)
        linear = Linear(self.wo, row_kernels=kernels)
        return projected(linear, out, context.adapter, residual=residual)

    def _padded(
        self, qkv: Float[Array, "tokens kv_heads columns head_dim"]
    ) -> Float[Array, "tokens kv_heads columns padded_dim"]:
        return jnp.pad(qkv, ((0, 0),) * 3 + ((0, self.padded_dim - qkv.shape[-1]),))


@final
class CrossAttention(nnx.Module):
    """Grouped-query attention of a decoder's sequences over the encoder's output.

    wq    [embed, kv_heads, group, head_dim]
    wkv   [embed, kv_heads, 2, head_dim]      a KV head: its key, its value
    wo    [kv_heads, group, head_dim, embed]
    bq, bkv, bo                               where the config has them

    `CrossBlock` puts it between attention and MLP.
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        self.config = config
        embed, head_dim = config.hidden_size, config.head_dim
        kv_heads, group = config.num_kv_heads, config.group
        heads = ("kv_heads", None, None)
        self.wq = new.weight(("embed", *heads), (embed, kv_heads, group, head_dim))
        self.wkv = new.weight(("embed", *heads), (embed, kv_heads, 2, head_dim))
        self.wo = new.weight((*heads, "embed"), (kv_heads, group, head_dim, embed), num_in=3)
        has_bias = config.qkv_bias
        self.bq = new.zeros(heads, (kv_heads, group, head_dim)) if has_bias else None
        self.bkv = new.zeros(heads, (kv_heads, 2, head_dim)) if has_bias else None
        self.bo = new.zeros(("embed",), (embed,)) if config.o_bias else None

    def write(self, encoded: Float[Array, "tokens embed"], context: CrossContext) -> None:
        """Write the keys and values of the encoder's output to the cache."""
        context.write(Linear(self.wkv, self.bkv)(encoded, context.adapter))

    def __call__(
        self, x: Float[Array, "tokens embed"], context: CrossContext
    ) -> Float[Array, "tokens embed"]:
        """Return attention's addition to the residual stream, for `x` after the norm."""
        config = self.config
        q = Linear(self.wq, self.bq)(x, context.adapter)
        q = q.reshape(-1, config.num_heads, config.head_dim)
        out = context.attend(q, scale=config.attention_scale, soft_cap=config.attention_soft_cap)
        out = out.reshape(-1, config.num_kv_heads, config.group, config.head_dim)
        return Linear(self.wo, self.bo)(out, context.adapter)


def padded_weights(attention: str) -> dict[str, Weight]:
    """Return the weights of a `PaddedAttention`; `attention` begins the names of its tensors."""
    path, layout = "blocks.attention", "(k x d) e"

    def columns(**part: slice) -> Weight:
        tensors = (Tensor(f"{attention}{n}_proj.weight", layout, x=x) for n, x in part.items())
        return Weight("e k x d", tuple(tensors))

    return {
        f"{path}.wqkv": columns(q=slice(0, -2), k=slice(-2, -1), v=slice(-1, None)),
        f"{path}.wqk": columns(q=slice(0, -1), k=slice(-1, None)),
        f"{path}.wq": columns(q=slice(None)),
        f"{path}.wo": Weight.of(attention + "o_proj.weight", "k g d e", "e (k g d)"),
        f"{path}.q_norm.scale": Weight.of(attention + "q_norm.weight"),
        f"{path}.k_norm.scale": Weight.of(attention + "k_norm.weight"),
    }
