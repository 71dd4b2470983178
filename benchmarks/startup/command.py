"""First and second `jaxserve generate` of a prompt: `python -m benchmarks.startup.command --help`.

Each is a new process, from its start to its end, also in turns with another checkout. A first start
finds only the download: no compiled kernels, converted weights or executables. A second one finds
those. Imports are timed in a third one, with `-X importtime`. Run it alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.processes import HERE, OTHER, PeerError, checkouts, group
from benchmarks.common.repeats import Figures, ratio, repeats, summary, take_turns
from benchmarks.startup.starts import cache_environment, cold_cache

KINDS = ("first", "second")
# The bytecode of each module is kept, as it is after an installation.
_BYTECODE = "PYTHONDONTWRITEBYTECODE"
_IMPORT = re.compile(r"import time:\s+(\d+) \|", re.MULTILINE)
# Of the errors of a start that failed.
_SHOWN_CHARACTERS = 2000


def run(options: argparse.Namespace) -> dict[str, Any]:
    folders = checkouts(options.against)
    for folder in folders.values():
        _starts(folder, options)  # writes bytecode, and reads libraries from the disk

    def play(checkout: str) -> dict[str, Figures]:
        return _starts(folders[checkout], options)

    runs = take_turns(list(folders), options.repeats, play)
    by_kind = {
        kind: {checkout: [run[kind] for run in own] for checkout, own in runs.items()}
        for kind in KINDS
    }
    return {
        "model": options.model,
        "starts": {
            kind: {checkout: summary(own) for checkout, own in of_kind.items()}
            for kind, of_kind in by_kind.items()
        },
        "ratios": {
            kind: {figure: ratio(of_kind, figure, HERE, OTHER) for figure in of_kind[HERE][0]}
            for kind, of_kind in by_kind.items()
            if OTHER in of_kind
        },
    }


def _starts(checkout: Path, options: argparse.Namespace) -> dict[str, Figures]:
    """Return the figures of a first and a second start."""
    arguments = ["-m", "jaxserve", "generate", options.prompt, "--model", options.model, "--quiet"]
    arguments += ["--max-tokens", str(options.max_tokens), "--kv-memory", options.kv_memory]
    with cold_cache() as folder:
        environment = {**cache_environment(folder), "PYTHONPATH": str(checkout)}
        environment.pop(_BYTECODE, None)
        starts = {kind: _start(checkout, environment, arguments)[0] for kind in KINDS}
        _, said = _start(checkout, environment, ["-X", "importtime", *arguments])
    imports_us = [int(found) for found in _IMPORT.findall(said)]
    starts["second"] |= {"imports_s": sum(imports_us) / 1e6, "num_imported": len(imports_us)}
    return starts


def _start(
    checkout: Path, environment: Mapping[str, str], arguments: list[str]
) -> tuple[Figures, str]:
    """Run Python to its end; return its seconds and its peak memory, and what it said on stderr."""
    with tempfile.TemporaryFile() as errors:
        begin_s = time.perf_counter()
        command = [sys.executable, *arguments]
        with group(command, subprocess.DEVNULL, errors, environment, checkout) as process:
            _, status, usage = os.wait4(process.pid, 0)
            passed_s = time.perf_counter() - begin_s
            process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if process.returncode:
        raise PeerError(
            f"jaxserve generate ended with status {process.returncode}: {said[-_SHOWN_CHARACTERS:]}"
        )
    figures = {
        "wall_s": passed_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }
    return figures, said


OPTIONS = (
    option("--model", "smollm2-135m", "a name, folder or GGUF file"),
    option("--prompt", "What is the capital of France?", "the only prompt"),
    option("--max-tokens", 8, "of the answer"),
    option("--kv-memory", "300MB", "of the page pool"),
    option("--against", None, "folder of another checkout, whose starts take turns", Path),
    repeats("checkout", 5),
)
main = Benchmark(__doc__, run, OPTIONS, "start_command")


if __name__ == "__main__":
    sys.exit(main())
