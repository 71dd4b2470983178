"""The Llama family (Llama 2/3, Mistral, Qwen 2/3, SmolLM2) as one config-driven Flax module.

Parameters are fused and stored [in, out]; each says its logical axes in its metadata, for
`sharding.state_shardings`:

    embedding            [vocab, embed]
    norm.scale           [embed]
    lm_head              [embed, vocab]                       absent when tied
    block wqkv           [embed, kv_heads, group + 2, head_dim]   a KV head: its queries, k, v
          wo             [kv_heads, group, head_dim, embed]
          gate_up        [embed, 2, mlp]
          down           [mlp, embed]
          attention_norm, mlp_norm   [embed]
          q_norm, k_norm [head_dim]                           Qwen 3
          bqkv, bo, bgate_up, bdown                           where the config has biases
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, final

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.batch import AttentionBatch, KVCache
from jaxserve.models.config import LlamaConfig
from jaxserve.models.rope import apply_rope, rope_tables
from pallas_kernels import matmul

LayerLayout = Literal["unrolled", "scanned"]
RopeTables = tuple[jax.Array, jax.Array]


@final
class Llama(nnx.Module):
    """A decoder over a flat ragged batch and a paged KV cache.

    Args:
      rngs: for random weights; None for zeros where only shapes matter, as `nnx.eval_shape` does.
      dtype: of the parameters and of the activations.
      layer_layout: `unrolled` has a block and a cache buffer a layer; `scanned` stacks both
        ([layers, ...]) and loops with `lax.scan`.

    Raises:
      UnsupportedModelError: scanned layers with differing sliding windows.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs | None,
        dtype: jax.typing.DTypeLike = jnp.float32,
        layer_layout: LayerLayout = "unrolled",
    ):
        self.config = config
        self.layer_layout = layer_layout
        new = _ParamMaker(rngs, dtype)
        self.embedding = new(("vocab", "embed"), (config.vocab_size, config.hidden_size))
        self.norm = new(("embed",), (config.hidden_size,))
        if not config.tie_word_embeddings:
            self.lm_head = new(("embed", "vocab"), (config.hidden_size, config.vocab_size))
        if layer_layout == "unrolled":
            self.blocks = nnx.List([LlamaBlock(config, new) for _ in range(config.num_layers)])
        elif layer_layout == "scanned":
            if len(set(config.sliding_windows)) > 1:
                raise UnsupportedModelError(
                    "layers with differing sliding windows cannot be scanned; use "
                    "layer_layout='unrolled'"
                )
            self.blocks = LlamaBlock(config, _ParamMaker(rngs, dtype, layers=config.num_layers))
        else:
            raise ValueError(
                f"layer_layout={layer_layout!r} is unknown; give 'unrolled' or 'scanned'"
            )

    def __call__(
        self, tokens: jax.Array, batch: AttentionBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states [tokens, embed] after the last norm of `tokens` (int32 [tokens]).

        Also returns the cache with this step's keys and values written.
        """
        config = self.config
        tables = rope_tables(
            batch.positions, config.head_dim, config.rope_theta, config.rope_scaling
        )
        x = self.embedding[...][tokens]
        if self.layer_layout == "unrolled":
            x, cache = self._unroll(x, tables, batch, cache)
        else:
            x, cache = self._scan(x, tables, batch, cache)
        return rms_norm(x, self.norm[...], config.rms_norm_eps), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [rows, vocab] of final hidden states [rows, embed]."""
        tied = self.config.tie_word_embeddings
        weight = self.embedding[...] if tied else self.lm_head[...]
        return matmul(hidden, weight, transposed=tied, out_dtype=jnp.float32)

    def _unroll(
        self, x: jax.Array, tables: RopeTables, batch: AttentionBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        assert isinstance(self.blocks, nnx.List)
        k_pages, v_pages = [], []
        for layer, block in enumerate(self.blocks):
            graphdef, state = nnx.split(block)
            own = KVCache(cache.k_pages[layer : layer + 1], cache.v_pages[layer : layer + 1])
            window = self.config.sliding_windows[layer]
            x, own = _one_layer(graphdef, window, state, x, tables, batch, own)
            k_pages += own.k_pages
            v_pages += own.v_pages
        return x, KVCache(tuple(k_pages), tuple(v_pages))

    def _scan(
        self, x: jax.Array, tables: RopeTables, batch: AttentionBatch, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        graphdef, stacked = nnx.split(self.blocks)
        window = self.config.sliding_windows[0]

        def one_layer(carry, layer_and_state):
            layer, state = layer_and_state
            hidden, cache = carry
            block = nnx.merge(graphdef, state)
            return block(hidden, layer, window, tables, batch, cache), None

        layers = jnp.arange(self.config.num_layers)
        (x, cache), _ = lax.scan(one_layer, (x, cache), (layers, stacked))
        return x, cache


@partial(jax.jit, static_argnums=(0, 1))
def _one_layer(
    graphdef: nnx.GraphDef,
    window: int | None,
    state: nnx.State,
    x: jax.Array,
    tables: RopeTables,
    batch: AttentionBatch,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """One unrolled layer over its own cache buffer. Jitted so that all layers share one trace."""
    return nnx.merge(graphdef, state)(x, 0, window, tables, batch, cache)


@final
class LlamaBlock(nnx.Module):
    """One layer; with `new` stacking, all layers' parameters, of which the scan hands in one."""

    def __init__(self, config: LlamaConfig, new: _ParamMaker):
        self.config = config
        embed, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        kv_heads, group = config.num_kv_heads, config.group
        self.attention_norm = new(("embed",), (embed,))
        self.wqkv = new(
            ("embed", "kv_heads", None, None), (embed, kv_heads, group + 2, head_dim), num_in=1
        )
        self.wo = new(
            ("kv_heads", None, None, "embed"), (kv_heads, group, head_dim, embed), num_in=3
        )
        self.mlp_norm = new(("embed",), (embed,))
        self.gate_up = new(("embed", None, "mlp"), (embed, 2, mlp), num_in=1)
        self.down = new(("mlp", "embed"), (mlp, embed), num_in=1)
        if config.qkv_bias:
            self.bqkv = new(("kv_heads", None, None), (kv_heads, group + 2, head_dim), bias=True)
        if config.o_bias:
            self.bo = new(("embed",), (embed,), bias=True)
        if config.mlp_bias:
            self.bgate_up = new((None, "mlp"), (2, mlp), bias=True)
            self.bdown = new(("embed",), (embed,), bias=True)
        if config.qk_norm:
            self.q_norm = new((None,), (head_dim,))
            self.k_norm = new((None,), (head_dim,))

    def __call__(
        self,
        x: jax.Array,
        layer: int | jax.Array,
        sliding_window: int | None,
        tables: RopeTables,
        batch: AttentionBatch,
        cache: KVCache,
    ) -> tuple[jax.Array, KVCache]:
        """`x` [tokens, embed] through the layer, and the cache with its keys and values."""
        attended, cache = self._attention(x, layer, sliding_window, tables, batch, cache)
        x = x + attended
        return x + self._mlp(x), cache

    def _attention(
        self,
        x: jax.Array,
        layer: int | jax.Array,
        sliding_window: int | None,
        tables: RopeTables,
        batch: AttentionBatch,
        cache: KVCache,
    ) -> tuple[jax.Array, KVCache]:
        config = self.config
        kv_heads, group, head_dim = config.num_kv_heads, config.group, config.head_dim
        x = rms_norm(x, self.attention_norm[...], config.rms_norm_eps)
        qkv = matmul(x, self.wqkv[...].reshape(config.hidden_size, -1))
        # [tokens, kv_heads, group + 2, head_dim]
        qkv = qkv.reshape(-1, kv_heads, group + 2, head_dim)
        if config.qkv_bias:
            qkv = qkv + self.bqkv[...]
        if config.qk_norm:
            q = rms_norm(qkv[:, :, :group], self.q_norm[...], config.rms_norm_eps)
            k = rms_norm(qkv[:, :, group : group + 1], self.k_norm[...], config.rms_norm_eps)
            rotated = apply_rope(jnp.concatenate([q, k], axis=2), tables)
        else:
            rotated = apply_rope(qkv[:, :, : group + 1], tables)
        out, cache = cache.attend(
            layer,
            rotated[:, :, :group].reshape(-1, config.num_heads, head_dim),
            rotated[:, :, group],
            qkv[:, :, group + 1],
            batch,
            sliding_window=sliding_window,
        )
        out = out.reshape(-1, config.num_heads * head_dim)
        out = matmul(out, self.wo[...].reshape(-1, config.hidden_size))
        if config.o_bias:
            out = out + self.bo[...]
        return out, cache

    def _mlp(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = rms_norm(x, self.mlp_norm[...], config.rms_norm_eps)
        both = matmul(x, self.gate_up[...].reshape(config.hidden_size, -1))
        both = both.reshape(-1, 2, config.intermediate_size)
        if config.mlp_bias:
            both = both + self.bgate_up[...]
        out = matmul(jax.nn.silu(both[:, 0]) * both[:, 1], self.down[...])
        return out + self.bdown[...] if config.mlp_bias else out


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32; returns x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


@final
class _ParamMaker:
    """Makes parameters that know their logical axes; with `layers`, stacked along a first axis."""

    def __init__(
        self, rngs: nnx.Rngs | None, dtype: jax.typing.DTypeLike, layers: int | None = None
    ):
        self._rngs = rngs
        self._dtype = dtype
        self._layers = layers

    def __call__(
        self,
        axes: tuple[str | None, ...],
        shape: tuple[int, ...],
        *,
        num_in: int = 1,
        bias: bool = False,
    ) -> nnx.Param:
        """Ones for norms (one axis), zeros for biases, else normal with 1 / sqrt(fan-in).

        The first `num_in` axes are the inputs of the product.
        """
        fan_in = math.prod(shape[:num_in])
        if axes[0] == "vocab":
            fan_in = shape[1]
        if self._layers is not None:
            axes, shape_all = ("layers", *axes), (self._layers, *shape)
        else:
            shape_all = shape
        if len(shape) == 1 and not bias:
            value = jnp.ones(shape_all, self._dtype)
        elif bias or self._rngs is None:
            value = jnp.zeros(shape_all, self._dtype)
        else:
            value = jax.random.normal(self._rngs.params(), shape_all, self._dtype)
            value = value * jnp.asarray(fan_in**-0.5, self._dtype)
        return nnx.Param(value, logical_axes=axes)
