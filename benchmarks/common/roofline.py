"""The bound of a run, from the machine's arithmetic and memory rates, measured next to the run.

The time of a step is at least its floating-point operations over the machine's rate, and at least
the bytes that it must read over the machine's bandwidth (Williams, Waterman and Patterson's
roofline, doi:10.1145/1498765.1498785). Weights are read once a step, keys and values once a row.
Attention's arithmetic, norms, sampling and the host are left out: the bound is not reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp

from benchmarks.common.timing import seconds
from jaxserve.core.options import KV_DTYPES
from jaxserve.models.families.llama import LlamaConfig

# Rows and columns of the product that gives the machine's rate, on GPUs and elsewhere.
_LARGE_ON_GPU, _LARGE = 8192, 2048
_MATRIX_BYTES = 256 << 20  # of the matrix that is read: larger than any cache


@final
@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates that a large matrix product, and a product of one row with a large matrix, reach."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def figures(self) -> dict[str, float]:
        """The rates that `measure_gpu` returns, as results of GPUs have them."""
        return {"copy_bytes_per_s": self.bytes_per_s, "product_flops_per_s": self.flops_per_s}

    def step_s(self, *, flops: float, num_bytes: float) -> float:
        """Return the least seconds of a step with this amount of work."""
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


def of_bound(seconds: float, bound_s: float, *, num_bytes: float) -> dict[str, float]:
    """Return the figures of a call that every table of kernels has."""
    return {
        "seconds": seconds,
        "bound_s": bound_s,
        "of_bound": bound_s / seconds,
        "bytes_per_s": num_bytes / seconds,
    }


@final
@dataclass(frozen=True, kw_only=True)
class Bound:
    """The least seconds of the steps of a workload.

    Attributes:
      decode_step_s: one iteration with `batch_size` sequences of `context` tokens.
      prefill_token_s: one prompt token in a long chunk.
      run_s: the whole workload, with every decode step full.
    """

    batch_size: int
    context: float
    decode_step_s: float
    prefill_token_s: float
    run_s: float


def measure_machine(dtype: jax.typing.DTypeLike) -> Machine:
    """Measure both rates in `dtype`; takes about a second on a CPU."""
    large = _LARGE_ON_GPU if jax.default_backend() == "gpu" else _LARGE
    # Random: some GPUs multiply zeros and ones faster.
    square = jax.random.normal(jax.random.key(0), (large, large), dtype)
    product_s = seconds(jax.jit(jnp.matmul), square, square, calls=_calls())
    columns = _MATRIX_BYTES // (4096 * jnp.dtype(dtype).itemsize)
    matrix, row = jnp.ones((4096, columns), dtype), jnp.ones((1, 4096), dtype)
    read_s = seconds(jax.jit(jnp.matmul), row, matrix)
    return Machine(flops_per_s=2 * large**3 / product_s, bytes_per_s=_MATRIX_BYTES / read_s)


def measure_copy(num_bytes: int = 1 << 30) -> float:
    """Measure the bytes a second, read and written, of copying an array on the device."""
    source = jax.random.normal(jax.random.key(0), (num_bytes // 4,))
    return 2 * num_bytes / seconds(jax.jit(jnp.negative), source, calls=_calls())


def measure_gpu(dtype: jax.typing.DTypeLike) -> Machine:
    """Measure the rates of a large product and of a copy, which bound the kernels of a GPU."""
    return Machine(flops_per_s=measure_machine(dtype).flops_per_s, bytes_per_s=measure_copy())


def bound(
    machine: Machine,
    config: LlamaConfig,
    dtype: jax.typing.DTypeLike,
    *,
    kv_dtype: str | None,
    batch_size: int,
    context: float,
    num_prompt_tokens: int,
    num_output_tokens: int,
) -> Bound:
    """Return the bound of a workload.

    Args:
      kv_dtype: of keys and values; None for `dtype`.
      batch_size: sequences that decode together.
      context: mean tokens of a sequence while it decodes.
    """
    size = jnp.dtype(dtype).itemsize
    layers, vocab = (
        layer_weights(config) * config.num_layers,
        config.hidden_size * config.vocab_size,
    )
    kv_bytes = kv_token_bytes(config.num_kv_heads, config.head_dim, kv_dtype or dtype)
    decode_step_s = machine.step_s(
        flops=2 * batch_size * (layers + vocab),
        num_bytes=size * (layers + vocab) + config.num_layers * kv_bytes * batch_size * context,
    )
    prefill_token_s = machine.step_s(flops=2 * layers, num_bytes=0)
    return Bound(
        batch_size=batch_size,
        context=context,
        decode_step_s=decode_step_s,
        prefill_token_s=prefill_token_s,
        run_s=num_prompt_tokens * prefill_token_s + num_output_tokens * decode_step_s / batch_size,
    )


def kv_token_bytes(kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike) -> int:
    """Return the bytes of keys and values of a token in one layer, scales included."""
    dtype = jnp.dtype(dtype)
    scale_bytes = 4 if dtype.name in KV_DTYPES else 0
    return 2 * kv_heads * (head_dim * dtype.itemsize + scale_bytes)


def layer_weights(config: LlamaConfig) -> int:
    """Return how many numbers the weight matrices of one layer have."""
    heads = config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    return config.hidden_size * (qkv + heads + 3 * config.intermediate_size)


def _calls() -> int:
    return 8 if jax.default_backend() == "gpu" else 1
