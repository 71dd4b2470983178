"""The predicted time of decode steps: `python -m benchmarks.decode.predicted --help`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.decode.step_time import H100, PAGES, counted, fits, predict

MODEL = "llama-3-8b"
BATCHES, CONTEXTS = (1, 8, 32, 64, 128, 256), (1024, 4096, 16384)


def run(options: argparse.Namespace) -> dict[str, Any]:
    contexts = whole_numbers(options.contexts, "--contexts")
    rows = []
    for batch in whole_numbers(options.batches, "--batches"):
        for context in contexts:
            sizes: dict[str, Any] = dict(batch=batch, context=context, kv_dtype=options.kv_dtype)
            if fits(MODEL, H100, **sizes):
                own = predict(MODEL, H100, counted(batch, options.kv_dtype), **sizes)
                about = {"batch_size": batch, "context": context, "step_s": own.total_s}
                rows.append({**about, **asdict(own)})
    return {
        "model": MODEL,
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
