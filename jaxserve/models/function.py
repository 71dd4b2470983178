"""A decoder that is a plain function of parameters, tokens and attention (docs/own_model.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.errors import InvalidParamsError, UnsupportedModelError
from jaxserve.models.batch import AttentionBatch, IncomingPages, KVCache
from jaxserve.models.config import DecoderConfig
from jaxserve.models.context import PagedContext, WholeContext
from jaxserve.models.decoder import Decoder, Tap


class Attend(Protocol):
    """Causal attention of one layer; the n-th call of a forward pass is the n-th layer's."""

    def __call__(
        self,
        q: Float[Array, "tokens q_heads head_dim"],
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Return the values that each token sees: its own and those before it in its sequence.

        Query head i reads KV head i // (q_heads // kv_heads). Rotate `q` and `k` before. `scale` is
        the factor of the logits, 1 / sqrt(head_dim) by default; with `soft_cap` they become
        cap * tanh(x / cap).
        """
        ...


# (params, tokens [tokens], positions [tokens], attend) -> [tokens, width]
Apply = Callable[[Any, Array, Array, Attend], Array]
# (params, hidden [rows, width]) -> logits [rows, vocab]
Head = Callable[[Any, Array], Array]


@final
@dataclass(frozen=True, kw_only=True)
class FunctionConfig(DecoderConfig):
    """The sizes that a `FunctionDecoder` states."""


@final
class FunctionDecoder(Decoder):
    """A decoder that computes with a function of yours, in JAX or any library on it.

    Tokens of all sequences come in one flat array, with the place of each in its sequence. What
    mixes tokens has to go through `attend`; all else is computed token by token. The engine gives
    it batching, paging, prefixes, preemption, sampling, streaming and new weights. Meshes replicate
    the parameters. `quantize`, adapters, probes, stages and `deterministic` need a family
    (docs/adding_a_model.md), whose products give a row the same bits in any batch.

    Args:
      apply: `(params, tokens, positions, attend) -> logits`, or with `head` the hidden states that
        it reads. It is traced, once for each size of a step.
      params: a tree of arrays.
      head: `(params, hidden) -> logits`, for the rows that are sampled alone; by default `apply`
        returns logits, of all tokens.
      hidden_size: the width of what `head` reads; by default num_heads * head_dim.
      num_layers: how often `apply` calls `attend`.
      max_position_embeddings: the longest context, tokens.
      sliding_windows: of each layer in tokens, None for full attention; by default all are full.
      dtype: of the KV cache, "float32", "bfloat16" or "float16".

    Raises:
      UnsupportedModelError: a size is not allowed.
    """

    def __init__(
        self,
        apply: Apply,
        params: Any,
        *,
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        max_position_embeddings: int = 2048,
        sliding_windows: tuple[int | None, ...] = (),
        dtype: str = "float32",
        head: Head | None = None,
        hidden_size: int | None = None,
    ):
        width = num_heads * head_dim if hidden_size is None else hidden_size
        self.config = FunctionConfig(
            vocab_size=vocab_size,
            hidden_size=vocab_size if head is None else width,
            intermediate_size=num_heads * head_dim,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            sliding_windows=sliding_windows,
            dtype=dtype,
        )
        self.layer_layout = "unrolled"
        self.has_start = self.has_end = True
        self.apply = apply
        self.head = head
        flat, self.treedef = jax.tree_util.tree_flatten_with_path(params)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
        self.names = tuple(name or "params" for name in names)
        self.arrays = nnx.Dict(
            {
                name: nnx.Param(leaf, logical_axes=(None,) * jnp.ndim(leaf), has_own_dtype=True)
                for name, (_, leaf) in zip(self.names, flat, strict=True)
            }
        )

    @property
    def params(self) -> Any:
        """The parameters, in the tree that was given."""
        return jax.tree.unflatten(self.treedef, [self.arrays[name][...] for name in self.names])

    def with_params(self, params: Any) -> Self:
        """Return this decoder with other parameters of the same tree, for `update_params`.

        Raises:
          InvalidParamsError: the trees differ.
        """
        leaves, treedef = jax.tree.flatten(params)
        if treedef != self.treedef:
            raise InvalidParamsError(
                f"the parameters have the tree {treedef}, and the decoder was made with "
                f"{self.treedef}; pass parameters of the same tree"
            )
        other = nnx.merge(*nnx.split(self))
        for name, leaf in zip(self.names, leaves, strict=True):
            other.arrays[name] = other.arrays[name].replace(leaf)
        return other

    def tapped(
        self,
        inputs: Int32[Array, " tokens"] | Float[Array, "tokens embed"],
        batch: AttentionBatch,
        cache: KVCache,
        tap: Tap | None,
        incoming: IncomingPages | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], KVCache, None]:
        """See `Decoder.tapped`; there is no residual stream to read.

        Raises:
          UnsupportedModelError: `tap` is given.
        """
        if tap is not None:
            raise UnsupportedModelError(
                "a FunctionDecoder has no residual stream that a probe reads; omit probe, or write "
                "a family (docs/adding_a_model.md)"
            )

        def context(layer: int) -> PagedContext:
            own = cache.layer("attention", layer)
            if incoming is not None:
                own = incoming.put(own, 0, incoming.fetch(layer))
            return PagedContext(0, None, self.config.sliding_windows[layer], batch, own)

        contexts, hidden = self._applied(inputs, batch.positions, context)
        for layer, each in enumerate(contexts):
            cache = cache.with_layer("attention", layer, each.cache)
        return hidden, cache, None

    def whole_logits(
        self, tokens: Int32[Array, "sequences length"]
    ) -> Float32[Array, "sequences length vocab"]:
        """See `Decoder.whole_logits`."""
        num_sequences, length = tokens.shape
        windows = self.config.sliding_windows
        _, hidden = self._applied(
            tokens.reshape(-1),
            jnp.tile(jnp.arange(length), num_sequences),
            lambda layer: WholeContext(length, None, windows[layer]),
        )
        return self.logits(hidden).reshape(*tokens.shape, -1)

    def logits(
        self, hidden: Float[Array, "rows hidden"], adapter: Int32[Array, " rows"] | None = None
    ) -> Float32[Array, "rows vocab"]:
        """See `Decoder.logits`."""
        logits = hidden if self.head is None else self.head(self.params, hidden)
        return logits.astype(jnp.float32)

    def _applied(
        self, tokens: Array, positions: Array, context_of: Callable[[int], Any]
    ) -> tuple[list[Any], Float[Array, "tokens hidden"]]:
        """Return the contexts of all layers after a forward pass, and its result."""
        config, contexts = self.config, []

        def attend(
            q: Array,
            k: Array,
            v: Array,
            *,
            scale: float | None = None,
            soft_cap: float | None = None,
        ) -> Array:
            if len(contexts) == config.num_layers:
                raise UnsupportedModelError(
                    f"the function calls attend more than num_layers={config.num_layers} times"
                )
            kv = (len(tokens), config.num_kv_heads, config.head_dim)
            wanted = ((len(tokens), config.num_heads, config.head_dim), kv, kv)
            if (q.shape, k.shape, v.shape) != wanted:
                raise UnsupportedModelError(
                    f"attend needs q, k and v of the shapes {wanted}, [tokens, heads, head_dim], "
                    f"and got {q.shape}, {k.shape} and {v.shape}"
                )
            contexts.append(context_of(len(contexts)))
            grouped = q.reshape(len(tokens), config.num_kv_heads, config.group, config.head_dim)
            qkv = jnp.concatenate([grouped, k[:, :, None], v[:, :, None]], axis=2)
            out = contexts[-1].attend(qkv.astype(config.dtype), scale=scale, soft_cap=soft_cap)
            return out.astype(q.dtype)

        hidden = self.apply(self.params, tokens, positions, attend)
        if len(contexts) != config.num_layers:
            raise UnsupportedModelError(
                f"the function calls attend {len(contexts)} times, and num_layers is "
                f"{config.num_layers}"
            )
        if hidden.shape != (len(tokens), config.hidden_size):
            what = "vocab_size" if self.head is None else "hidden_size"
            raise UnsupportedModelError(
                f"the function has to return [tokens, {what}], here "
                f"{(len(tokens), config.hidden_size)}, and returns {hidden.shape}"
            )
        return contexts, hidden
