"""Attention over scattered pages: `python -m benchmarks.kernels.scattered --help`.

Figure 3.17 of the Pensieve thesis: attention of several tokens a row over scattered pages, against
copying the pages into one piece first, and against one token at a time. The ways take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.common.repeats import Figures, in_turns, repeats, summary
from jaxserve.core.errors import InvalidConfigError
from jaxserve.kernels import Rows, paged_attention
from jaxserve.kernels.paged_attention.shapes import AttentionShape, make_inputs

# Of SmolLM2-135M.
_HEADS = dict(num_heads=9, num_kv_heads=3, head_dim=64, page_size=32)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Rows], jax.Array]


def run(options: argparse.Namespace) -> dict[str, Any]:
    contexts = whole_numbers(options.contexts, "--contexts")
    if min(contexts) < options.queries:
        raise InvalidConfigError(
            f"--contexts {options.contexts!r}: pass numbers of at least {options.queries}, the "
            "queries of a row"
        )
    bar = tqdm(contexts, desc="timing attention", delay=2, leave=False)
    return {"contexts": [{"context": context, **_measure(options, context)} for context in bar]}


def _measure(options: argparse.Namespace, context: int) -> Figures:
    shape = AttentionShape(
        name=f"{options.batch}x{options.queries}_of_{context}",
        **_HEADS,
        rows=((options.queries, context),) * options.batch,
    )
    inputs = make_inputs(shape, 0, layers=1)
    expected = _over_pages(*inputs)
    compiled = {name: jax.jit(attend) for name, attend in WAYS.items()}
    for name, attend in compiled.items():
        error = jnp.linalg.norm(attend(*inputs) - expected) / jnp.linalg.norm(expected)
        assert float(error) < 1e-4, f"{name} is off by {float(error):.1e}"
    runs: list[Figures] = [{} for _ in range(options.repeats)]
    for number, name in in_turns(list(compiled), options.repeats):
        begin_s = time.perf_counter()
        jax.block_until_ready(compiled[name](*inputs))
        runs[number][name] = time.perf_counter() - begin_s
    return summary(runs)


def _over_pages(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, rows: Rows) -> jax.Array:
    return paged_attention(q, k_pages, v_pages, 0, rows)


def _copied_out(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, rows: Rows) -> jax.Array:
    """Copy the pages of each row to adjacent places, in order, and attend to the copies."""
    num_rows, width = rows.page_table.shape
    whole = jnp.arange(num_rows * width, dtype=jnp.int32).reshape(num_rows, width)
    k_whole, v_whole = (pages[:, rows.page_table.reshape(-1)] for pages in (k_pages, v_pages))
    return paged_attention(q, k_whole, v_whole, 0, replace(rows, page_table=whole))


def _one_token_at_a_time(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, rows: Rows
) -> jax.Array:
    """Call a decoding kernel once for each query of a row."""
    num_rows = rows.query_start.shape[0]
    by_query = q.reshape(num_rows, -1, *q.shape[1:])

    def attend(number: jax.Array) -> jax.Array:
        one = Rows(
            query_start=jnp.arange(num_rows, dtype=jnp.int32),
            query_length=jnp.ones(num_rows, jnp.int32),
            first_position=rows.first_position + number,
            context_length=rows.first_position + number + 1,
            page_table=rows.page_table,
        )
        return paged_attention(by_query[:, number], k_pages, v_pages, 0, one, max_query_length=1)

    out = jax.lax.map(attend, jnp.arange(by_query.shape[1], dtype=jnp.int32))
    return out.swapaxes(0, 1).reshape(q.shape)


WAYS: dict[str, Attend] = {
    "over_pages_s": _over_pages,
    "copied_out_s": _copied_out,
    "one_token_at_a_time_s": _one_token_at_a_time,
}


OPTIONS = (
    option("--batch", 32, "rows"),
    option("--queries", 8, "of each row, at the end of its context"),
    option("--contexts", "128,256,512,1024,2048,4096", "tokens of a row"),
    repeats("way", 9),
)
main = Benchmark(__doc__, run, OPTIONS, "scattered")


if __name__ == "__main__":
    sys.exit(main())
