"""Decode steps with scanned and unrolled layers: `python -m benchmarks.decode.choices --help`.

XLA reads its flags once, so other flags need another process:
XLA_FLAGS=--xla_gpu_enable_command_buffer=-WHILE leaves decode loops out of CUDA graphs. One JSON
object on stdout, a table on stderr; docs/benchmarks/gpu.md says what each figure means.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.common import environment, roofline
from benchmarks.common.harness import Benchmark, Record, print_table, whole_numbers
from benchmarks.common.shapes import SHAPES, hf_config
from benchmarks.decode.batches import if_it_fits, measure_batch, step_ms_of
from jaxserve import Runtime
from jaxserve.execution.sizes import platform_defaults
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.loading import LayerLayout, abstract_model, random_params

LAYOUTS: tuple[LayerLayout, ...] = ("scanned", "unrolled")


def run(options: argparse.Namespace) -> dict[str, Any]:
    dtype = jnp.dtype(options.dtype or platform_defaults().dtype)
    sizes = whole_numbers(options.batches, "--batches")
    record = Record(
        options.output,
        options.budget,
        benchmark="choices",
        model=options.model,
        layers=options.layers,
        precision=dtype.name,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        choices=[],
        **environment.describe(),
    )
    machine = roofline.measure_gpu(dtype)
    config = LlamaConfig.from_hf(hf_config(options.model, options.layers))
    for layout in LAYOUTS:
        with ExitStack() as stack:
            if record.is_spent:
                record.skip(layout)
                continue
            try:
                rt = stack.enter_context(_runtime(config, dtype, layout, options, max(sizes)))
            except Exception as error:
                record.fail(layout, error)
                continue
            for size in sizes:
                measured = partial(_measure, rt, layout, size, machine, dtype, options)
                record.add("choices", f"{layout}, batch {size}", measured)
        del rt
        jax.clear_caches()
    return record.result


def _runtime(
    config: LlamaConfig,
    dtype: jnp.dtype,
    layout: LayerLayout,
    options: argparse.Namespace,
    max_slots: int,
) -> Runtime:
    config = replace(config, dtype=dtype.name)
    params = random_params(config, 0, layer_layout=layout)
    graphdef, _ = abstract_model(config, layer_layout=layout)
    return Runtime(
        nnx.merge(graphdef, params),
        max_slots=max_slots,
        max_context=options.prompt_tokens + options.output_tokens,
        warmup=False,
    )


def _measure(
    rt: Runtime,
    layout: LayerLayout,
    size: int,
    machine: roofline.Machine,
    dtype: jnp.dtype,
    options: argparse.Namespace,
) -> dict[str, Any]:
    lengths = {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
    return {"layout": layout, **measure_batch(rt, size, machine, dtype, **lengths)}


def _print_table(result: dict[str, Any]) -> None:
    print_table(
        result["choices"],
        ("layers", "{layout}"),
        ("batch", "{batch_size}"),
        ("ms a step", step_ms_of),
        ("of bound", if_it_fits("{of_bound:.0%}")),
        ("host gap", if_it_fits("{host_gap_share:.1%}")),
        title="{layers} layers of {model}, flags: {xla_flags}".format_map(result),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="llama-3-8b", choices=tuple(SHAPES), help="the shape of the model")
    add("--layers", type=int, default=8, help="of the model; unrolled layers compile slowly")
    add("--dtype", default=None, help="of weights and cache; the platform's by default")
    add("--batches", default="1,32", help="sequences that decode together")
    add("--prompt-tokens", type=int, default=128, help="of each prompt")
    add("--output-tokens", type=int, default=64, help="of each answer")


BENCHMARK = Benchmark(__doc__, run, add_options, show=_print_table, has_budget=True)
main = BENCHMARK.main


if __name__ == "__main__":
    sys.exit(main())
