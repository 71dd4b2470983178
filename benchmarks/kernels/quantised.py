"""Products with weights in few bits, on this CPU: `python -m benchmarks.kernels.quantised`.

Prints one JSON object, and a table on stderr; docs/benchmarks/quantisation.md says what is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from benchmarks.common.output import command, show
from pallas_kernels import matmul, quantised_matmul
from pallas_kernels.quantised_matmul import quantise

# The weights of a layer of SmolLM2-135M: [in, out].
SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
# Name -> arguments of `quantise`; None for float32.
FORMATS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "int8": {"bits": 8, "group": 32},
    "int4, symmetric": {"bits": 4, "group": 32},
    "int4": {"bits": 4, "group": 32, "has_minima": True},
}


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=show_result)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times of every format and number of rows."""
    from benchmarks.common import environment

    found: dict[str, dict[str, Any]] = {}
    for name, arguments in FORMATS.items():
        weights = _weights(arguments, options.layers)
        found[name] = {
            rows: _timed(weights, int(rows), options.repeats) for rows in options.rows.split(",")
        }
    return {
        "benchmark": "kernels.quantised",
        "layers": options.layers,
        "shapes": SHAPES,
        "formats": found,
        **environment.describe(),
    }


def _weights(arguments: dict[str, Any] | None, layers: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), (layers, len(SHAPES)))
    draw = jax.jit(jax.random.normal, static_argnums=1)

    packing = None if arguments is None else jax.jit(partial(quantise, **arguments))

    def one(key: jax.Array, depth: int, width: int) -> Any:
        if packing is None:
            return draw(key, (depth, width))
        return packing(draw(key, (width, depth)))

    return [
        one(keys[layer, i], *shape) for layer in range(layers) for i, shape in enumerate(SHAPES)
    ]


def _timed(weights: list[Any], rows: int, repeats: int) -> dict[str, float]:
    depths = sorted({depth for depth, _ in SHAPES})
    inputs = {depth: jax.random.normal(jax.random.key(depth), (rows, depth)) for depth in depths}

    @jax.jit
    def all_products(weights: list[Any], inputs: dict[int, jax.Array]) -> jax.Array:
        out = jnp.float32(0)
        for i, weight in enumerate(weights):
            # Each product waits for the one before it, as in a model.
            x = inputs[SHAPES[i % len(SHAPES)][0]] + out * 1e-30
            if isinstance(weight, jax.Array):
                y = matmul(x, weight)
            else:
                y = quantised_matmul(x, weight, rounds_activations="groups")
            out = y[0, 0]
        return out

    seconds = []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        all_products(weights, inputs).block_until_ready()
        seconds.append(time.perf_counter() - begin_s)
    best_s = min(seconds[1:])
    layers = len(weights) // len(SHAPES)
    operations = 2 * rows * layers * sum(depth * width for depth, width in SHAPES)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    return {
        "ms": best_s * 1e3,
        "gop_per_s": operations / best_s / 1e9,
        "gb_per_s": num_bytes / best_s / 1e9,
    }


def show_result(result: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("format", "rows", "ms", "Gop/s", "GB/s", box=None, header_style="bold")
    for name, by_rows in result["formats"].items():
        for rows, figures in by_rows.items():
            table.add_row(name, rows, *(f"{value:.2f}" for value in figures.values()))
    show(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.quantised",
        description="Products with weights in few bits, on this CPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", default="1,4,32,256", help="numbers of rows, separated by commas")
    add("--layers", type=int, default=30, help="of the model")
    add("--repeats", type=int, default=7, help="timed runs; the fastest counts")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
