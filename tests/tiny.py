"""A tiny Llama with lively answers, and the machine that serves it in tests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx

from jaxserve.models.decoder import LayerLayout
from jaxserve.models.families.llama import Llama, LlamaConfig
from jaxserve.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxserve import Runtime

VOCAB_SIZE = 97
MAX_CONTEXT = 128
# Of a runtime around a tiny model. Compiling takes most of the tests' time, and modules that use
# these, and no others, share their executables.
OPTIONS = {"max_slots": 4, "max_step_tokens": 64, "page_size": 8, "progress": False}


def tiny_llama(
    seed: int = 0,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    layer_layout: LayerLayout = "unrolled",
) -> Llama:
    """Grouped queries. Weights are large, so that greedy answers do not repeat."""
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
        for weight in (
            block.attention.wqkv,
            block.attention.wo,
            block.mlp.gate_up,
            block.mlp.down,
        ):
            weight[...] = weight[...] * 3
    return model


def random_prompts(count: int, seed: int = 0, longest: int = 70) -> list[tuple[int, ...]]:
    """Prompts of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [tuple(rng.integers(0, VOCAB_SIZE, length).tolist()) for length in lengths]


def slow_down(rt: Runtime, step_s: float = 0.02) -> None:
    """Make every step last long enough for answers to be caught in their middle."""
    submit = rt._replicas.first.executor.submit

    def slowly(plan):
        time.sleep(step_s)
        return submit(plan)

    rt._replicas.first.executor.submit = slowly


def make_copies_free(rt: Runtime) -> None:
    """Have pages copied to the host rather than computed anew.

    So small a model may compute a page faster than it is copied, which this machine decides.
    """
    rt._replicas.first.engine.swap_by(None)


def letter_tokenizer() -> Tokenizer:
    """A tokenizer with one token a character, and a chat template."""
    letters = [" ", *map(chr, range(33, 127)), "é", "ü"]
    vocab = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    return Tokenizer(backend, eos_token_ids=(), chat_template=template)
