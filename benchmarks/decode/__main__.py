"""Decode steps and prefill against the memory roofline: `python -m benchmarks.decode --help`.

One model, with random weights of a well-known shape by default, at several batch sizes.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.common.harness import Benchmark, Record, option, sizes_of, whole_numbers
from benchmarks.common.shapes import SHAPES, shape_folder

# Tokens of the answers in a trace, which has every kernel of every step.
_TRACED_TOKENS = 64
# XLA launches the kernels of CUDA graphs one by one while a profiler runs, unless it has this flag.
_TRACES_GRAPHS = "--xla_enable_command_buffers_during_profiling=true"


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.trace:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_TRACES_GRAPHS}"
    import jax.numpy as jnp

    from benchmarks.common import roofline
    from benchmarks.decode.batches import Batches
    from jaxserve import Runtime
    from jaxserve.execution.sizes import platform_defaults
    from jaxserve.kernels import dispatch

    sizes = whole_numbers(options.batches, "--batches")
    traced = whole_numbers(options.trace, "--trace") if options.trace else []
    prefills = [
        sizes_of(each, "--prefill", "8x4096") for each in options.prefill.split(",") if each
    ]
    dtype = jnp.dtype(options.dtype or platform_defaults().dtype)
    length = options.prompt_tokens + options.output_tokens
    record = Record.of(
        "decode",
        options,
        model=options.model,
        precision=dtype.name,
        kv_dtype=options.kv_dtype or dtype.name,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        batches=[],
        prefill=[],
    )
    # Before the runtime takes the memory.
    machine = roofline.measure_gpu(dtype)
    record.result["machine"] = machine.figures
    with ExitStack() as stack:
        model, load = options.model, "auto"
        if model in SHAPES:
            model, load = stack.enter_context(shape_folder(model)), "random"
        rt = stack.enter_context(
            Runtime.from_pretrained(
                model,
                load=load,
                dtype=options.dtype,
                kv_dtype=options.kv_dtype,
                attention=options.attention,
                max_slots=max(sizes),
                max_context=max([length, *(tokens + 1 for _, tokens in prefills)]),
                # Only some sizes are used, and each of them runs once before it is timed.
                warmup=False,
            )
        )
        batches = Batches(rt, machine, dtype, options.prompt_tokens, options.output_tokens)
        short = replace(batches, output_tokens=min(_TRACED_TOKENS, options.output_tokens))
        # One measurement of each kind first, in case the budget runs out.
        record.add("batches", f"batch {sizes[0]}", partial(batches.measure, sizes[0]))
        for count, tokens in prefills:
            measured = partial(batches.prefill, count, tokens)
            record.add("prefill", f"{count} prompts of {tokens}", measured)
        for size in traced:
            record.add("traces", f"trace of batch {size}", partial(short.trace, size))
        for size in sizes[1:]:
            record.add("batches", f"batch {size}", partial(batches.measure, size))
        record.result["memory"] = batches.memory()
    record.result["served_by"] = [asdict(choice) for choice in dispatch.choices()]
    record.save()
    return record.result


OPTIONS = (
    option("--model", "llama-3-8b", f"{', '.join(SHAPES)}, or a name, folder or GGUF"),
    option("--dtype", None, "of weights and cache; the platform's by default"),
    option("--kv-dtype", None, "of the cache, if not --dtype's: int8 or float8_e4m3fn"),
    option("--batches", "1,8,32,128,256", "sequences that decode together"),
    option("--prompt-tokens", 512, "of each prompt"),
    option("--output-tokens", 128, "of each answer"),
    option("--attention", None, "by name, such as mosaic,triton; the platform's choice"),
    option("--prefill", "", "COUNTxTOKENS of prompts that get one token, such as 8x4096"),
    option("--trace", "", "batches whose idle time on a GPU is read off a trace"),
)
main = Benchmark(__doc__, run, OPTIONS, "decode", has_budget=True)


if __name__ == "__main__":
    sys.exit(main())
