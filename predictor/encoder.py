"""BERT-family encoders in Flax NNX; configurations make them BERT, DistilBERT or MiniLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int
from safetensors import safe_open

_MASKED = -1e30


@final
@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The configuration of an encoder (Devlin et al., arXiv:1810.04805).

    Attributes:
      num_types: number of segment embeddings, 0 for DistilBERT; every text is in segment 0.
      max_positions: maximum number of tokens of a text; a longer text loses its middle.
    """

    vocab_size: int = 30522
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int = 512
    num_types: int = 2
    norm_eps: float = 1e-12
    dropout: float = 0.1

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> EncoderConfig:
        """Read a parsed Hugging Face config.json.

        Raises:
          ValueError: the model type or its activation is not supported.
        """
        kind = given.get("model_type")
        if kind not in ("bert", "distilbert"):
            raise ValueError(
                f"model_type={kind!r} is not supported; use a 'bert' or 'distilbert' model"
            )
        activation = given.get("hidden_act", given.get("activation", "gelu"))
        if activation != "gelu":
            raise ValueError(f"activation {activation!r} is not supported; use a model with 'gelu'")
        distil = kind == "distilbert"
        return cls(
            vocab_size=given["vocab_size"],
            hidden_size=given["dim" if distil else "hidden_size"],
            intermediate_size=given["hidden_dim" if distil else "intermediate_size"],
            num_layers=given["n_layers" if distil else "num_hidden_layers"],
            num_heads=given["n_heads" if distil else "num_attention_heads"],
            max_positions=given.get("max_position_embeddings", 512),
            num_types=0 if distil else given.get("type_vocab_size", 2),
            norm_eps=given.get("layer_norm_eps", 1e-12),
            dropout=given.get("dropout" if distil else "hidden_dropout_prob", 0.1),
        )


# Table 5 of the S3 paper, by millions of parameters.
SIZES = {
    "22m": EncoderConfig(hidden_size=384, intermediate_size=1536, num_layers=6, num_heads=12),
    "66m": EncoderConfig(
        hidden_size=768, intermediate_size=3072, num_layers=6, num_heads=12, num_types=0
    ),
    "110m": EncoderConfig(hidden_size=768, intermediate_size=3072, num_layers=12, num_heads=12),
    "340m": EncoderConfig(hidden_size=1024, intermediate_size=4096, num_layers=24, num_heads=16),
}


@final
class Encoder(nnx.Module):
    """A transformer encoder from texts to hidden states, in `dtype`; parameters are float32."""

    def __init__(
        self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike = jnp.float32
    ):
        embed = config.hidden_size
        initial = nnx.initializers.normal(0.02)

        def table(rows: int) -> nnx.Embed:
            return nnx.Embed(rows, embed, embedding_init=initial, dtype=dtype, rngs=rngs)

        self.words = table(config.vocab_size)
        self.positions = table(config.max_positions)
        self.types = table(config.num_types) if config.num_types else None
        self.norm = nnx.LayerNorm(embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.layers = nnx.List(
            [_Layer(config, rngs=rngs, dtype=dtype) for _ in range(config.num_layers)]
        )

    def compute_in(self, dtype: jax.typing.DTypeLike) -> None:
        """Set the dtype of products and norms; parameters keep theirs."""
        for _, module in nnx.iter_modules(self):
            if isinstance(module, nnx.Linear | nnx.Embed | nnx.LayerNorm):
                module.dtype = jnp.dtype(dtype)

    def __call__(
        self, tokens: Int[Array, "texts tokens"], mask: Bool[Array, "texts tokens"]
    ) -> Float[Array, "texts tokens hidden_size"]:
        """Return hidden states; `mask` is False for padding."""
        x = self.words(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        if self.types is not None:
            x = x + self.types(jnp.zeros_like(tokens))
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        return x


@final
class _Layer(nnx.Module):
    """Attention and MLP, each followed by a residual sum and a norm (post-norm)."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs, dtype: jax.typing.DTypeLike):
        embed, inner = config.hidden_size, config.intermediate_size

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            initial = nnx.initializers.normal(0.02)
            return nnx.Linear(inputs, outputs, kernel_init=initial, dtype=dtype, rngs=rngs)

        def norm() -> nnx.LayerNorm:
            return nnx.LayerNorm(embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)

        self.num_heads = config.num_heads
        self.query, self.key, self.value = (linear(embed, embed) for _ in range(3))
        self.out, self.attention_norm = linear(embed, embed), norm()
        self.up, self.down, self.mlp_norm = linear(embed, inner), linear(inner, embed), norm()
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(
        self, x: Float[Array, "texts tokens hidden_size"], mask: Bool[Array, "texts tokens"]
    ) -> Float[Array, "texts tokens hidden_size"]:
        q, k, v = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        seen = _attended(q, k, v, mask).swapaxes(1, 2).reshape(x.shape)
        x = self.attention_norm(x + self.dropout(self.out(seen)))
        inner = jax.nn.gelu(self.up(x), approximate=False)
        return self.mlp_norm(x + self.dropout(self.down(inner)))

    def _heads(
        self, x: Float[Array, "texts tokens hidden_size"]
    ) -> Float[Array, "texts heads tokens head_dim"]:
        return x.reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2)


def _attended(
    q: Float[Array, "texts heads tokens head_dim"],
    k: Float[Array, "texts heads tokens head_dim"],
    v: Float[Array, "texts heads tokens head_dim"],
    mask: Bool[Array, "texts tokens"],
) -> Float[Array, "texts heads tokens head_dim"]:
    """Return attention to the unmasked tokens.

    On CPUs `jax.nn.dot_product_attention` takes 1.5 times as long.
    """
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(2, 3)
    scores = jnp.where(mask[:, None, None, :], scores.astype(jnp.float32), _MASKED)
    return jax.nn.softmax(scores).astype(v.dtype) @ v


@final
class LengthClassifier(nnx.Module):
    """An encoder with a head on its mean hidden state, giving logits of length buckets."""

    def __init__(
        self,
        config: EncoderConfig,
        num_buckets: int,
        *,
        rngs: nnx.Rngs,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ):
        embed = config.hidden_size
        self.encoder = Encoder(config, rngs=rngs, dtype=dtype)
        # The prompt's length is an extra input, since a mean does not contain it.
        self.hidden = nnx.Linear(embed + 1, embed, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.head = nnx.Linear(embed, num_buckets, rngs=rngs)

    @classmethod
    def random(
        cls,
        config: EncoderConfig,
        num_buckets: int,
        *,
        seed: int = 0,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> LengthClassifier:
        """Make a classifier with random parameters, in one compiled call."""
        make = nnx.jit(lambda: cls(config, num_buckets, rngs=nnx.Rngs(seed), dtype=dtype))
        return make()

    @classmethod
    def blank(cls, config: EncoderConfig, num_buckets: int) -> LengthClassifier:
        """Make a classifier of zeros without compilation, to be replaced by saved parameters."""
        model = nnx.eval_shape(lambda: cls(config, num_buckets, rngs=nnx.Rngs(0)))
        leaves, structure = jax.tree.flatten(nnx.state(model))
        filled = [
            # The keys of dropout; each layer has its own.
            jax.random.key(number)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jax.device_put(np.zeros(leaf.shape, leaf.dtype))
            for number, leaf in enumerate(leaves)
        ]
        nnx.update(model, jax.tree.unflatten(structure, filled))
        return model

    def __call__(
        self, tokens: Int[Array, "texts tokens"], mask: Bool[Array, "texts tokens"]
    ) -> Float32[Array, "texts buckets"]:
        """Return logits; `mask` is False for padding."""
        pooled = mean_pooled(self.encoder(tokens, mask), mask)
        length = jnp.log1p(mask.sum(1, keepdims=True).astype(jnp.float32))
        x = self.dropout(jnp.concatenate([pooled, length], axis=1))
        return self.head(self.dropout(jax.nn.gelu(self.hidden(x))))


def mean_pooled(
    hidden: Float[Array, "texts tokens hidden_size"], mask: Bool[Array, "texts tokens"]
) -> Float32[Array, "texts hidden_size"]:
    weights = mask.astype(jnp.float32)[..., None]
    total = (hidden.astype(jnp.float32) * weights).sum(1)
    return total / jnp.maximum(weights.sum(1), 1.0)


_BERT = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_DISTILBERT = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}


def config_of(folder: Path) -> EncoderConfig:
    """Read a Hugging Face folder's config; raises ValueError if it is missing or unsupported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no config.json; pass the folder of a BERT or DistilBERT model"
        )
    return EncoderConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))


def load_encoder(encoder: Encoder, folder: Path) -> None:
    """Set the encoder's parameters to those of model.safetensors.

    Raises:
      ValueError: the file is missing, or tensors are missing or have other shapes; the message
        lists all of them.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no model.safetensors; pass the folder of a BERT or DistilBERT model"
        )
    problems: list[str] = []
    with safe_open(path, framework="numpy") as file:
        names = {_without_prefix(name): name for name in file.keys()}  # noqa: SIM118

        def put(variable: Any, name: str, *, transposed: bool = False) -> None:
            if name not in names:
                problems.append(f"{name} is missing")
                return
            tensor = file.get_tensor(names[name])
            tensor = tensor.T if transposed else tensor
            if tensor.shape != variable.shape:
                problems.append(f"{name} has shape {tensor.shape}, not {variable.shape}")
                return
            variable[...] = jnp.asarray(tensor.astype(np.float32))

        def put_module(module: Any, name: str) -> None:
            if isinstance(module, nnx.LayerNorm):
                put(module.scale, f"{name}.weight")
            else:
                put(module.kernel, f"{name}.weight", transposed=True)
            put(module.bias, f"{name}.bias")

        put(encoder.words.embedding, "embeddings.word_embeddings.weight")
        put(encoder.positions.embedding, "embeddings.position_embeddings.weight")
        if encoder.types is not None:
            put(encoder.types.embedding, "embeddings.token_type_embeddings.weight")
        put_module(encoder.norm, "embeddings.LayerNorm")
        is_distil = any(name.startswith("transformer.layer.") for name in names)
        start, table = ("transformer", _DISTILBERT) if is_distil else ("encoder", _BERT)
        for number, layer in enumerate(encoder.layers):
            for ours, theirs in table.items():
                put_module(getattr(layer, ours), f"{start}.layer.{number}.{theirs}")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))


def _without_prefix(name: str) -> str:
    for prefix in ("bert.", "distilbert."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
