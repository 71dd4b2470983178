"""Ours and its peers on the same requests, interleaved: `python -m benchmarks.peers --help`."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from benchmarks import environment
from benchmarks.output import emit, run_or_explain
from benchmarks.peers.environments import python_of
from benchmarks.peers.job import write_checkpoint, write_job
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.gguf_source import GGUFSource
from jaxserve.models.registry import pull
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.workload import sharegpt

SCRIPTS = Path(__file__).parent


@final
@dataclass(frozen=True)
class Peer:
    """A script and what its environment needs."""

    script: str
    requirements: tuple[str, ...]


PEERS = {
    "transformers_static": Peer(
        "transformers_static.py", ("torch==2.13.0", "transformers==5.23.0")
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run every engine in turn, `repeats` times; print one JSON object."""
    options = _parser().parse_args(arguments)
    result = run_or_explain(run, options)
    if result is None:
        return 2
    emit(result, options.output)
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Medians, ratios to ours, and how many whole answers agree with ours."""
    names = options.peers.split(",")
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise InvalidConfigError(f"unknown peer(s) {unknown}; known are {sorted(PEERS)}")
    pythons = {name: python_of(name, PEERS[name].requirements) for name in names}
    commands = {"jaxserve": [sys.executable, "-m", "benchmarks.peers.ours"]}
    for name in names:
        commands[name] = [str(pythons[name]), str(SCRIPTS / PEERS[name].script)]
    tokenizer = Tokenizer.from_gguf(GGUFSource(pull(options.model)))
    items = sharegpt.sample(options.num_requests, options.seed, tokenizer=tokenizer)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="jaxserve-peers-") as folder:
        job = Path(folder) / "job.json"
        write_checkpoint(options.model, Path(folder) / "model")
        write_job(job, Path(folder) / "model", items, options.batch_size)
        for repeat in range(options.repeats):
            for name, command in commands.items():
                print(f"{name}, run {repeat + 1} of {options.repeats}", file=sys.stderr)
                runs[name].append(_run(command, job))
    num_output = sum(item.num_output_tokens for item in items)
    ours = statistics.median(r["wall_s"] for r in runs["jaxserve"])
    answers = runs["jaxserve"][0]["token_ids"]
    return {
        "benchmark": "peers",
        "model": options.model,
        "precision": "float32",
        "num_requests": options.num_requests,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "output_tokens": num_output,
        "engines": {
            name: {
                "output_tokens_per_s": num_output / statistics.median(r["wall_s"] for r in results),
                "jaxserve_is_faster_by": statistics.median(r["wall_s"] for r in results) / ours,
                "wall_s": [r["wall_s"] for r in results],
                "startup_s": [r["startup_s"] for r in results],
                "same_answers": sum(
                    a == b for a, b in zip(results[0]["token_ids"], answers, strict=True)
                ),
                "requirements": PEERS[name].requirements if name in PEERS else None,
            }
            for name, results in runs.items()
        },
        **environment.describe(),
    }


def _run(command: list[str], job: Path) -> dict[str, Any]:
    done = subprocess.run(
        [*command, str(job)], cwd=environment.ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Ours and its peers on the same ShareGPT requests; prints one JSON object.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--peers", default=",".join(PEERS), help="separated by commas")
    add("--num-requests", type=int, default=64, help="how many, all at once")
    add("--batch-size", type=int, default=32, help="most sequences at once, for every engine")
    add("--repeats", type=int, default=3, help="interleaved runs, of which the median counts")
    add("--seed", type=int, default=0, help="of the workload's draw")
    add("--model", default="smollm2-135m", help="a registered model")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
