"""Decode steps with scanned and unrolled layers: `python -m benchmarks.decode.choices --help`.

XLA reads its flags once, so other flags need another process:
XLA_FLAGS=--xla_gpu_enable_command_buffer=-WHILE leaves decode loops out of CUDA graphs.
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

from benchmarks.common import roofline
from benchmarks.common.harness import Benchmark, Record, option, whole_numbers
from benchmarks.common.shapes import SHAPES, hf_config
from benchmarks.decode.batches import measure_batch
from jaxserve import Runtime
from jaxserve.execution.sizes import platform_defaults
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.loading import LayerLayout, abstract_model, random_params

LAYOUTS: tuple[LayerLayout, ...] = ("scanned", "unrolled")


def run(options: argparse.Namespace) -> dict[str, Any]:
    dtype = jnp.dtype(options.dtype or platform_defaults().dtype)
    sizes = whole_numbers(options.batches, "--batches")
    record = Record.of(
        "choices",
        options,
        model=options.model,
        layers=options.layers,
        precision=dtype.name,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        choices=[],
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


OPTIONS = (
    option("--model", "llama-3-8b", "the shape of the model", choices=tuple(SHAPES)),
    option("--layers", 8, "of the model; unrolled layers compile slowly"),
    option("--dtype", None, "of weights and cache; the platform's by default"),
    option("--batches", "1,32", "sequences that decode together"),
    option("--prompt-tokens", 128, "of each prompt"),
    option("--output-tokens", 64, "of each answer"),
)
main = Benchmark(__doc__, run, OPTIONS, "choices", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
