"""Ours and its peers on the same requests, interleaved."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm

from benchmarks.peers.catalogue import GROUPS, Peer
from benchmarks.peers.job import write_job, write_models
from benchmarks.peers.processes import PeerError, run
from benchmarks.roofline import measure_machine
from jaxserve.workload import WorkloadItem

OURS = "jaxserve"
RUN_LIMIT_S = 3600.0


@final
@dataclass
class Runs:
    """What one engine did: its results in order, and why there are no more of them, if so."""

    results: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def compare(
    peers: Mapping[str, Peer],
    source: Path,
    items: Sequence[WorkloadItem],
    *,
    batch_size: int,
    repeats: int,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Every engine's figures on a GGUF model; those of one that failed hold its `error`.

    `settings` are our runtime's.
    """
    failed: dict[str, str] = {}
    commands = {OURS: [sys.executable, "-m", "benchmarks.peers.ours"]}
    for name, peer in peers.items():
        try:
            commands[name] = peer.command()
        except PeerError as error:
            failed[name] = _explained(name, error)
    with tempfile.TemporaryDirectory(prefix="jaxserve-peers-") as folder:
        models = write_models(source, Path(folder))
        job = Path(folder) / "job.json"
        write_job(job, models, items, batch_size=batch_size, settings=settings)
        lengths = [item.num_output_tokens for item in items]
        runs = interleave(commands, job, lengths, repeats=repeats, gauge=_gauge)
    runs |= {name: Runs(error=error) for name, error in failed.items()}
    figures = summarise(runs)
    for name, peer in peers.items():
        figures[name] |= {"requirements": peer.environment.requirements, "note": peer.note}
    return {
        "batch_size": batch_size,
        "repeats": max(len(engine.results) for engine in runs.values()),
        "engines": figures,
        "best_of": _best_of(figures),
    }


def interleave(
    commands: Mapping[str, Sequence[str]],
    job: Path,
    lengths: Sequence[int],
    *,
    repeats: int,
    limit_s: float = RUN_LIMIT_S,
    gauge: Callable[[], Any] = lambda: None,
) -> dict[str, Runs]:
    """Run every engine in turn, `repeats` times; one that fails is not run again.

    `lengths` of the answers are checked. `gauge` says what the machine reaches, before every run:
    machines that are shared do not reach the same every minute. Ctrl-C keeps the rounds that all
    engines have ended.
    """
    runs = {name: Runs() for name in commands}
    turns = [name for _ in range(repeats) for name in commands]
    with tqdm(turns, unit="run", leave=False) as bar:
        for name in bar:
            if runs[name].error is not None:
                continue
            bar.set_description(name)
            machine = gauge()
            try:
                result = _run_once(
                    [*commands[name], str(job)], job.with_name(f"{name}.log"), limit_s
                )
                _check(result, lengths)
                result["machine"] = machine
                runs[name].results.append(result)
            except PeerError as error:
                runs[name].error = _explained(name, error)
            except KeyboardInterrupt:
                whole = min((len(r.results) for r in runs.values() if r.error is None), default=0)
                if whole == 0:
                    raise
                for engine in runs.values():
                    del engine.results[whole:]
                break
    return runs


def summarise(runs: Mapping[str, Runs]) -> dict[str, dict[str, Any]]:
    """Medians, their ratios to ours, and how many whole answers agree with our first run's.

    Figures are None where a run that they need is missing.
    """
    ours = runs[OURS].results
    our_wall_s = statistics.median(r["wall_s"] for r in ours) if ours else None
    figures = {}
    for name, engine in runs.items():
        walls = [result["wall_s"] for result in engine.results]
        rates = [_num_tokens(result) / result["wall_s"] for result in engine.results]
        starts = [result["startup_s"] for result in engine.results]
        figures[name] = {
            "output_tokens_per_s": statistics.median(rates) if rates else None,
            "jaxserve_is_faster_by": (
                statistics.median(walls) / our_wall_s if walls and our_wall_s else None
            ),
            "startup_s": statistics.median(starts) if starts else None,
            # Of the worst run, should they differ.
            "same_answers": (
                min(_num_same(result, ours[0]) for result in engine.results)
                if ours and engine.results
                else None
            ),
            "peak_host_bytes": max((r["peak_bytes"] for r in engine.results), default=None),
            "output_tokens_per_s_of_every_run": rates,
            "startup_s_of_every_run": starts,
            "machine_before_every_run": [result["machine"] for result in engine.results],
            "error": engine.error,
        }
    return figures


def print_table(comparison: Mapping[str, Any]) -> None:
    """The comparison for people, on stderr."""
    table = Table(
        Column("engine", no_wrap=True), "tokens/s", "ours is faster by", "start-up s", "peak GiB",
        "same answers", "",
        box=None, header_style="bold",
    )  # fmt: skip
    best = {name: f"best of {group}" for group, name in comparison["best_of"].items()}

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    for name, figures in comparison["engines"].items():
        peak = figures["peak_host_bytes"]
        table.add_row(
            name,
            shown(figures["output_tokens_per_s"], ".0f"),
            shown(figures["jaxserve_is_faster_by"], ".2f"),
            shown(figures["startup_s"], ".1f"),
            shown(peak and peak / 2**30, ".1f"),
            shown(figures["same_answers"], "d"),
            figures["error"] or best.get(name, ""),
        )
    Console(stderr=True).print(table)


def _gauge() -> dict[str, float]:
    return asdict(measure_machine("float32"))


def _run_once(command: Sequence[str], log: Path, limit_s: float) -> dict[str, Any]:
    printed, peak_bytes = run(command, log, limit_s)
    try:
        result = json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise PeerError("printed no result") from error
    return {**result, "peak_bytes": peak_bytes}


def _check(result: Mapping[str, Any], lengths: Sequence[int]) -> None:
    given = [len(answer) for answer in result["token_ids"]]
    if len(given) != len(lengths):
        raise PeerError(f"{len(given)} answers to {len(lengths)} requests")
    wrong = [i for i, pair in enumerate(zip(given, lengths, strict=True)) if pair[0] != pair[1]]
    if wrong:
        i = wrong[0]
        raise PeerError(
            f"{len(wrong)} answers are of another length than asked for, such as answer {i} of "
            f"{given[i]} tokens instead of {lengths[i]}"
        )


def _num_tokens(result: Mapping[str, Any]) -> int:
    return sum(map(len, result["token_ids"]))


def _num_same(result: Mapping[str, Any], reference: Mapping[str, Any]) -> int:
    pairs = zip(result["token_ids"], reference["token_ids"], strict=True)
    return sum(a == b for a, b in pairs)


def _best_of(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The fastest member of every group of which more than one ran."""
    best = {}
    for group, members in GROUPS.items():
        rates = {name: figures[name]["output_tokens_per_s"] for name in members if name in figures}
        ran = {name: rate for name, rate in rates.items() if rate is not None}
        if len(rates) == len(members) and ran:
            best[group] = max(ran, key=lambda name: ran[name])
    return best


def _explained(name: str, error: PeerError) -> str:
    tqdm.write(f"{name} failed: {error}", file=sys.stderr)
    return str(error)
