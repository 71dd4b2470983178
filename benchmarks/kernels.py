"""The GPU kernels against the device's limits: `python -m benchmarks.kernels --help`.

Paged attention at the named shapes: time, the share of the roofline that is reached, the error
against float32, and JAX's own paged attention beside it where that can serve the shape. Writes into
the cache and copies of its pages: time, and the share of the copy bandwidth. Tables on stderr, one
JSON object on stdout. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table
from tqdm import tqdm

from benchmarks import environment, kernel_moves
from benchmarks.output import command, show
from benchmarks.roofline import Machine, kv_token_bytes, measure_copy, measure_machine, seconds
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import KV_DTYPES
from pallas_kernels import Rows, dispatch, paged_attention, quantize
from pallas_kernels.kv_write import shapes as write_shapes
from pallas_kernels.page_copy import shapes as copy_shapes
from pallas_kernels.paged_attention import Capacity, Plan, plan, planned_tiling
from pallas_kernels.paged_attention.shapes import (
    BENCHMARK_SHAPES,
    GPU_DECODE_SHAPES,
    GPU_MIXED_SHAPES,
    GPU_PREFILL_SHAPES,
    AttentionShape,
)

SHAPES = {
    "decode": GPU_DECODE_SHAPES,
    "prefill": GPU_PREFILL_SHAPES,
    "mixed": GPU_MIXED_SHAPES,
    "small": BENCHMARK_SHAPES,
}
MOVES = {
    "write": write_shapes.CONFIGURATIONS,
    "copy": copy_shapes.CONFIGURATIONS,
    "small_moves": (*write_shapes.SMALL_CONFIGURATIONS, *copy_shapes.SMALL_CONFIGURATIONS),
}
# Layers of the cache, so that what one call reads is in no cache of the device for the next.
_CACHE_BYTES = 512 << 20
_CALLS = 20
_ROWS_COMPARED = 4

# k_pages and v_pages of `paged_attention`, and their scales where they have any.
Pages = dict[str, jax.Array]


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every shape's figures."""
    kinds = options.shapes.split(",")
    unknown = sorted(set(kinds) - {*SHAPES, *MOVES})
    if unknown:
        raise InvalidConfigError(f"unknown shapes {unknown}; give some of {(*SHAPES, *MOVES)}")
    if options.kv_dtype not in (None, *KV_DTYPES):
        raise InvalidConfigError(f"--kv-dtype {options.kv_dtype}: give one of {KV_DTYPES}")
    dtype = jnp.dtype(options.dtype)
    page_dtype = jnp.dtype(options.kv_dtype or dtype)
    machine = Machine(flops_per_s=measure_machine(dtype).flops_per_s, bytes_per_s=measure_copy())
    shapes = [shape for kind in kinds for shape in SHAPES.get(kind, ())]
    moves = [move for kind in kinds for move in MOVES.get(kind, ())]
    results, moved = [], []
    with tqdm([*shapes, *moves], desc="timing kernels", delay=2, leave=False) as bar:
        for each in bar:
            bar.set_postfix_str(each.name if isinstance(each, AttentionShape) else str(each))
            if isinstance(each, AttentionShape):
                results.append(_measure(each, dtype, page_dtype, machine, options.attention))
            else:
                moved.append(kernel_moves.measure(each, machine.bytes_per_s))
    return {
        "benchmark": "kernels",
        "dtype": dtype.name,
        "page_dtype": page_dtype.name,
        "machine": {
            "copy_bytes_per_s": machine.bytes_per_s,
            "product_flops_per_s": machine.flops_per_s,
        },
        "shapes": results,
        "moves": moved,
        "served_by": [asdict(choice) for choice in dispatch.choices()],
        **environment.describe(),
    }


def _measure(
    shape: AttentionShape,
    dtype: jnp.dtype,
    page_dtype: jnp.dtype,
    machine: Machine,
    attention: str | None,
) -> dict[str, Any]:
    token_bytes = kv_token_bytes(shape.num_kv_heads, shape.head_dim, page_dtype)
    kv_bytes = sum(context for _, context in shape.rows) * token_bytes
    num_bytes, flops = _work(shape, dtype, kv_bytes)
    layers = max(1, min(16, -(-_CACHE_BYTES // kv_bytes)))
    q, pages, rows = _inputs(shape, dtype, page_dtype, layers)
    longest = 1 if shape.is_decode else None
    work = _plan(shape, rows, attention)
    attend = partial(paged_attention, max_query_length=longest, implementation=attention)
    own_s = _seconds(partial(attend, rows=rows, plan=work), q, pages, layers)
    bound_s = machine.step_s(flops=flops, num_bytes=num_bytes)
    result = {
        "shape": shape.name,
        "seconds": own_s,
        "bound_s": bound_s,
        "of_bound": bound_s / own_s,
        "bytes_per_s": num_bytes / own_s,
        "flops_per_s": flops / own_s,
        "error": _error(shape, attend, q, pages, rows, attention),
    }
    peer_s = None if page_dtype != dtype else _jax_seconds(shape, q, pages, rows)
    return result if peer_s is None else {**result, "jax_paged_attention_s": peer_s}


def _work(shape: AttentionShape, dtype: jnp.dtype, kv_bytes: int) -> tuple[int, int]:
    """Bytes that have to be moved, and operations of both products."""
    queries = sum(queries for queries, _ in shape.rows)
    pairs = sum(queries * context - queries * (queries - 1) // 2 for queries, context in shape.rows)
    each = shape.num_heads * shape.head_dim
    return kv_bytes + 2 * queries * each * dtype.itemsize, 4 * pairs * each


def _inputs(
    shape: AttentionShape, dtype: jnp.dtype, page_dtype: jnp.dtype, layers: int
) -> tuple[jax.Array, Pages, Rows]:
    """Random ones, made on the device; pages lie scattered, each of one row alone."""
    lengths = np.asarray([queries for queries, _ in shape.rows], np.int32)
    contexts = np.asarray([context for _, context in shape.rows], np.int32)
    needed = -(-contexts // shape.page_size)
    num_pages = 1 + int(needed.sum())
    pages = np.random.default_rng(0).permutation(np.arange(1, num_pages, dtype=np.int32))
    table = np.zeros((len(contexts), int(needed.max())), np.int32)
    table[np.arange(table.shape[1]) < needed[:, None]] = pages
    rows = Rows(
        query_start=jnp.asarray(np.cumsum(lengths) - lengths, jnp.int32),
        query_length=jnp.asarray(lengths),
        first_position=jnp.asarray(contexts - lengths),
        context_length=jnp.asarray(contexts),
        page_table=jnp.asarray(table),
    )
    cache = (layers, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(0), 3)
    q = normal(keys[0], (int(lengths.sum()), shape.num_heads, shape.head_dim), dtype)
    made: Pages = {}
    for name, key in zip("kv", keys[1:], strict=True):
        made[f"{name}_pages"] = normal(key, cache, dtype)
        if page_dtype != dtype:
            quantized = jax.jit(partial(quantize, dtype=page_dtype))
            made[f"{name}_pages"], made[f"{name}_scales"] = quantized(made[f"{name}_pages"])
    return q, made, rows


def _plan(shape: AttentionShape, rows: Rows, attention: str | None) -> Plan | None:
    tiling = planned_tiling(
        jax.devices()[0],
        attention,
        kv_heads=shape.num_kv_heads,
        group=shape.num_heads // shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    if tiling is None:
        return None
    length = np.asarray(rows.query_length)
    capacity = Capacity.of(
        tiling,
        num_tokens=int(length.sum()),
        num_rows=len(length),
        max_context=rows.page_table.shape[1] * shape.page_size,
        is_decode=shape.is_decode,
    )
    return plan(
        *(tiling, capacity),
        query_length=length,
        first_position=np.asarray(rows.first_position),
        context_length=np.asarray(rows.context_length),
    )


def _seconds(attend: Callable[..., jax.Array], q: jax.Array, pages: Pages, layers: int) -> float:
    """Of one call, in a chain over the layers in turn that attends with what came out before."""

    def chain(q: jax.Array, pages: Pages) -> jax.Array:
        for i in range(_CALLS):
            q = attend(q, layer=i % layers, **pages)
        return q

    return seconds(jax.jit(chain), q, pages) / _CALLS


def _error(
    shape: AttentionShape,
    attend: Callable[..., jax.Array],
    q: jax.Array,
    pages: Pages,
    rows: Rows,
    attention: str | None,
) -> float:
    """Relative norm of some rows' difference from XLA's, which computes in float32."""
    some = jax.tree.map(lambda x: x[:_ROWS_COMPARED], rows)
    if shape.is_decode:
        q = q[:_ROWS_COMPARED]
    attend = partial(attend, layer=0, rows=some, **pages)
    got = attend(q, plan=_plan(shape, some, attention))
    wanted = attend(q.astype(jnp.float32), implementation="xla")
    owned = slice(0, int(some.query_length.sum()))
    got, wanted = np.asarray(got, np.float32)[owned], np.asarray(wanted)[owned]
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def _jax_seconds(shape: AttentionShape, q: jax.Array, pages: Pages, rows: Rows) -> float | None:
    """Of the decoding attention that JAX ships for GPUs, over the same pages."""
    if not shape.is_decode or jax.default_backend() != "gpu":
        return None
    from jax.experimental.pallas.ops.gpu import paged_attention as peer

    # [kv_heads, pages, page_size, head_dim]
    own = {name: jnp.swapaxes(each[0], 0, 1) for name, each in pages.items()}
    scaled = q * jnp.asarray(shape.head_dim**-0.5, q.dtype)

    def attend(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, layer: int) -> jax.Array:
        del layer
        return peer.paged_attention(q, k_pages, v_pages, rows.page_table, rows.context_length)

    return _seconds(attend, scaled, own, 1)


def _print_table(result: dict[str, Any]) -> None:
    machine = result["machine"]
    title = (
        f"copy {machine['copy_bytes_per_s'] / 1e9:.0f} GB/s, "
        f"products {machine['product_flops_per_s'] / 1e12:.2f} TFLOP/s"
    )
    if result["shapes"]:
        table = Table(
            *("attention", "us", "GB/s", "TFLOP/s", "of bound", "error", "JAX's own, us"),
            title=title,
            box=None,
        )
        for row in result["shapes"]:
            peer_s = row.get("jax_paged_attention_s")
            table.add_row(
                *_common(row)[:3],
                f"{row['flops_per_s'] / 1e12:.2f}",
                _common(row)[3],
                f"{row['error']:.1e}",
                "" if peer_s is None else f"{peer_s * 1e6:,.1f}",
            )
        show(table)
    if result["moves"]:
        table = Table("moves", "us", "GB/s", "of bound", "XLA, us", title=title, box=None)
        for row in result["moves"]:
            table.add_row(*_common(row), f"{row['xla_s'] * 1e6:,.1f}")
        show(table)


def _common(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Shape, microseconds, gigabytes a second, and the share of the bound."""
    return (
        row["shape"],
        f"{row['seconds'] * 1e6:,.1f}",
        f"{row['bytes_per_s'] / 1e9:,.0f}",
        f"{row['of_bound']:.0%}",
    )


def _parser() -> argparse.ArgumentParser:
    from pathlib import Path

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="The GPU kernels at named shapes against the roofline of the device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--shapes",
        default="decode,prefill,mixed,write,copy",
        help=f"some of {', '.join((*SHAPES, *MOVES))}",
    )
    add("--dtype", default="bfloat16", help="of queries and pages")
    add("--kv-dtype", default=None, help="of pages with scales: int8 or float8_e4m3fn")
    add("--attention", default=None, help="by name, such as mosaic,triton; the platform's choice")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
