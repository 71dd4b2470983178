"""Decoding and prefill against the memory roofline: `python -m benchmarks.decode --help`.

One model, with random weights of a well-known shape by default, at several batch sizes. A table on
stderr, one JSON object on stdout. docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.output import command, show
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from benchmarks.roofline import Machine
    from jaxserve import Runtime

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
    from jaxserve.engine.assembly import platform_defaults

    sizes = _sizes_from(options.batches)
    with ExitStack() as stack:
        model, load = options.model, None
        if model in SHAPES:
            model = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-shape-"))
            _write_config(Path(model), options.model)
            load = "random"
        rt = stack.enter_context(
            Runtime.from_pretrained(
                model,
                load=load or "auto",
                dtype=options.dtype,
                kv_dtype=options.kv_dtype,
                max_slots=max(sizes),
                max_context=options.prompt_tokens + options.output_tokens,
            )
        )
        dtype = jnp.dtype(options.dtype or platform_defaults().dtype)
        machine = roofline.Machine(
            flops_per_s=roofline.measure_machine(dtype).flops_per_s,
            bytes_per_s=roofline.measure_copy(),
        )
        batches = [_measure(rt, size, options, machine, dtype) for size in sizes]
    return {
        "benchmark": "decode",
        "model": options.model,
        "precision": dtype.name,
        "kv_dtype": options.kv_dtype or dtype.name,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "machine": {
            "copy_bytes_per_s": machine.bytes_per_s,
            "product_flops_per_s": machine.flops_per_s,
        },
        "batches": batches,
        **environment.describe(),
    }


def _measure(
    rt: Runtime, size: int, options: argparse.Namespace, machine: Machine, dtype: Any
) -> dict[str, Any]:
    """Decode steps with this many sequences, and the prefill before them."""
    from benchmarks import roofline, step_parts
    from jaxserve.workload import random_items

    items = random_items(
        size,
        num_prompt_tokens=options.prompt_tokens,
        num_output_tokens=options.output_tokens,
        vocab_size=rt.model_config.vocab_size,
        seed=size,
    )
    before = rt.stats()
    for pending in rt.submit_items(items):
        if (error := pending.result().error) is not None:
            raise error
    after = rt.stats()
    step_s = step_parts.full_step_s(rt.report(), size)
    if step_s is None:
        raise InvalidConfigError(f"no decode step had all {size} sequences; lower --batches")
    bound = roofline.bound(
        *(machine, rt.model_config, dtype),
        kv_dtype=options.kv_dtype,
        batch_size=size,
        context=options.prompt_tokens + options.output_tokens / 2,
        num_prompt_tokens=size * options.prompt_tokens,
        num_output_tokens=size * options.output_tokens,
    )
    busy_s = after.busy_s - before.busy_s
    return {
        "batch_size": size,
        "decode_step_s": step_s,
        "decode_tokens_per_s": size / step_s,
        "bound_step_s": bound.decode_step_s,
        "of_bound": bound.decode_step_s / step_s,
        "host_gap_share": (after.host_gap_s - before.host_gap_s) / busy_s,
    }


def _sizes_from(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InvalidConfigError(f"--batches {text}: give whole numbers, separated by commas")
    return sizes


def _write_config(folder: Path, shape: str) -> None:
    config = dict(zip(_SIZES, SHAPES[shape], strict=True))
    config_json = {**config, "model_type": "llama", "max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config_json), encoding="utf-8")


def _print_table(result: dict[str, Any]) -> None:
    table = Table(
        *("batch", "ms a step", "tokens/s", "of bound", "host gap"),
        title=f"{result['model']}, {result['precision']}, KV in {result['kv_dtype']}",
        box=None,
    )
    for row in result["batches"]:
        table.add_row(
            str(row["batch_size"]),
            f"{row['decode_step_s'] * 1e3:.2f}",
            f"{row['decode_tokens_per_s']:,.0f}",
            f"{row['of_bound']:.0%}",
            f"{row['host_gap_share']:.1%}",
        )
    show(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description="Decode steps at several batch sizes against the memory roofline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="llama-3-8b", help=f"{', '.join(SHAPES)}, or a name, folder or GGUF")
    add("--dtype", default=None, help="of weights and cache; the platform's by default")
    add("--kv-dtype", default=None, help="of the cache, if not --dtype's: int8 or float8_e4m3fn")
    add("--batches", default="1,8,32,128,256", help="sequences that decode together")
    add("--prompt-tokens", type=int, default=512, help="of each prompt")
    add("--output-tokens", type=int, default=128, help="of each answer")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
