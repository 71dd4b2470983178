"""The C++ kernels against the limits of this CPU: `python -m benchmarks.kernels.cpu`.

Products with all weights of a model's layers, attention of all its layers, and the passes between
them, each in one program, for steps of few and of many tokens. The cases take turns, so that other
work on the machine slows all equally.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.common.roofline import Machine, measure_machine
from jaxserve.kernels import (
    Rows,
    gated_silu,
    matmul,
    paged_attention,
    panel_matmul,
    quantised_matmul,
    quantize,
    rms_norm,
    rotate_and_write,
    to_panels,
)
from jaxserve.kernels.quantised_matmul import quantise

# SmolLM2-135M: the weights of a layer [in, out], and its heads.
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE = 3, 3, 64, 32
# Arguments of `quantise`, by the name of a format.
FORMATS = {
    "int8": dict(bits=8, group=32),
    "int4": dict(bits=4, group=32, has_minima=True),
    "int4, symmetric": dict(bits=4, group=32),
}
PRODUCTS = ("dense", "panels", "bf16", *FORMATS)
PAGES = ("float32", "bfloat16", "int8")

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, float]]


def run(options: argparse.Namespace) -> dict[str, Any]:
    machine = measure_machine(jnp.float32)
    counts = whole_numbers(options.rows, "--rows")
    cases: dict[str, Case] = {}
    for kind in PRODUCTS:
        weights = _weights(kind, options.layers)
        cases |= {f"product, {kind}, {rows}": _product(weights, kind, rows) for rows in counts}
    for rows in counts:
        for implementation in ("cpu", "xla"):
            cases[f"passes, {implementation}, {rows}"] = _passes(
                rows, options.layers, implementation
            )
        for dtype in PAGES:
            case = _attention(rows, options.context, dtype, options.layers)
            cases[f"attention, {dtype}, {rows}"] = case
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(options.repeats + 1):
        for name, (call, arguments, _) in cases.items():
            begin_s = time.perf_counter()
            jax.block_until_ready(call(*arguments))
            if repeat > 0:  # the first one compiles
                times[name].append(time.perf_counter() - begin_s)
    return {
        "layers": options.layers,
        "context": options.context,
        "machine": asdict(machine),
        "cases": {name: _figures(times[name], cases[name][2], machine) for name in cases},
    }


def _figures(
    seconds: list[float], work: dict[str, float], machine: Machine
) -> dict[str, float | list[float]]:
    least_s, flops, num_bytes = min(seconds), work["flops"], work["num_bytes"]
    return {
        "ms": statistics.median(seconds) * 1e3,
        "least_ms": least_s * 1e3,
        "gflop_per_s": flops / least_s / 1e9,
        "gb_per_s": num_bytes / least_s / 1e9,
        "of_roofline": machine.step_s(flops=flops, num_bytes=num_bytes) / least_s,
    }


def _weights(kind: str, layers: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), (layers, len(SHAPES)))
    draw = jax.jit(jax.random.normal, static_argnums=1)
    change = {
        "dense": lambda x: x,
        "panels": jax.jit(to_panels),
        "bf16": jax.jit(partial(to_panels, dtype=jnp.bfloat16)),
    }.get(kind)
    if change is None:
        rounded = jax.jit(partial(quantise, **FORMATS[kind]))
        change = lambda x: rounded(x.T)  # noqa: E731
    return [
        change(draw(keys[layer, i], shape))
        for layer in range(layers)
        for i, shape in enumerate(SHAPES)
    ]


def _product(weights: list[Any], kind: str, rows: int) -> Case:
    depths = sorted({depth for depth, _ in SHAPES})
    inputs = {depth: jax.random.normal(jax.random.key(depth), (rows, depth)) for depth in depths}

    @jax.jit
    def all_products(weights: list[Any], inputs: dict[int, jax.Array]) -> jax.Array:
        out = jnp.float32(0)
        for i, weight in enumerate(weights):
            depth, columns = SHAPES[i % len(SHAPES)]
            # Each product waits for the one before it, as in a model.
            x = inputs[depth] + out * 1e-30
            if kind == "dense":
                y = matmul(x, weight)
            elif kind in ("panels", "bf16"):
                y = panel_matmul(x, weight, columns=columns)
            else:
                y = quantised_matmul(x, weight, rounds_activations="groups")
            out = y[0, 0]
        return out

    layers = len(weights) // len(SHAPES)
    flops = 2.0 * rows * layers * sum(depth * width for depth, width in SHAPES)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    return all_products, (weights, inputs), dict(flops=flops, num_bytes=num_bytes)


def _passes(rows: int, layers: int, implementation: Any) -> Case:
    """Two norms with their residual adds, a gated activation and a write, for each layer.

    Each layer has its own inputs, like those that products return, and its outputs are kept.
    """
    hidden, columns = SHAPES[0]
    both_width = SHAPES[2][1]
    cache = jnp.zeros((1, 1 + rows, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    where = jnp.arange(1, 1 + rows), jnp.zeros(rows, jnp.int32)
    tables = jnp.ones((rows, HEAD_DIM // 2)), jnp.ones((rows, HEAD_DIM // 2))
    scale = jnp.ones(hidden)

    def inputs(layer: int) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(layer), 4)
        heads = (rows, KV_HEADS, GROUP + 2, HEAD_DIM)
        shapes = ((rows, hidden), heads, (rows, hidden), (rows, 2, both_width // 2))
        return tuple(jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))

    @partial(jax.jit, donate_argnums=0)
    def passes(
        cache: tuple[jax.Array, jax.Array], x: jax.Array, given: list[tuple[jax.Array, ...]]
    ) -> tuple[tuple[jax.Array, jax.Array], list[jax.Array]]:
        kept = []
        for before, qkv, between, both in given:
            x = x + before
            kept.append(rms_norm(x, scale, eps=1e-5, implementation=implementation))
            q, k, v, *_ = rotate_and_write(
                qkv, tables, *cache, 0, *where, implementation=implementation
            )
            cache = k, v
            x = x + between
            kept.append(rms_norm(x, scale, eps=1e-5, implementation=implementation))
            kept += [q, gated_silu(both, implementation=implementation)]
        return cache, kept

    held = [(cache, cache + 0)]
    x, given = jnp.ones((rows, hidden)), [inputs(layer) for layer in range(layers)]

    def call() -> list[jax.Array]:
        held[0], kept = passes(held[0], x, given)
        return kept

    moved = 8 * hidden + both_width + both_width // 2 + 2 * columns
    return call, (), dict(flops=0.0, num_bytes=4.0 * rows * layers * moved)


def _attention(rows: int, context: int, dtype: str, layers: int) -> Case:
    """Attention of `rows` sequences, one query each, over `context` keys."""
    pages_each = -(-context // PAGE_SIZE)
    shape = (layers, 1 + rows * pages_each, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    pages, scales = jax.random.normal(jax.random.key(0), shape), None
    if dtype == "int8":
        pages, scales = jax.jit(quantize, static_argnums=1)(pages, dtype)
    pages = pages.astype(dtype)
    last = jnp.full(rows, context - 1)
    where = Rows(
        query_start=jnp.arange(rows),
        query_length=jnp.ones(rows, jnp.int32),
        first_position=last,
        context_length=last + 1,
        page_table=1 + jnp.arange(rows * pages_each).reshape(rows, pages_each),
    )
    q = jnp.ones((rows, KV_HEADS * GROUP, HEAD_DIM))

    @jax.jit
    def attend(q: jax.Array, pages: jax.Array, scales: jax.Array | None) -> jax.Array:
        for layer in range(layers):
            q = paged_attention(
                q,
                pages,
                pages,
                layer,
                where,
                scale=HEAD_DIM**-0.5,
                k_scales=scales,
                v_scales=scales,
                max_query_length=1,
            )
        return q

    numbers = 2.0 * rows * layers * context * KV_HEADS * HEAD_DIM
    num_bytes = numbers * pages.dtype.itemsize * (1 if scales is None else 1 + 4 / HEAD_DIM)
    return attend, (q, pages, scales), dict(flops=2 * GROUP * numbers, num_bytes=num_bytes)


OPTIONS = (
    option("--rows", "1,4,32,256", "numbers of tokens of a step, separated by commas"),
    option("--context", 172, "keys that a query sees"),
    option("--layers", 30, "of the model"),
    option("--repeats", 7, "timed runs; rates are those of the fastest"),
)
main = Benchmark(__doc__, run, OPTIONS, "kernels.cpu")


if __name__ == "__main__":
    sys.exit(main())
