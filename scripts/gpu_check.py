"""Tests and timings of one GPU in one file; `make gpu-check` runs it.

It tests the kernels, times them and those of other libraries, and decodes with models of well-known
shapes. Each part is a process with its own time limit. A part that fails or times out is recorded,
and the rest continue. Parts for which no time is left are recorded as skipped. The file is written
after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from rich.console import Console
from rich.table import Table

from benchmarks.common.environment import commit
from benchmarks.common.harness import write_whole
from benchmarks.common.processes import ROOT, group
from jaxserve.core.gpus import MEMORY_FRACTION, MEMORY_VARIABLE
from jaxserve.kernels.paged_attention.tilings import is_tuned
from scripts.gpu_bars import bars, print_table

# Shapes that the bars need; the other shapes of the curves come last.
_FIRST = ",".join(
    (
        *("llama3_8b_decode_32x4096", "llama3_8b_decode_128x4096", "llama3_8b_decode_32x16384"),
        *("llama3_8b_prefill_4096", "llama3_8b_prefill_16384", "mixed"),
        *("llama3_8b_decode_256x4096", "llama2_13b_decode_32x4096", "llama3_8b_decode_ragged"),
        "llama3_8b_decode_1x16384",
    )
)
# As the command line has it.
_MOST_MEMORY = {MEMORY_VARIABLE: str(MEMORY_FRACTION)}
_PYTEST = ("pytest", "-v", "--tb=line", "-W", "default", "-p", "no:cacheprovider")
_TESTS = (*_PYTEST, "tests/pallas_kernels/test_on_gpu.py", "-k")
# Triton is passed by name, so that a shape that it refuses fails instead of being timed with XLA.
_TRITON = ("benchmarks.kernels", "--attention", "triton")
_EIGHT_BITS = (
    *(*_TRITON, "--shapes", "llama3_8b_decode_32x4096,llama3_8b_decode_128x4096"),
    "--kv-dtype",
)
# By default tests compile with little optimisation, and on one processor.
_AS_SERVED = {"XLA_FLAGS": "", "NPROC": str(os.cpu_count() or 1)}
_COMMAND_BUFFER = "--xla_gpu_enable_command_buffer="

# Other libraries whose versions are recorded, because the peers' results depend on them.
_PACKAGES = (
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "optax", "orbax-checkpoint", "torch", "triton"),
    *("flashinfer-python", "flash-attn", "flash-attn-3"),
)
# A part with less time than this is skipped.
_LEAST_S = 20.0
# Seconds of a part's limit that its benchmark does not get, for its start and its last measurement.
_MARGIN_S = 25.0
_TAIL = 3000


@final
@dataclass(frozen=True)
class Part:
    """A process of gpu-check.

    Attributes:
      command: a Python module and its arguments.
      limit_s: seconds after which the process is ended; its result up to then counts.
      environment: environment variables to set.
      writes: whether it takes `--budget` and `--output`, as benchmarks do; otherwise it is pytest.
    """

    command: tuple[str, ...]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    writes: bool = True


def _decode(model: str, *arguments: str) -> tuple[str, ...]:
    return ("benchmarks.decode", "--model", model, *arguments)


_CHOICES = ("benchmarks.decode.choices",)

# One model of each kind that kernels or steps treat otherwise: grouped heads, learned positions,
# ALiBi, windows with caps, windows with norms, sinks with experts, experts, recurrent states, one
# head of keys, and joined projections.
_MODELS = (
    *("llama", "gpt2", "bloom", "gemma2", "gemma3", "gpt_oss", "mixtral", "qwen3_moe", "mamba"),
    *("falcon", "phi3"),
)
_IN_FLOAT32 = {**_AS_SERVED, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}


def _families(wanted: str) -> tuple[str, ...]:
    return (*_PYTEST, "-m", "", "tests/runtime/test_families.py", "-k", f"test_alone and {wanted}")


_NAMED = " or ".join(f"[{name}]" for name in _MODELS)
# In the order of a first day's questions; a part that comes too late is skipped.
PARTS: Mapping[str, Part] = MappingProxyType(
    {
        # Does it compute what it should?
        "tests": Part((*_TESTS, "not mosaic and not invariant"), 120, _AS_SERVED, writes=False),
        "families": Part(_families(f"({_NAMED})"), 90, _IN_FLOAT32, writes=False),
        # How fast, and why: the roofline, launches, gaps, memory.
        "kernels": Part((*_TRITON, "--peers", "--shapes", _FIRST), 110),
        "decode_llama_3_8b": Part(
            _decode(
                "llama-3-8b",
                "--batches",
                "32,1,128,256,8",
                "--prefill",
                "8x4096,32x512",
                "--trace",
                "32",
            ),
            130,
            _MOST_MEMORY,
        ),
        # How long does it start?
        "start": Part(
            (
                *("benchmarks.startup", "llama-3-8b", '{"warmup": "one_request"}'),
                *("--kinds", "cold,warm"),
            ),
            90,
            _MOST_MEMORY,
        ),
        # How fast are others?
        "kernel_peers": Part(("benchmarks.kernels.peers", "--shapes", _FIRST), 90),
        "hf_llama_3_8b": Part(("benchmarks.decode.peer", "--batches", "32,1,128,8,256"), 70),
        # Kernels that have not run on a GPU yet may hang there, so they are a separate part.
        "mosaic": Part(
            (
                *("benchmarks.kernels", "--attention", "mosaic", "--shapes"),
                "llama3_8b_prefill_4096,llama3_8b_prefill_16384,mixed,llama3_8b_decode_32x4096,"
                "llama3_8b_decode_128x4096,llama3_8b_decode_32x16384",
            ),
            60,
        ),
        "kernels_rest": Part(
            (
                *(*_TRITON, "--peers", "--shapes", "decode,prefill,write,copy,cell"),
                *("--leave-out", _FIRST),
            ),
            100,
        ),
        "products": Part(("benchmarks.kernels", "--shapes", "fused,product"), 100),
        "groups": Part(("benchmarks.kernels", "--shapes", "grouped"), 75),
        "choices": Part(_CHOICES, 45),
        "choices_host": Part(_CHOICES, 45, {"XLA_FLAGS": f"{_COMMAND_BUFFER}-WHILE"}),
        "choices_none": Part(_CHOICES, 45, {"XLA_FLAGS": _COMMAND_BUFFER}),
        "decode_llama_2_13b": Part(
            _decode("llama-2-13b", "--batches", "32,1,8,128,256", "--prefill", "4x4096"),
            90,
            _MOST_MEMORY,
        ),
        "hf_llama_2_13b": Part(
            ("benchmarks.decode.peer", "--model", "llama-2-13b", "--batches", "32,1,8,128,256"), 60
        ),
        # A request has the same bits in any batch: of each kernel, and of a whole runtime.
        "invariant_tests": Part(
            (*_PYTEST, "tests/runtime/test_row_kernels.py", *_TESTS[len(_PYTEST) :], "invariant"),
            120,
            _AS_SERVED,
            writes=False,
        ),
        "mosaic_tests": Part((*_TESTS, "mosaic"), 60, _AS_SERVED, writes=False),
        # Every other configuration of a kernel, and every other family.
        "tests_rest": Part(
            (*_TESTS, "not mosaic and not invariant", "-m", "release"),
            300,
            _AS_SERVED,
            writes=False,
        ),
        "families_rest": Part(_families(f"not ({_NAMED})"), 300, _IN_FLOAT32, writes=False),
        "kernel_peers_rest": Part(
            ("benchmarks.kernels.peers", "--shapes", "decode,prefill", "--leave-out", _FIRST), 150
        ),
        "restore": Part(
            (
                *(
                    "benchmarks.conversations.restore",
                    "--model",
                    "llama-3-8b",
                    "--lengths",
                    "4096,1024",
                ),
                # Loops have 16 iterations, and pages are copied back during several loops.
                *("--others", "7", "--wait-tokens", "256", "--kv-memory", "8GiB"),
            ),
            150,
        ),
        **{f"kernels_{kind}": Part((*_EIGHT_BITS, kind), 60) for kind in ("int8", "float8_e4m3fn")},
        **{
            f"decode_llama_3_8b_{kind}": Part(
                _decode("llama-3-8b", "--batches", "32,256", "--kv-dtype", kind), 90, _MOST_MEMORY
            )
            for kind in ("int8", "float8_e4m3fn")
        },
    }
)


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write the file; return 1 if a part failed, 2 if none could run."""
    begin_s = time.monotonic()
    options = build_parser().parse_args(arguments)
    names = options.parts.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        print(f"gpu-check: unknown parts {unknown}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if options.list:
        _print_parts(names, options.minutes)
        return 0
    about = _about()
    if about is None:
        print("gpu-check: JAX finds no NVIDIA GPU here; nothing was run", file=sys.stderr)
        return 2
    output = options.output or ROOT / "benchmarks/results" / f"gpu_check_{_slug(about)}.json"
    before = json.loads(output.read_text()) if options.resume and output.exists() else {}
    result = check(
        {name: PARTS[name] for name in names},
        output,
        about,
        budget_s=_seconds(options.minutes) - (time.monotonic() - begin_s),
        patience=options.patience,
        before=before.get("parts", {}),
    )
    print_table(result["bars"])
    print(f"gpu-check: {output}", file=sys.stderr)
    if not result["tuned_tiles"]:
        print(
            "gpu-check: the tiles were not tuned on this kind of device; "
            "`python -m benchmarks.kernels.tune` tries others and writes the fastest",
            file=sys.stderr,
        )
    failed = [name for name, part in result["parts"].items() if part["status"] == "failed"]
    for name in failed:
        print(f"gpu-check: {name} failed", file=sys.stderr)
    return 1 if failed else 0


def check(
    parts: Mapping[str, Part],
    output: Path,
    about: Mapping[str, Any],
    *,
    budget_s: float,
    patience: float = 1.0,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run parts in their order, and return the content of the file.

    Args:
      about: device, versions and commit.
      budget_s: seconds for all parts together.
      patience: factor of every part's time limit.
      before: parts of an earlier file. Finished parts do not run again; the rest keep their earlier
        result until they have run again.
    """
    begin_s = time.monotonic()
    results = dict(before or {})
    result: dict[str, Any] = {
        "benchmark": "gpu_check",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "budget_s": budget_s,
        "parts": results,
    }

    def write() -> None:
        result["wall_s"] = time.monotonic() - begin_s
        result["bars"] = bars(results)
        write_whole(output, result)

    left = {n: part for n, part in parts.items() if results.get(n, {}).get("status") != "done"}
    for name, part in left.items():
        left_s = budget_s - (time.monotonic() - begin_s)
        limit_s = min(part.limit_s * patience, left_s)
        if left_s < _LEAST_S:
            results.setdefault(
                name, {"status": "skipped", "reason": f"the {budget_s:.0f} s were over"}
            )
        else:
            print(f"---- {name}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
            results[name] = run_part(part, output.with_name(f"{output.stem}.{name}.part"), limit_s)
        write()
        if results[name]["status"] == "interrupted":
            break
    write()
    return result


def run_part(part: Part, own: Path, limit_s: float) -> dict[str, Any]:
    """Run a part, and return its result, or the part of it written before the process was ended.

    Args:
      own: file for its result and, with `.log` appended, for its output; both are removed unless
        this process is killed.
    """
    own.parent.mkdir(parents=True, exist_ok=True)
    own.unlink(missing_ok=True)
    log = own.with_name(f"{own.name}.log")
    command = [sys.executable, "-m", *part.command]
    if part.writes:
        budget_s = max(limit_s / 2, limit_s - _MARGIN_S)
        command += ["--budget", f"{budget_s:.0f}", "--output", str(own)]
    begin_s = time.monotonic()
    environment = {**os.environ, "JAXSERVE_COMMIT": commit(), **part.environment}
    status, exit_code = "cut off", None
    with log.open("wb") as printed:
        try:
            with group(command, printed, printed, environment) as process:
                exit_code = process.wait(timeout=limit_s)
                status = "failed" if exit_code else "done"
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            status = "interrupted"
    text = log.read_text(encoding="utf-8", errors="replace")
    result = json.loads(own.read_text()) if own.exists() else None
    readable = _readable(text, part)
    print(readable, file=sys.stderr, flush=True)
    own.unlink(missing_ok=True)
    log.unlink()
    if not part.writes:
        result = count_tests(text)
    if status == "done" and result and part.writes and result["skipped"]:
        status = "partly done"
    return {
        "status": status,
        "exit_code": exit_code,
        "wall_s": time.monotonic() - begin_s,
        "limit_s": limit_s,
        "command": " ".join(part.command),
        "environment": dict(part.environment),
        "result": result,
        # The messages of compilers and crashes.
        **({} if status == "done" else {"output": readable[-_TAIL:]}),
    }


def count_tests(text: str) -> dict[str, Any]:
    """Return the counts of outcomes in pytest's verbose output, which may be cut off."""
    outcomes = re.findall(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE)
    failed = [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]
    passed = sum(outcome == "PASSED" for _, outcome in outcomes)
    return {"passed": passed, "failed": failed, "skipped": len(outcomes) - passed - len(failed)}


def _readable(text: str, part: Part) -> str:
    """Return the output of a part without its result and without overwritten progress bars."""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    if part.writes:
        lines = [line for line in lines if not line.startswith('{"benchmark"')]
    return "\n".join(line for line in lines[-60:] if line)


def _about() -> dict[str, Any] | None:
    """Return device, versions and commit, read in a new process because JAX holds device memory."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.common.environment", *_PACKAGES],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    about = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    if not about or about["device"]["platform"] != "gpu":
        return None
    return {**about, "tuned_tiles": is_tuned(about["device"]["kind"])}


# Seconds at the end in which no part runs: the last one's processes end, and the file is written.
_CLOSING_S = 15.0


def _seconds(minutes: float) -> float:
    return max(0.0, 60 * minutes - _CLOSING_S)


def _print_parts(names: list[str], minutes: float) -> None:
    """Print each part with its limit, and whether it fits if all parts before need theirs."""
    table = Table(
        "part", "at most", "until", "", title=f"gpu-check in {minutes:g} minutes", box=None
    )
    until_s, budget_s = 0.0, _seconds(minutes)
    for name in names:
        begin_s, until_s = until_s, until_s + PARTS[name].limit_s
        has_time = until_s <= budget_s
        what = "" if has_time else "cut" if budget_s - begin_s >= _LEAST_S else "if time is left"
        table.add_row(name, f"{PARTS[name].limit_s:.0f} s", f"{until_s:.0f} s", what)
    Console().print(table)


def _slug(about: Mapping[str, Any]) -> str:
    return re.sub(r"\W+", "_", about["device"]["kind"]).strip("_").lower()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check",
        description="Tests, kernel timings, peers and decode speed of one GPU, in one JSON file.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", default=",".join(PARTS), help="parts to run, in this order")
    add("--minutes", type=float, default=10.0, help="time for everything")
    add("--list", action="store_true", help="print the parts and their time; run nothing")
    add("--patience", type=float, default=1.0, help="factor of every part's time limit")
    add("--resume", action="store_true", help="run only the parts that are not done in the file")
    add("--output", type=Path, default=None, help="file; by default under benchmarks/results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
