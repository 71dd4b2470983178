"""The GPU kernels against the limits of the device: `python -m benchmarks.kernels --help`.

Paged attention at named shapes: time, the share of the roofline, the error against float32, and
JAX's other attention kernels. Writes into the cache and copies of pages: time, and the share of the
copy bandwidth. Products with weights in few bits, and of groups of tokens: time, and the share of
the roofline.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, Record, option
from benchmarks.common.roofline import Machine, measure_gpu, of_bound
from benchmarks.kernels import peers_jax
from benchmarks.kernels.calls import measure_groups, measure_move, measure_product
from benchmarks.kernels.timing import (
    OTHERS,
    SHAPES,
    Attention,
    chosen,
    kv_bytes,
    num_layers,
    time_chain,
)
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import KV_DTYPES
from jaxserve.kernels import dispatch
from jaxserve.kernels.grouped_matmul.shapes import GroupedShape
from jaxserve.kernels.paged_attention.shapes import AttentionShape
from jaxserve.kernels.quantised_matmul.shapes import Configuration as Product


def run(options: argparse.Namespace) -> dict[str, Any]:
    shapes, others = chosen(options.shapes, options.leave_out)
    if options.kv_dtype not in (None, *KV_DTYPES):
        raise InvalidConfigError(f"--kv-dtype {options.kv_dtype}: give one of {KV_DTYPES}")
    dtype = jnp.dtype(options.dtype)
    page_dtype = jnp.dtype(options.kv_dtype or dtype)
    record = Record.of(
        "kernels",
        options,
        dtype=dtype.name,
        page_dtype=page_dtype.name,
        attention=options.attention,
        shapes=[],
        moves=[],
        products=[],
        groups=[],
    )
    machine = measure_gpu(dtype)
    record.result["machine"] = machine.figures
    with tqdm([*shapes, *others], desc="timing kernels", delay=2, leave=False) as bar:
        for each in bar:
            if isinstance(each, AttentionShape):
                measured = partial(_measure, each, dtype, page_dtype, machine, options)
                kind, name = "shapes", each.name
            elif isinstance(each, Product):
                measured = partial(measure_product, each, machine)
                kind, name = "products", str(each)
            elif isinstance(each, GroupedShape):
                measured = partial(measure_groups, each, machine)
                kind, name = "groups", str(each)
            else:
                measured = partial(measure_move, each, machine.bytes_per_s)
                kind, name = "moves", str(each)
            bar.set_postfix_str(name)
            record.add(kind, name, measured)
            record.result["served_by"] = [asdict(choice) for choice in dispatch.choices()]
    record.save()
    return record.result


def _measure(
    shape: AttentionShape,
    dtype: jnp.dtype,
    page_dtype: jnp.dtype,
    machine: Machine,
    options: argparse.Namespace,
) -> dict[str, Any]:
    num_bytes, flops = _work(shape, dtype, page_dtype)
    layers = num_layers(shape, page_dtype)
    attention = Attention.of(shape, dtype, page_dtype, layers, options.attention)
    own_s = attention.seconds()
    bound_s = machine.step_s(flops=flops, num_bytes=num_bytes)
    result: dict[str, Any] = {
        "shape": shape.name,
        "rows": len(shape.rows),
        "longest_query": max(queries for queries, _ in shape.rows),
        "shortest_context": min(context for _, context in shape.rows),
        **of_bound(own_s, bound_s, num_bytes=num_bytes),
        "of_copy": num_bytes / own_s / machine.bytes_per_s,
        "flops_per_s": flops / own_s,
        "error": attention.error(),
    }
    if len(parts := _parts(shape)) > 1:
        works = [_work(part, dtype, page_dtype) for part in parts]
        sum_s = sum(machine.step_s(num_bytes=work[0], flops=work[1]) for work in works)
        result |= {"parts_bound_s": sum_s, "of_parts_bound": sum_s / own_s}
    if options.peers and page_dtype == dtype:
        result["peers"] = peers_jax.measure(attention, time_chain)
    return result


def _parts(shape: AttentionShape) -> list[AttentionShape]:
    """Return the shape with only its decoding rows, and with only the other rows."""
    kinds = [
        tuple(row for row in shape.rows if (row[0] == 1) == decodes) for decodes in (True, False)
    ]
    return [replace(shape, rows=rows) for rows in kinds if rows]


def _work(shape: AttentionShape, dtype: jnp.dtype, page_dtype: jnp.dtype) -> tuple[int, int]:
    queries = sum(queries for queries, _ in shape.rows)
    pairs = sum(queries * context - queries * (queries - 1) // 2 for queries, context in shape.rows)
    each = shape.num_heads * shape.head_dim
    return kv_bytes(shape, page_dtype) + 2 * queries * each * dtype.itemsize, 4 * pairs * each


OPTIONS = (
    option(
        "--shapes",
        "decode,prefill,mixed,write,copy,cell",
        f"some of {', '.join((*SHAPES, *OTHERS))}, or names of shapes",
    ),
    option("--leave-out", "", "shapes to leave out, likewise"),
    option("--dtype", "bfloat16", "of queries and pages"),
    option("--kv-dtype", None, "of pages with scales: int8 or float8_e4m3fn"),
    option("--attention", None, "by name, such as mosaic,triton; the platform's choice"),
    option("--peers", False, "also time JAX's other attention kernels, on a GPU"),
)
main = Benchmark(__doc__, run, OPTIONS, "kernels", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
