"""`--compare`: our runtime and other systems on the same requests and weights, in turns."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from benchmarks.cells.applications import CellRequest, Sizes
from benchmarks.cells.models import random_weights
from benchmarks.cells.playing import Served, figures_of
from benchmarks.common.harness import Record, option
from benchmarks.common.processes import PeerError, chosen, run
from benchmarks.common.repeats import in_turns, summary
from benchmarks.offline.peers.compare import OURS, Environment, commands_of
from jaxserve.workload.items import arrival_times

RUN_LIMIT_S = 1800.0
# A peer's values agree with ours within this share of their norm.
_TOLERANCE = 1e-4


@final
@dataclass(frozen=True)
class CellPeer:
    """A script, its environment and what it serves.

    Attributes:
      variant: the script's mode, if it has several.
      max_batch: the most requests of a batch; None for `max_batch_of` the application.
    """

    script: str
    environment: Environment
    applications: tuple[str, ...]
    variant: str = ""
    max_batch: int | None = None

    def command(self) -> list[str]:
        """Return the command without the job's path, after creating a missing environment."""
        return [str(self.environment.python()), "-m", f"benchmarks.cells.peers.{self.script}"]


_TORCH = Environment(("torch==2.13.0", "numpy"))
PEERS = {
    "torch_packed": CellPeer("torch_sequences", _TORCH, ("lstm", "seq2seq"), "packed"),
    "torch_padded": CellPeer("torch_sequences", _TORCH, ("lstm", "seq2seq"), "padded"),
    "torchfold": CellPeer(
        "torchfold_trees",
        Environment(("torch==2.13.0", "numpy", "torchfold==0.1.0")),
        ("treelstm", "identical_trees"),
    ),
    # 64 graphs at once were best for it in the thesis (2.7.5).
    "dynet": CellPeer(
        "dynet_graphs",
        Environment(("dynet38==2.2", "numpy")),
        ("lstm", "treelstm", "identical_trees"),
        max_batch=64,
    ),
}
GROUPS = {"torch": ("torch_packed", "torch_padded")}


OPTIONS = (
    option("--compare", None, f"with commas: {', '.join([*GROUPS, *PEERS])}"),
    option("--compare-requests", 500, "of each run"),
    option("--unfolded", False, "ours multiplies embeddings with weights for every token, too"),
)


def peers_of(options: argparse.Namespace) -> dict[str, CellPeer]:
    """Return the peers of `--compare`; none without the option."""
    return chosen(options.compare, PEERS, GROUPS)


def run_peers(
    by_application: Mapping[str, Sequence[CellRequest]],
    options: argparse.Namespace,
    peers: Mapping[str, CellPeer],
    sizes: Sizes,
    record: Record,
) -> list[dict[str, Any]]:
    """Return every system's figures on the requests of each application.

    Requests arrive all at once, and at a moderate load: half of the highest rate that a peer served
    when all arrived at once.
    """
    found: list[dict[str, Any]] = []
    commands, failed = commands_of("benchmarks.cells.peers.ours", peers)
    for application, all_requests in by_application.items():
        names = [n for n, peer in peers.items() if application in peer.applications]
        if not names:
            continue
        requests = all_requests[: options.compare_requests]
        weights: dict[str, Any] = random_weights(application, sizes, options.seed)
        with tempfile.TemporaryDirectory(prefix="jaxserve-cells-") as folder:
            np.savez(Path(folder) / "weights.npz", **weights)
            job = {
                "weights": f"{folder}/weights.npz",
                "size": options.size,
                "hidden_size": sizes.hidden_size,
                "vocab_size": sizes.vocab_size,
                "slot_memory": options.slot_memory,
                "folds": not options.unfolded,
                "max_batch": max_batch_of(requests, sizes),
                "requests": [
                    {"tokens": each.tokens, "num_output_tokens": each.num_output_tokens}
                    if each.tree is None
                    else {"tree": each.tree}
                    for each in requests
                ],
            }
            contest = _Contest(
                {name: commands[name] for name in (OURS, *names) if name in commands},
                peers,
                Path(folder),
                record,
                {name: failed[name] for name in names if name in failed},
            )
            rate = None
            for load in ("all at once", "moderate load"):
                pattern = "all" if rate is None else f"poisson:{rate}"
                job["arrivals"] = arrival_times(len(requests), pattern, options.seed)
                runs = contest.runs(job, options.repeats, f"{application}, {load}")
                for name in (OURS, *names):
                    about = {"application": application, "load": load, "rate": rate, "engine": name}
                    own = {"requests_per_s": None, "latency_s": None, "runs": []}
                    if runs.get(name):
                        own = summary(runs[name])
                    found.append({**about, "error": contest.errors.get(name), **own})
                served = [e["requests_per_s"] for e in found[-len(names) :] if e["requests_per_s"]]
                if not served:
                    break
                rate = max(served) / 2
    return found


def max_batch_of(requests: Sequence[CellRequest], sizes: Sizes) -> int:
    """Return the largest batch, in requests, that every cell of an application allows."""
    return min(sizes.max_batch[cell] for request in requests for cell in request.counts())


@final
@dataclass(frozen=True)
class _Contest:
    """Systems that take turns in a folder; one with an error does not run again."""

    commands: Mapping[str, list[str]]
    peers: Mapping[str, CellPeer]
    folder: Path
    record: Record
    errors: dict[str, str]

    def runs(
        self, job: Mapping[str, Any], repeats: int, label: str
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the figures of every run of a job."""
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in self.commands}
        reference: list[list[float]] | None = None
        for number, name in in_turns(list(self.commands), repeats):
            if name in self.errors:
                continue
            if not self.record.allows(f"{label}, {name}, run {number + 1}"):
                continue
            print(f"{label}: {name}", file=sys.stderr)
            try:
                result = self._run(name, job)
            except PeerError as error:
                self.errors[name] = str(error)
                continue
            values = result["values"]
            reference = values if name == OURS else reference
            served = [
                Served(at_s, begin, end)
                for at_s, (begin, end) in zip(job["arrivals"], result["times"], strict=True)
            ]
            figures = {
                **figures_of(served, warm_share=0.0),
                "startup_s": result["startup_s"],
                "peak_host_bytes": result["peak_bytes"],
                "agreeing": None if reference is None else _agreeing(values, reference),
            }
            runs[name].append(figures)
        return runs

    def _run(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        peer = self.peers.get(name)
        own = {**job, "variant": peer.variant if peer else ""}
        if peer and peer.max_batch:
            own["max_batch"] = peer.max_batch
        path = self.folder / "job.json"
        path.write_text(json.dumps(own), encoding="utf-8")
        return run([*self.commands[name], str(path)], self.folder / f"{name}.log", RUN_LIMIT_S)


def _agreeing(values: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float:
    same = [
        float(np.linalg.norm(np.subtract(a, b))) <= _TOLERANCE * float(np.linalg.norm(b))
        for a, b in zip(values, reference, strict=True)
    ]
    return sum(same) / len(same)
