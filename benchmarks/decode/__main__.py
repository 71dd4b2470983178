"""Decoding and prefill against the memory roofline: `python -m benchmarks.decode --help`.

One model, with random weights of a well-known shape by default, at several batch sizes. A table on
stderr, one JSON object on stdout. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.output import command, record_parser, show
from benchmarks.record import Record
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from benchmarks.roofline import Machine
    from jaxserve import Runtime

# Of the answers in a trace: it has every kernel of every step.
_TRACED_TOKENS = 64
# config.json of Llama's architecture.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)
SHAPES = {
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
}


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the result; the exit code."""
    return command(run, _parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every batch's figures."""
    import jax.numpy as jnp

    from benchmarks import environment, roofline
    from jaxserve import Runtime
    from jaxserve.execution.build import platform_defaults
    from pallas_kernels import dispatch

    sizes = sizes_from(options.batches)
    prefills = _prefills_from(options.prefill)
    dtype = jnp.dtype(options.dtype or platform_defaults().dtype)
    record = Record(
        options.output,
        options.budget,
        benchmark="decode",
        model=options.model,
        precision=dtype.name,
        kv_dtype=options.kv_dtype or dtype.name,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        batches=[],
        prefill=[],
        **environment.describe(),
    )
    # Before the runtime takes the memory.
    machine = roofline.measure_gpu(dtype)
    record.result["machine"] = {
        "copy_bytes_per_s": machine.bytes_per_s,
        "product_flops_per_s": machine.flops_per_s,
    }
    with ExitStack() as stack:
        model, load = options.model, None
        if model in SHAPES:
            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-shape-"))
            config = json.dumps(hf_config(options.model))
            (Path(model) / "config.json").write_text(config, encoding="utf-8")
            load = "random"
        answered = options.prompt_tokens + options.output_tokens
        rt = stack.enter_context(
            Runtime.from_pretrained(
                model,
                load=load or "auto",
                dtype=options.dtype,
                kv_dtype=options.kv_dtype,
                attention=options.attention,
                max_slots=max(sizes),
                max_context=max([answered, *(tokens + 1 for _, tokens in prefills)]),
                # Only some sizes are asked for, and each of them is run before it is timed.
                warmup=False,
            )
        )
        lengths = {
            "prompt_tokens": options.prompt_tokens,
            "output_tokens": options.output_tokens,
        }

        def batches(chosen: list[int]) -> None:
            for size in chosen:
                measured = partial(measure_batch, rt, size, machine, dtype, **lengths)
                record.add("batches", f"batch {size}", measured)

        # Something of everything, in case that the time runs out.
        batches(sizes[:1])
        for count, tokens in prefills:
            measured = partial(_prefill, rt, count, tokens, machine, dtype)
            record.add("prefill", f"{count} prompts of {tokens}", measured)
        for size in sizes_from(options.trace) if options.trace else []:
            traced = min(_TRACED_TOKENS, options.output_tokens)
            measured = partial(_traced, rt, size, options.prompt_tokens, traced)
            record.add("traces", f"trace of batch {size}", measured)
        batches(sizes[1:])
    record.result["served_by"] = [asdict(choice) for choice in dispatch.choices()]
    record.save()
    return record.result


def measure_batch(
    rt: Runtime,
    size: int,
    machine: Machine,
    dtype: Any,
    *,
    prompt_tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    """Decode steps with this many sequences, and the whole run from prompts to last tokens."""
    from benchmarks import roofline, step_parts

    needed = size * -(-(prompt_tokens + output_tokens) // rt.options.page_size)
    stats = rt.stats()
    if needed >= stats.num_pages:
        page_bytes = stats.pool_bytes / stats.num_pages
        return {
            "batch_size": size,
            "does_not_fit": f"{needed * page_bytes / 1e9:.1f} GB of keys and values, of "
            f"{stats.pool_bytes / 1e9:.1f} GB for them",
        }
    _answer(rt, size, prompt_tokens, output_tokens, seed=0)  # compiles
    before = rt.stats()
    num_before = len(rt.report().steps)
    wall_s = _answer(rt, size, prompt_tokens, output_tokens, seed=1)
    after = rt.stats()
    step_s = step_parts.full_step_s(rt.report().steps[num_before:], size)
    if step_s is None:
        raise InvalidConfigError(f"no decode step had all {size} sequences; lower --batches")
    bound = roofline.bound(
        *(machine, rt.model_config, dtype),
        kv_dtype=rt.options.kv_dtype,
        batch_size=size,
        context=prompt_tokens + output_tokens / 2,
        num_prompt_tokens=size * prompt_tokens,
        num_output_tokens=size * output_tokens,
    )
    return {
        "batch_size": size,
        "wall_s": wall_s,
        "output_tokens_per_s": size * output_tokens / wall_s,
        "decode_step_s": step_s,
        "decode_tokens_per_s": size / step_s,
        "bound_step_s": bound.decode_step_s,
        "of_bound": bound.decode_step_s / step_s,
        "host_gap_share": (after.host_gap_s - before.host_gap_s) / (after.busy_s - before.busy_s),
    }


def _prefill(rt: Runtime, count: int, tokens: int, machine: Machine, dtype: Any) -> dict[str, Any]:
    """Prompts that are all answered by one token."""
    from benchmarks import roofline

    _answer(rt, count, tokens, 1, seed=0)  # compiles
    wall_s = _answer(rt, count, tokens, 1, seed=1)
    bound = roofline.bound(
        *(machine, rt.model_config, dtype),
        kv_dtype=rt.options.kv_dtype,
        batch_size=count,
        context=tokens,
        num_prompt_tokens=count * tokens,
        num_output_tokens=0,
    )
    return {
        "prompts": count,
        "prompt_tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": count * tokens / wall_s,
        "bound_s": bound.run_s,
        "of_bound": bound.run_s / wall_s,
    }


def _traced(rt: Runtime, size: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """What the device did while it answered a batch."""
    from benchmarks import device_trace

    _answer(rt, size, prompt_tokens, output_tokens, seed=2)  # compiles
    again = partial(_answer, rt, size, prompt_tokens, output_tokens, seed=3)
    return {"batch_size": size, **device_trace.trace(again)}


def _answer(rt: Runtime, size: int, prompt_tokens: int, output_tokens: int, *, seed: int) -> float:
    """Seconds from handing in this many requests to the end of the last one.

    No two seeds share a prompt, whose pages would be found again.
    """
    from jaxserve.workload import random_items

    items = random_items(
        size,
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=output_tokens,
        vocab_size=rt.model_config.vocab_size,
        seed=1000 * size + seed,
    )
    begin_s = time.perf_counter()
    for pending in rt.submit_items(items):
        if (error := pending.result().error) is not None:
            raise error
    return time.perf_counter() - begin_s


def sizes_from(text: str) -> list[int]:
    """Batch sizes with commas between them.

    Raises:
      InvalidConfigError
    """
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InvalidConfigError(f"--batches {text}: give whole numbers, separated by commas")
    return sizes


def _prefills_from(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(map(int, each.split("x"))) for each in text.split(",") if each]
        return [(count, tokens) for count, tokens in pairs]
    except ValueError:
        raise InvalidConfigError(
            f"--prefill {text}: give COUNTxTOKENS, separated by commas, such as 8x4096"
        ) from None


def hf_config(shape: str, num_layers: int | None = None) -> dict[str, Any]:
    """config.json of a shape, with other than its own number of layers if so."""
    config = dict(zip(_SIZES, SHAPES[shape], strict=True))
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    return {**config, "model_type": "llama", "max_position_embeddings": 8192}


def _print_table(result: dict[str, Any]) -> None:
    table = Table(
        *("batch", "ms a step", "tokens/s", "of bound", "host gap", "tokens/s with prompts"),
        title=f"{result['model']}, {result['precision']}, KV in {result['kv_dtype']}",
        box=None,
    )
    for row in result["batches"]:
        if "does_not_fit" in row:
            table.add_row(str(row["batch_size"]), row["does_not_fit"])
            continue
        table.add_row(
            str(row["batch_size"]),
            f"{row['decode_step_s'] * 1e3:.2f}",
            f"{row['decode_tokens_per_s']:,.0f}",
            f"{row['of_bound']:.0%}",
            f"{row['host_gap_share']:.1%}",
            f"{row['output_tokens_per_s']:,.0f}",
        )
    show(table)
    for row in result["prefill"]:
        print(
            f"{row['prompts']} prompts of {row['prompt_tokens']}: {row['tokens_per_s']:,.0f} "
            f"tokens/s, {row['of_bound']:.0%} of the bound",
            file=sys.stderr,
        )
    for row in result.get("traces", ()):
        print(f"batch {row['batch_size']}: device idle {row['idle_share']:.1%}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = record_parser(
        "benchmarks.decode", "Decode steps at several batch sizes against the memory roofline."
    )
    add = parser.add_argument
    add("--model", default="llama-3-8b", help=f"{', '.join(SHAPES)}, or a name, folder or GGUF")
    add("--dtype", default=None, help="of weights and cache; the platform's by default")
    add("--kv-dtype", default=None, help="of the cache, if not --dtype's: int8 or float8_e4m3fn")
    add("--batches", default="1,8,32,128,256", help="sequences that decode together")
    add("--prompt-tokens", type=int, default=512, help="of each prompt")
    add("--output-tokens", type=int, default=128, help="of each answer")
    add("--attention", default=None, help="by name, such as mosaic,triton; the platform's choice")
    add("--prefill", default="", help="COUNTxTOKENS of prompts that get one token, such as 8x4096")
    add("--trace", default="", help="batches of which a GPU's idle time is read off a trace")
    return parser


if __name__ == "__main__":
    sys.exit(main())
