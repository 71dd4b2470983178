"""The parts of a decode step, each timed alone at the shapes of the run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import final

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.common.roofline import Bound
from benchmarks.common.timing import seconds
from jaxserve.core.config import EngineConfig
from jaxserve.models.batch import AttentionBatch, KVCache, empty_cache
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.steps.sampling.sampler import sample
from jaxserve.steps.sampling.variants import Variant
from jaxserve.steps.slots import empty_slots
from pallas_kernels import Rows, matmul, panel_matmul, to_panels

NAMES = {
    "products_s": "matrix products",
    "attention_s": "attention and KV writes",
    "sampling_s": "choosing tokens",
    "other_s": "everything else",
}


@final
@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Seconds of one decode iteration: its median in the run, and its parts alone.

    `other_s` is the rest: norms, rotary embedding, activations, calls.
    """

    step_s: float
    products_s: float
    attention_s: float
    sampling_s: float

    @property
    def other_s(self) -> float:
        return self.step_s - self.products_s - self.attention_s - self.sampling_s

    def to_dict(self) -> dict[str, float]:
        return {**asdict(self), "other_s": self.other_s}


def measure(
    config: LlamaConfig,
    engine: EngineConfig,
    dtype: jax.typing.DTypeLike,
    *,
    step_s: float,
    batch_size: int,
    context: int,
) -> DecodeStep:
    """Time each part, with random weights and its own cache."""
    return DecodeStep(
        step_s=step_s,
        products_s=_products_s(config, dtype, batch_size),
        attention_s=_attention_s(config, engine, dtype, batch_size, context),
        sampling_s=_sampling_s(config, engine, batch_size),
    )


def print_table(step: DecodeStep, bound: Bound) -> None:
    """Print the parts, their shares and the bound on stderr."""
    console = Console(stderr=True)
    console.print(f"one decode step, {bound.batch_size} sequences of {bound.context:.0f} tokens")
    table = Table("", "ms", "share", box=None)
    for name, text in NAMES.items():
        part_s = getattr(step, name)
        table.add_row(text, f"{part_s * 1e3:.1f}", f"{part_s / step.step_s:.0%}")
    table.add_row("the step in the run", f"{step.step_s * 1e3:.1f}", "100%", style="bold")
    bound_s = bound.decode_step_s
    table.add_row("bound of the machine", f"{bound_s * 1e3:.1f}", f"{bound_s / step.step_s:.0%}")
    console.print(table)


def _products_s(config: LlamaConfig, dtype: jax.typing.DTypeLike, batch_size: int) -> float:
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    num_qkv = heads + 2 * config.num_kv_heads * config.head_dim
    keys = iter(jax.random.split(jax.random.key(0), 4 * config.num_layers + 1))
    in_panels = jax.default_backend() == "cpu" and jnp.dtype(dtype) == jnp.float32
    arrange = jax.jit(to_panels) if in_panels else lambda weight: weight

    def weight(depth: int, columns: int) -> jax.Array:
        drawn = jax.random.normal(next(keys), (depth, columns), dtype)
        return arrange(drawn * (0.1 / depth**0.5))

    def times(x: jax.Array, weight: jax.Array, columns: int) -> jax.Array:
        return panel_matmul(x, weight, columns=columns) if in_panels else matmul(x, weight)

    layers = [
        (
            *(weight(hidden, num_qkv), weight(heads, hidden)),
            *(
                weight(hidden, 2 * config.intermediate_size),
                weight(config.intermediate_size, hidden),
            ),
        )
        for _ in range(config.num_layers)
    ]
    vocab = weight(hidden, config.vocab_size)

    @jax.jit
    def products(x: jax.Array, layers: list, vocab: jax.Array) -> jax.Array:
        for qkv, o, gate_up, down in layers:
            x = times(times(x, qkv, num_qkv)[:, :heads], o, hidden)
            both = times(x, gate_up, 2 * config.intermediate_size)
            x = times(both[:, : config.intermediate_size], down, hidden)
        return times(x, vocab, config.vocab_size)

    return seconds(products, jnp.ones((batch_size, hidden), dtype), layers, vocab)


def _attention_s(
    config: LlamaConfig,
    engine: EngineConfig,
    dtype: jax.typing.DTypeLike,
    batch_size: int,
    context: int,
) -> float:
    page_size, kv_dtype = engine.page_size, engine.kv_dtype or dtype
    pages_each = -(-context // page_size)
    cache = empty_cache(config, 1 + batch_size * pages_each, page_size, kv_dtype, "unrolled")
    table = 1 + jnp.arange(batch_size * pages_each).reshape(batch_size, pages_each)
    row, last = jnp.arange(batch_size), jnp.full(batch_size, context - 1)
    batch = AttentionBatch(
        positions=last,
        page=table[row, last // page_size],
        offset=last % page_size,
        rows=Rows(
            query_start=row,
            query_length=jnp.ones_like(row),
            first_position=last,
            context_length=last + 1,
            page_table=table,
        ),
        max_query_length=1,
    )
    group = config.num_heads // config.num_kv_heads
    qkv = jnp.ones((batch_size, config.num_kv_heads, group + 2, config.head_dim), dtype)

    def attend(cache: KVCache) -> tuple[KVCache, jax.Array]:
        total = jnp.zeros((batch_size, config.num_heads, config.head_dim), dtype)
        for layer, window in enumerate(config.sliding_windows):
            out, cache = cache.attend(layer, qkv, None, batch, sliding_window=window)
            total += out
        return cache, total

    step = jax.jit(attend, donate_argnums=0)
    held = [cache]

    def call() -> jax.Array:
        held[0], total = step(held[0])
        return total

    return seconds(call)


def _sampling_s(config: LlamaConfig, engine: EngineConfig, batch_size: int) -> float:
    slots = jax.tree.map(lambda leaf: leaf[:batch_size], empty_slots(engine))
    logits = jax.random.normal(jax.random.key(0), (batch_size, config.vocab_size))
    step = jax.jit(partial(sample, variant=Variant.GREEDY))
    return seconds(step, logits, slots.sampling, slots.tokens, slots.length)
