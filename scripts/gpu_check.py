"""Everything that is to be known of one GPU, in one file: `make gpu-check`.

Runs the tests that need a GPU, times the kernels, and decodes with models of well-known shapes.
Each part is a process of its own; one that fails is recorded and the others go on.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_TESTS = ["pytest", "-q", "-p", "no:cacheprovider", "tests/pallas_kernels/test_on_gpu.py", "-k"]
# The Mosaic kernel's are apart: what never ran on a GPU may hang there.
PARTS: dict[str, list[str]] = {
    "tests": [*_TESTS, "not mosaic"],
    "kernels": ["benchmarks.kernels"],
    "kernels_int8": ["benchmarks.kernels", "--shapes", "decode", "--kv-dtype", "int8"],
    "kernels_float8": ["benchmarks.kernels", "--shapes", "decode", "--kv-dtype", "float8_e4m3fn"],
    "mosaic_tests": [*_TESTS, "mosaic"],
    "mosaic_kernels": [
        *("benchmarks.kernels", "--shapes", "prefill,mixed", "--attention", "mosaic,triton")
    ],
    "decode_llama_3_8b": ["benchmarks.decode", "--model", "llama-3-8b"],
    "decode_llama_3_8b_int8": ["benchmarks.decode", "--kv-dtype", "int8"],
    "decode_llama_3_8b_float8": ["benchmarks.decode", "--kv-dtype", "float8_e4m3fn"],
    "decode_llama_2_13b": ["benchmarks.decode", "--model", "llama-2-13b", "--batches", "1,8,32"],
}


def main() -> int:
    """Run the parts and write the file; 1 if one failed."""
    options = _parser().parse_args()
    device = _device()
    if device is None:
        print("gpu-check: JAX finds no NVIDIA GPU here; nothing was run", file=sys.stderr)
        return 2
    parts = {}
    for name in options.parts.split(","):
        print(f"---- {name}", file=sys.stderr)
        parts[name] = _run(PARTS[name], options.limit)
    output = options.output or Path("benchmarks/results") / f"gpu_check_{_slug(device)}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"device": device, "parts": parts}, indent=2) + "\n")
    failed = [name for name, part in parts.items() if part["exit_code"]]
    for name in failed:
        print(f"gpu-check: {name} failed; see {output}", file=sys.stderr)
    return 1 if failed else 0


def _run(arguments: list[str], limit_s: float) -> dict[str, Any]:
    begin_s = time.perf_counter()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        is_benchmark = arguments[0].startswith("benchmarks.")
        output = ["--output", file.name] if is_benchmark else []
        command = [sys.executable, "-m", *arguments, *output]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=None, text=True, timeout=limit_s
            )
            exit_code, text = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            exit_code, text = 124, f"ran longer than {limit_s:.0f} s"
        written = Path(file.name).read_text()
    return {
        "exit_code": exit_code,
        "wall_s": time.perf_counter() - begin_s,
        "result": json.loads(written) if written else text[-4000:],
    }


def _device() -> str | None:
    """The GPU's name, as a process of its own sees it: it would keep the memory."""
    code = "import jax; d = jax.devices()[0]; print(d.device_kind if d.platform == 'gpu' else '')"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return done.stdout.strip() or None


def _slug(device: str) -> str:
    return re.sub(r"\W+", "_", device).strip("_").lower()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Tests, kernel timings and decode speed of one GPU, in one JSON file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--limit", type=float, default=240.0, help="most seconds of a part")
    parser.add_argument(
        "--output", type=Path, default=None, help="by default under benchmarks/results"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
