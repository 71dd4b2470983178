"""Latent attention: queries, and keys and values, are made from a few dimensions of a token.

A head has its rotated dimensions first, and the cache has the keys and values of all heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, final

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import LayerContext
from jaxserve.models.linear import Linear, SumsRows
from jaxserve.models.norms import Norm, RMSNorm
from jaxserve.models.param_maker import ParamMaker
from jaxserve.models.projection import normed, with_residual
from jaxserve.models.weights import Tensor, Weight, neighbours


@final
class LatentAttention(SumsRows):
    """Attention whose queries, and whose keys and values, are made from a few dimensions.

    q_a    [embed, query_rank], q_b [query_rank, heads, head_dim]; or wq [embed, heads, head_dim]
    kv_a   [embed, latent_rank + rotated]    the rotated part is of all heads' keys
    kv_b   [latent_rank, heads, head_dim - rotated + value_dim]
    wo     [heads, value_dim, embed]
    q_norm [query_rank], kv_norm [latent_rank], and biases bq_a, bkv_a, bo where the config has them
    """

    def __init__(self, config: DecoderConfig, new: ParamMaker):
        assert config.latents is not None, "a model without latent attention"
        self.config, self.latents = config, config.latents
        embed, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        rank, rotated, has_bias = self.latents.latent_rank, _rotated(config), config.qkv_bias
        by_head = ("kv_heads", None)
        # Their epsilon is 1e-6, whatever that of the other norms is.
        small = replace(config, norm_eps=1e-6)
        query_rank, value_dim = self.latents.query_rank, self.latents.value_dim
        if query_rank is None:
            self.wq = new.weight(("embed", *by_head), (embed, heads, head_dim))
        else:
            self.q_a = new.weight(("embed", None), (embed, query_rank))
            self.bq_a = new.zeros((None,), (query_rank,)) if has_bias else None
            self.q_norm = RMSNorm(replace(small, hidden_size=query_rank), new)
            self.q_b = new.weight((None, *by_head), (query_rank, heads, head_dim))
        self.kv_a = new.weight(("embed", None), (embed, rank + rotated))
        self.bkv_a = new.zeros((None,), (rank + rotated,)) if has_bias else None
        self.kv_norm = RMSNorm(replace(small, hidden_size=rank), new)
        width = head_dim - rotated + value_dim
        self.kv_b = new.weight((None, *by_head), (rank, heads, width))
        self.wo = new.weight((*by_head, "embed"), (heads, value_dim, embed), num_in=2)
        self.bo = new.zeros(("embed",), (embed,)) if config.o_bias else None

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        context: LayerContext,
        *,
        norm: Norm | None = None,
        residual: Float[Array, "tokens embed"] | None = None,
    ) -> Float[Array, "tokens embed"]:
        """Return attention's addition to the residual stream, or with `residual` their sum."""
        config, latents = self.config, self.latents
        adapter, kernels = context.adapter, self.row_kernels
        x = normed(x, norm)

        def times(weight: Any, x: Array, bias: nnx.Param | None = None) -> Array:
            return Linear(weight, bias, row_kernels=kernels)(x, adapter)

        if latents.query_rank is None:
            q = times(self.wq, x)
        else:
            q = times(self.q_b, self.q_norm(times(self.q_a, x, self.bq_a)))
        latent, rotated = jnp.split(times(self.kv_a, x, self.bkv_a), (latents.latent_rank,), axis=1)
        kv = times(self.kv_b, self.kv_norm(latent))
        k, v = jnp.split(kv, (config.head_dim - _rotated(config),), axis=2)
        shared = jnp.broadcast_to(rotated[:, None], (*k.shape[:2], _rotated(config)))
        k = jnp.concatenate([shared, k], axis=2)
        v = jnp.pad(v, [(0, 0), (0, 0), (0, config.head_dim - latents.value_dim)])
        out = context.attend(
            jnp.stack([q, k, v], axis=2), scale=config.attention_scale, soft_cap=None
        )
        return with_residual(residual, times(self.wo, out[..., : latents.value_dim], self.bo))


def _rotated(config: DecoderConfig) -> int:
    """Return the number of a key's rotated dimensions."""
    assert config.rope is not None and config.rope.dim is not None
    return config.rope.dim


def latent_weights(
    config: DecoderConfig, attention: str, *, rotates_neighbours: bool
) -> dict[str, Weight]:
    """Return the weights of a `LatentAttention`; `attention` begins the names of its tensors.

    `rotates_neighbours` says whether checkpoints rotate neighbouring dimensions.
    """
    assert config.latents is not None
    path, rotated, rank = "blocks.attention.", _rotated(config), config.latents.latent_rank
    pairs = neighbours(rotated, rotated)["d"] if rotates_neighbours else list(range(rotated))
    unrotated = config.head_dim - rotated
    of_heads = {"d": [*(unrotated + i for i in pairs), *range(unrotated)]}
    of_latents = {"r": [*range(rank), *(rank + i for i in pairs)]}

    def queries(name: str) -> Weight:
        return Weight("e k d", (Tensor(attention + name, "(k d) e", order=of_heads),))

    return {
        f"{path}wq": queries("q_proj.weight"),
        f"{path}q_a": Weight.of(attention + "q_a_proj.weight", "e r", "r e"),
        f"{path}bq_a": Weight.of(attention + "q_a_proj.bias"),
        f"{path}q_norm.scale": Weight.of(attention + "q_a_layernorm.weight"),
        f"{path}q_b": queries("q_b_proj.weight"),
        f"{path}kv_a": Weight(
            "e r", (Tensor(attention + "kv_a_proj_with_mqa.weight", "r e", order=of_latents),)
        ),
        f"{path}bkv_a": Weight(
            "r", (Tensor(attention + "kv_a_proj_with_mqa.bias", "r", order=of_latents),)
        ),
        f"{path}kv_norm.scale": Weight.of(attention + "kv_a_layernorm.weight"),
        f"{path}kv_b": Weight.of(attention + "kv_b_proj.weight", "e k d", "(k d) e"),
        f"{path}wo": Weight.of(attention + "o_proj.weight", "k d e", "e (k d)"),
        f"{path}bo": Weight.of(attention + "o_proj.bias"),
    }
