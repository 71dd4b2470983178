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
from benchmarks.decode.batches import Batches
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
    config = replace(config, dtype=dtype.name)
    prompt, output = options.prompt_tokens, options.output_tokens
    for layout in LAYOUTS:
        if not record.allows(layout):
            continue
        with ExitStack() as stack:
            try:
                graphdef, _ = abstract_model(config, layer_layout=layout)
                model = nnx.merge(graphdef, random_params(config, 0, layer_layout=layout))
                slots, context = max(sizes), prompt + output
                rt = Runtime(model, max_slots=slots, max_context=context, warmup=False)
                batches = Batches(stack.enter_context(rt), machine, dtype, prompt, output)
            except Exception as error:
                record.fail(layout, error)
                continue
            for size in sizes:
                measured = partial(_measured, layout, batches, size)
                record.add("choices", f"{layout}, batch {size}", measured)
        del model, rt, batches
        jax.clear_caches()
    return record.result


def _measured(layout: LayerLayout, batches: Batches, size: int) -> dict[str, Any]:
    return {"layout": layout, **batches.measure(size)}


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
