"""The bound of a run: the model's matrix products alone, timed on the same machine.

Nothing can serve the model faster with the same products; attention, sampling, norms and the host
loop come on top.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp

from jaxserve.models.config import LlamaConfig


@final
@dataclass(frozen=True, kw_only=True)
class Bound:
    """Seconds of the matrix products of one decode step and of one prefill step.

    Attributes:
      batch_size: rows of the decode step; each asks for logits.
      chunk_size: tokens of the prefill step; only the last asks for logits.
      decode_step_s, prefill_step_s: medians.
    """

    batch_size: int
    chunk_size: int
    decode_step_s: float
    prefill_step_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        return self.batch_size / self.decode_step_s

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.chunk_size / self.prefill_step_s

    def output_tokens_per_s(self, *, num_prompt: int, num_output: int) -> float:
        """Of a workload with so many tokens, if only its products took time."""
        prefill_s = num_prompt / self.prefill_tokens_per_s
        return num_output / (prefill_s + num_output / self.decode_tokens_per_s)


def measure(
    config: LlamaConfig,
    *,
    batch_size: int,
    chunk_size: int,
    dtype: jax.typing.DTypeLike,
    repeats: int = 5,
) -> Bound:
    """Time the products with random weights: layers unrolled, [in, out], fused as served."""
    weights = _weights(config, dtype)

    @jax.jit
    def products(weights: dict, x: jax.Array, num_logits: jax.Array) -> jax.Array:
        for layer in weights["layers"]:
            qkv = x @ layer["qkv"]
            x = x + qkv[:, : layer["o"].shape[0]] @ layer["o"]
            gate, up = jnp.split(x @ layer["gate_up"], 2, axis=-1)
            x = x + (gate * up) @ layer["down"]
        return x[-num_logits.shape[0] :] @ weights["vocab"]

    def seconds(num_tokens: int, num_logits: int) -> float:
        x = jnp.ones((num_tokens, config.hidden_size), dtype)
        rows = jnp.zeros(num_logits)
        jax.block_until_ready(products(weights, x, rows))
        times = []
        for _ in range(repeats):
            begin_s = time.perf_counter()
            jax.block_until_ready(products(weights, x, rows))
            times.append(time.perf_counter() - begin_s)
        return statistics.median(times)

    return Bound(
        batch_size=batch_size,
        chunk_size=chunk_size,
        decode_step_s=seconds(batch_size, batch_size),
        prefill_step_s=seconds(chunk_size, 1),
    )


def _weights(config: LlamaConfig, dtype: jax.typing.DTypeLike) -> dict:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    shapes = {
        "qkv": (hidden, qkv),
        "o": (heads, hidden),
        "gate_up": (hidden, 2 * config.intermediate_size),
        "down": (config.intermediate_size, hidden),
    }
    keys = iter(jax.random.split(jax.random.key(0), config.num_layers * len(shapes) + 1))

    def random(shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype) * (0.1 / shape[0] ** 0.5)

    layers = [
        {name: random(shape) for name, shape in shapes.items()} for _ in range(config.num_layers)
    ]
    return {"layers": layers, "vocab": random((hidden, config.vocab_size))}
