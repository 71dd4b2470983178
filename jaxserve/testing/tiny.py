"""Tiny models of 25,000 parameters, a chat model without weights, and options to serve with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from jaxserve.models.decoder import LayerLayout
from jaxserve.models.encoder_decoder import CrossBlock
from jaxserve.models.families.llama import Llama, LlamaConfig
from jaxserve.models.families.t5 import T5, T5Config
from jaxserve.models.layers import GatedMLP
from jaxserve.models.tokenizer import Tokenizer

VOCAB_SIZE = 97
MAX_CONTEXT = 128
# Of a `Runtime` around a tiny model. Compiling takes most of a test's time: only what is used is
# compiled, and runtimes with exactly these options share their executables. A test with `strict`
# needs a warm-up: `OPTIONS | {"strict": True, "warmup": True}`.
OPTIONS: dict[str, Any] = {
    "max_slots": 4,
    "max_step_tokens": 16,
    "page_size": 8,
    "warmup": False,
    "progress": False,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 16,
}


def tiny_llama(
    seed: int = 0,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    layer_layout: LayerLayout = "unrolled",
) -> Llama:
    """Return a Llama with two layers and grouped queries, 97 tokens and a context of 128.

    Its weights are random and large, so that greedy answers do not repeat themselves.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_CONTEXT,
        dtype=jnp.dtype(dtype).name,
    )
    model = Llama(config, rngs=nnx.Rngs(seed), layer_layout=layer_layout)
    for block in model.blocks if isinstance(model.blocks, nnx.List) else [model.blocks]:
        mlp = cast(GatedMLP, block.mlp)
        for weight in (block.attention.wqkv, block.attention.wo, mlp.gate_up, mlp.down):
            weight[...] = weight[...] * 3
    return model


def tiny_t5(seed: int = 0, *, layer_layout: LayerLayout = "unrolled") -> T5:
    """Return a T5 with two encoder and two decoder layers, 97 tokens and a context of 128.

    Its weights are random and large, so that greedy answers do not repeat themselves.
    """
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_encoder_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        num_buckets=8,
        max_distance=20,
        usual_length=MAX_CONTEXT // 2,
    )
    model = T5(config, rngs=nnx.Rngs(seed), layer_layout=layer_layout)
    for block in model.blocks if isinstance(model.blocks, nnx.List) else [model.blocks]:
        cross = cast(CrossBlock, block).cross
        for weight in (block.attention.wqkv, block.attention.wo, cross.wkv, cross.wo):
            weight[...] = weight[...] * 2
    return model


def random_prompts(count: int, seed: int = 0, longest: int = 70) -> list[tuple[int, ...]]:
    """Return prompts of 1 to `longest` tokens of the tiny model."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [tuple(rng.integers(0, VOCAB_SIZE, length).tolist()) for length in lengths]


def letter_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token a character, no end token, and a chat template."""
    letters = [" ", *map(chr, range(33, 127)), "é", "ü"]
    vocab = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    return Tokenizer(backend, eos_token_ids=(), chat_template=template)


def write_chat_model(folder: Path) -> str:
    """Write a Llama configuration and a byte-level tokenizer with a chat template into a folder.

    Returns:
      The folder, for `Runtime.from_pretrained(..., load="random")`: it has no weights.
    """
    (folder / "config.json").write_text(json.dumps(CONFIG))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"<end>": len(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)
