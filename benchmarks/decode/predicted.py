"""The predicted time of decode steps: `python -m benchmarks.decode.predicted --help`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.decode.step_time import H100, PAGES, counted, fits, predict

BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (1024, 4096, 16384)


def run(options: argparse.Namespace) -> dict[str, Any]:
    batches = whole_numbers(options.batches, "--batches")
    contexts = whole_numbers(options.contexts, "--contexts")
    rows = []
    for batch in batches:
        for context in contexts:
            sizes: dict[str, Any] = dict(batch=batch, context=context, kv_dtype=options.kv_dtype)
            if not fits("llama-3-8b", H100, **sizes):
                continue
            launches = counted(batch, options.kv_dtype)
            own = predict("llama-3-8b", H100, launches, **sizes)
            rows.append(
                {"batch_size": batch, "context": context, "step_s": own.total_s, **asdict(own)}
            )
    return {
        "model": "llama-3-8b",
        "kv_dtype": options.kv_dtype or "bfloat16",
        "predicted_device": asdict(H100),
        "rows": rows,
    }


OPTIONS = (
    option("--batches", ",".join(map(str, BATCHES)), "sequences that decode together"),
    option("--contexts", ",".join(map(str, CONTEXTS)), "tokens of each sequence"),
    option("--kv-dtype", None, "of the pages", choices=[*filter(None, PAGES)]),
)
main = Benchmark(__doc__, run, OPTIONS, "predicted_decode")


if __name__ == "__main__":
    sys.exit(main())
