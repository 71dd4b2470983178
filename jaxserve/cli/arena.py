"""`jaxserve arena`: policies compared on a trace, and what a late request waited for."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from jaxserve.cli import options as opt
from jaxserve.cli.opening import open_service
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.planning.arena import ArenaResult, ArenaResults, ArenaRun, Cells, Contest
    from jaxserve.planning.blame import Span
    from jaxserve.runtime import Runtime
    from jaxserve.scheduling.policy import Policy
    from jaxserve.workload.traces import Trace

_TRACE, _POLICIES, _DEVICE, _RESULTS = "Trace", "Policies", "Simulated device", "Results"
_RESULTS_FILE = Path("arena.jsonl")
# Spans of a smaller share of a request's latency are summed up in the table of its times.
_LEAST_SHARE = 0.02


class ArenaGroup(TyperGroup):
    """The commands, of which `run` needs no name: `jaxserve arena --trace FILE`."""

    def completed(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command line with the name of its command."""
        return [*words] if words and words[0] in self.commands else ["run", *words]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.completed(args))


arena_app = typer.Typer(cls=ArenaGroup, help="Compare scheduling policies on a trace, simulated.")


Results = Annotated[
    Path,
    opt.in_panel(
        _RESULTS,
        "--results",
        "-o",
        text="File of results as JSON lines. Runs that it has are not simulated again.",
    ),
]
Tokenizer = Annotated[
    str,
    opt.in_panel(
        _TRACE,
        "--tokenizer",
        text="Counts the tokens of traces with texts: a model's name or folder.",
    ),
]


@arena_app.command("run")
def run(
    policy_file: Annotated[
        Path | None,
        typer.Argument(
            help="A Python file that defines a Policy, which is compared with the presets.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        opt.in_panel(
            _TRACE,
            "--trace",
            "-t",
            text="A trace as it is downloaded: Azure LLM 2023 or 2024, BurstGPT, Mooncake, a "
            "folder of ServeGen's clients, vLLM's benchmark files, ShareGPT, or one of --record; "
            "or chat, sessions or bursts, which are synthetic.",
            show_default=False,
        ),
    ] = None,
    num_requests: Annotated[
        int, opt.in_panel(_TRACE, "--num-requests", text="Requests of each run.")
    ] = 100,
    start: Annotated[
        float,
        opt.in_panel(_TRACE, "--start", text="Seconds of the trace before the first request."),
    ] = 0.0,
    seeds: Annotated[
        int,
        opt.in_panel(
            _TRACE,
            "--seeds",
            text="Runs of each policy, each on the part of the trace after the one before it.",
        ),
    ] = 5,
    load: Annotated[
        str,
        opt.in_panel(
            _TRACE, "--load", text="Loads: the trace's times are divided by each, e.g. 1,2,4."
        ),
    ] = "1",
    rate: Annotated[
        float | None,
        opt.in_panel(
            _TRACE,
            "--rate",
            text="Requests a second at load 1, as Poisson arrivals. [default: the trace's times; "
            "all at once if it has none]",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        opt.in_panel(
            _TRACE,
            "--max-tokens",
            text="Limit of every answer, which policies know. [default: the longest answer]",
        ),
    ] = None,
    tokenizer: Tokenizer = opt.DEFAULT_MODEL,
    policies: Annotated[
        str | None,
        opt.in_panel(
            _POLICIES,
            "--policies",
            text="Presets, separated by commas. [default: all with a schedule of their own]",
        ),
    ] = None,
    prediction_error: Annotated[
        str,
        opt.in_panel(
            _POLICIES,
            "--prediction-error",
            text="Standard deviation of the logarithm of predicted lengths; none for no "
            "predictions, inf for the lengths' distribution alone.",
        ),
    ] = "0.7",
    model: Annotated[
        str,
        opt.in_panel(
            _DEVICE, "--model", "-m", text="Llama-3-8B, OPT-13B or GPT3-39B, by its sizes."
        ),
    ] = "Llama-3-8B",
    device: Annotated[
        str, opt.in_panel(_DEVICE, "--device", text="A40, A100, H100 or H200, by its roofline.")
    ] = "A100",
    kv_memory: Annotated[
        str | None,
        opt.in_panel(
            _DEVICE,
            "--kv-memory",
            text="Sizes of the KV pool, e.g. 4GiB,16GiB; the host has as much again. [default: "
            "what the weights leave]",
        ),
    ] = None,
    max_slots: Annotated[
        int, opt.in_panel(_DEVICE, "--max-slots", text="Most sequences that run at once.")
    ] = 256,
    goodput: Annotated[
        str,
        opt.in_panel(
            _RESULTS,
            "--goodput",
            text="Bounds in milliseconds of ttft, tpot and e2el; the goodput is the answers within "
            "all.",
        ),
    ] = "ttft:1000,tpot:100",
    results: Results = _RESULTS_FILE,
    page: Annotated[
        Path | None,
        opt.in_panel(
            _RESULTS,
            "--page",
            text="Write a page of HTML with the table, latency against load, memory over time and "
            "every request.",
        ),
    ] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Simulate policies on a trace with the real scheduler, and compare them in one table.

    `jaxserve arena my_policy.py --trace FILE` compares a policy of yours with the presets, and
    `jaxserve arena why REQUEST` says what a request waited for. Ctrl-C prints what has been
    simulated; the next call goes on from there.
    """
    with opt.exit_codes():
        from jaxserve.core.sizes import parse_bytes
        from jaxserve.planning.arena import ArenaResults, Contest

        if trace is None:
            raise InvalidConfigError("--trace is missing; pass a trace's file, or chat")
        bounds_s = opt.goodput_bounds_s([goodput])
        for name, value, least in (("num-requests", num_requests, 1), ("seeds", seeds, 1)):
            if value < least:
                raise InvalidConfigError(f"--{name} {value} is not allowed; pass at least {least}")
        opt.check_positive(rate=rate)
        contenders = _contenders(policies, policy_file)
        kept = ArenaResults(results)
        if page is not None and not page.parent.is_dir():
            raise InvalidConfigError(
                f"--page {page} cannot be written: there is no folder {page.parent}; make it"
            )
        contest = Contest.of(
            trace,
            seeds,
            tokenizer=_counter(tokenizer),
            loads=_numbers("--load", load),
            pools=None if kv_memory is None else [parse_bytes(p) for p in kv_memory.split(",")],
            progress=not quiet,
            num_requests=num_requests,
            start_s=start,
            arrivals=None if rate is None else f"poisson:{rate:g}",
            max_tokens=max_tokens,
            prediction_error=_prediction_error(prediction_error),
            model=model,
            device=device,
            max_slots=max_slots,
        )
        cells = contest.cells(contenders)
        is_interrupted = False
        try:
            contest.simulate(cells, kept, progress=not quiet)
        except KeyboardInterrupt:
            is_interrupted = True
        rows = _rows(contest, cells, kept, bounds_s)
        if as_json:
            typer.echo(json.dumps({"trace": _described(contest), "rows": rows}))
        else:
            opt.show_wide(_table(contest, rows, bounds_s), 140)
        if page is not None:
            played = [
                (r, found) for runs in cells.values() for r, _ in runs if (found := kept.get(r))
            ]
            _write_page(page, contest, rows, bounds_s, played)
            typer.echo(f"written: {page}", err=True)
        failed = {(row["policy"], error) for row in rows for error in row["errors"]}
        for name, error in sorted(failed):
            typer.echo(f"{name} failed: {error}", err=True)
        if is_interrupted:
            typer.echo(f"interrupted; the same command goes on from {results}", err=True)
            raise typer.Exit(opt.EXIT_INTERRUPTED)
        if failed:
            raise typer.Exit(opt.EXIT_FAILED)


@arena_app.command("why")
def why(
    request: Annotated[
        str, typer.Argument(help="The request's place in its run, from 0, or slowest.")
    ],
    policy: Annotated[
        str | None,
        opt.in_panel(_POLICIES, "--policy", text="Policy of the run. [default: the last run's]"),
    ] = None,
    load: Annotated[float | None, opt.in_panel(_TRACE, "--load", text="Load of the run.")] = None,
    kv_memory: Annotated[
        str | None, opt.in_panel(_DEVICE, "--kv-memory", text="KV pool of the run.")
    ] = None,
    seed: Annotated[
        int | None, opt.in_panel(_TRACE, "--seed", text="Seed of the run, from 0.")
    ] = None,
    results: Results = _RESULTS_FILE,
    tokenizer: Tokenizer = opt.DEFAULT_MODEL,
    as_json: opt.AsJson = False,
) -> None:
    """Say what a request of a run waited for, step by step, and what other policies gave it.

    The run is the last one in the file of results that the options do not exclude. It is simulated
    again, with an eye on the request.
    """
    with opt.exit_codes():
        from jaxserve.core.sizes import parse_bytes
        from jaxserve.planning.arena import ArenaResults, digest_of, parts_of, play
        from jaxserve.planning.blame import Blame

        if not results.exists():
            raise InvalidConfigError(
                f"{results} does not exist; run jaxserve arena, or pass --results"
            )
        kept = ArenaResults(results)
        pool = None if kv_memory is None else parse_bytes(kv_memory)
        wanted = {"policy": policy, "load": load, "kv_memory": pool, "seed": seed}
        chosen = _chosen(kept, wanted)
        result = kept.get(chosen)
        assert result is not None
        number = _request(request, result)
        file = None if chosen.policy_file is None else Path(chosen.policy_file)
        own = next(
            each
            for each, _ in _contenders(None if file else chosen.policy, file)
            if each.name == chosen.policy
        )
        if digest_of(own, file) != chosen.digest:
            raise InvalidConfigError(
                f"the policy {chosen.policy} has changed since its run; run jaxserve arena again"
            )
        _, parts = parts_of(chosen, chosen.seed + 1, _counter(tokenizer))
        part = parts[chosen.seed]
        served = next(each for each in result.requests if each.number == number)
        blame = Blame(served.index)
        play(chosen, part, own, pilot=blame)
        others = {
            other.policy: next(each for each in found.requests if each.number == number)
            for other in kept.runs()
            if replace(
                other,
                policy=chosen.policy,
                policy_file=chosen.policy_file,
                digest=chosen.digest,
            )
            == chosen
            and (found := kept.get(other))
            and not found.error
        }
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "run": vars(chosen),
                    "request": served._asdict(),
                    "spans": [vars(span) for span in blame.spans],
                    "others": {name: each._asdict() for name, each in others.items()},
                }
            )
        )
        return
    typer.echo(
        f"request {number} under {chosen.policy}, load {chosen.load:g}, seed {chosen.seed}: "
        f"{served.num_prompt_tokens:,} prompt tokens, {served.num_output_tokens:,} of the answer, "
        f"{served.latency_s:.3f} s from its arrival at {served.arrival_s:.3f} s"
    )
    opt.show_wide(_table_of_causes(blame.spans))
    opt.show_wide(_table_of_spans(blame.spans, served.arrival_s))
    opt.show_wide(_table_of_others(others, chosen.policy))


@arena_app.command("measure")
def measure(
    policy_file: Annotated[
        Path | None,
        typer.Argument(help="A Python file that defines a Policy, too.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None, opt.in_panel(_TRACE, "--trace", "-t", text="As for `jaxserve arena`.")
    ] = None,
    num_requests: Annotated[
        int, opt.in_panel(_TRACE, "--num-requests", text="Requests of each run.")
    ] = 32,
    start: Annotated[
        float,
        opt.in_panel(_TRACE, "--start", text="Seconds of the trace before the first request."),
    ] = 0.0,
    load: Annotated[
        float, opt.in_panel(_TRACE, "--load", text="The trace's times are divided by it.")
    ] = 1.0,
    max_tokens: Annotated[
        int | None,
        opt.in_panel(
            _TRACE, "--max-tokens", text="Limit of answers. [default: the longest answer]"
        ),
    ] = None,
    policies: Annotated[
        str, opt.in_panel(_POLICIES, "--policies", text="Presets, separated by commas.")
    ] = "vllm_like,auto",
    model: opt.Model = opt.DEFAULT_MODEL,
    random_weights: Annotated[
        bool, opt.in_panel("Runtime", "--random-weights", text="Random weights, and no download.")
    ] = False,
    kv_memory: opt.KvMemory = None,
    max_slots: opt.MaxSlots = None,
    max_context: opt.MaxContext = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Serve a part of a trace on this machine's device, and say how far a simulation is off.

    Each policy serves the same requests with a model of its own runtime, and the simulator plays
    them with the step times of that runtime, which are measured just before. Requests that are
    longer than the model's context are left out. There are no predictions.
    """
    with opt.exit_codes():
        if trace is None:
            raise InvalidConfigError("--trace is missing; pass a trace's file, or chat")
        if num_requests < 1 or not 0 < load < math.inf:
            raise InvalidConfigError(
                f"--num-requests {num_requests} and --load {load:g} are not allowed; pass at least "
                "1, and a number above 0"
            )
        runs = []
        for policy, _ in _contenders(policies, policy_file):
            opened = open_service(
                model,
                quiet=quiet,
                policy=policy,
                load="random" if random_weights else None,
                kv_memory=kv_memory,
                max_slots=max_slots,
                max_context=max_context,
                warmup="full",
            )
            with cast("Runtime", opened) as rt:
                part = _part_for(rt, trace, num_requests, start, progress=not quiet)
                part = part if part.has_times else part.with_arrivals("all", 0)
                runs.append(_measured(rt, policy, part.at_load(load), max_tokens, quiet=quiet))
        error = {
            name: statistics.fmean(abs(run["error"][name]) for run in runs) for name in _JUDGED
        }
    if as_json:
        typer.echo(json.dumps({"trace": str(trace), "model": model, "runs": runs, "error": error}))
        return
    opt.show_wide(_table_of_errors(runs))
    typer.echo(
        f"mean absolute percentage error of the simulator over {len(runs)} run(s): "
        f"{error['latency_s']:.1%} of the latency, {error['time_to_first_token_s']:.1%} of the "
        "first token"
    )


# The figures whose means are compared.
_JUDGED = ("latency_s", "time_to_first_token_s")


def _part_for(rt: Runtime, path: Path, num: int, start_s: float, *, progress: bool) -> Trace:
    """Return the first requests of a trace that fit into a runtime's context."""
    from jaxserve.workload.traces import read_trace

    def tokenizer() -> Any:
        if rt.tokenizer is None:
            raise InvalidConfigError("the model has no tokenizer, and the trace has texts")
        return rt.tokenizer

    return read_trace(
        path,
        num=num,
        start_s=start_s,
        max_context=rt.config.max_length,
        tokenizer=tokenizer,
        progress=progress,
    )


def _measured(
    rt: Runtime, policy: Policy, part: Trace, max_tokens: int | None, *, quiet: bool
) -> dict[str, Any]:
    """Return the figures of a part on the device and simulated, and the errors of their means."""
    from jaxserve.core.metrics import summarise
    from jaxserve.planning import simulate
    from jaxserve.workload.load import replay
    from jaxserve.workload.traces import Replay

    longest = max(1, *(request.num_output_tokens for request in part.requests))

    def again() -> Replay:
        limit = longest if max_tokens is None else max_tokens
        return Replay(part, max_tokens=limit, vocab_size=rt.vocab_size)

    times = rt.measure_step_times(rounds=1)
    rt.generate([1], SamplingParams(max_tokens=1), progress=False)
    rt.forget_kept_pages()
    played = again()
    done, wall_s = replay(
        rt, played.items, label=policy.name, follow_up=played.follow_up, progress=not quiet
    )
    for completion in done:
        if completion.error is not None:
            raise completion.error
    played = again()
    simulation = simulate(
        played.items,
        policy,
        rt.config,
        times,
        follow_up=played.follow_up,
        chunk_cost=times.chunk_cost(),
        progress=not quiet,
    )
    measured: dict[str, Any] = summarise(done, wall_s)
    simulated: dict[str, Any] = summarise(simulation.completions, simulation.wall_s)
    return {
        "policy": policy.name,
        "measured": measured,
        "simulated": simulated,
        "error": {name: simulated[name]["mean"] / measured[name]["mean"] - 1 for name in _JUDGED},
    }


def _table_of_errors(runs: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="measured and simulated, in seconds", title_justify="left", box=box.SIMPLE_HEAD
    )
    for name in ("policy", "", "tokens/s", "latency", "error", "p99", "1st token", "error", "p99"):
        table.add_column(name, justify="left" if name in ("policy", "") else "right")
    for run in runs:
        for kind in ("measured", "simulated"):
            figures, is_simulated = run[kind], kind == "simulated"
            spreads = [
                text
                for name in _JUDGED
                for text in (
                    f"{figures[name]['mean']:.3f}",
                    f"{run['error'][name]:+.1%}" if is_simulated else "",
                    f"{figures[name]['p99']:.3f}",
                )
            ]
            name = "" if is_simulated else run["policy"]
            table.add_row(name, kind, f"{figures['output_tokens_per_s']:,.0f}", *spreads)
    return table


def _contenders(names: str | None, file: Path | None) -> list[tuple[Policy, Path | None]]:
    """Return the policies, each with its file; the user's first."""
    from jaxserve.planning.arena import default_policies, policies_in
    from jaxserve.scheduling.presets import get_policy

    own = [] if file is None else policies_in(file)
    presets = default_policies() if names is None else [get_policy(n) for n in names.split(",")]
    for policy in (*own, *presets):
        if policy.num_device_groups > 1:
            raise InvalidConfigError(
                f"the policy {policy.name!r} has {policy.num_device_groups} device groups, and the "
                "arena simulates one; pass another"
            )
    return [*((policy, file) for policy in own), *((policy, None) for policy in presets)]


def _numbers(name: str, text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf for each in found):
        raise InvalidConfigError(f"{name} {text!r} is not allowed; pass numbers above 0, e.g. 1,2")
    return found


def _prediction_error(text: str) -> float | None:
    try:
        error = None if text == "none" else float(text)
    except ValueError:
        error = -1.0
    if error is not None and not error > 0:
        raise InvalidConfigError(
            f"--prediction-error {text!r} is not allowed; pass a number above 0, inf or none"
        )
    return error


def _counter(name: str) -> Callable[[], Any]:
    def load() -> Any:
        from jaxserve.models.store import load_tokenizer

        tokenizer = load_tokenizer(name)
        if tokenizer is None:
            raise InvalidConfigError(f"{name} has no tokenizer; pass --tokenizer")
        return tokenizer

    return load


def _described(contest: Contest) -> dict[str, Any]:
    return {
        "file": contest.base.trace,
        "format": contest.trace.format,
        "requests_a_run": contest.base.num_requests,
        "num_empty": contest.trace.num_empty,
        "num_too_long": contest.trace.num_too_long,
        "num_without_answer": contest.trace.num_without_answer,
    }


def _rows(
    contest: Contest,
    cells: Cells,
    kept: ArenaResults,
    bounds_s: dict[str, float],
) -> list[dict[str, Any]]:
    """Return the figures of each policy, load and pool over the parts that were simulated."""
    from jaxserve.planning.arena import figures_over, interval

    found = {
        key: {
            seed: result
            for seed, (each, _) in enumerate(runs)
            if (result := kept.get(each)) is not None
        }
        for key, runs in cells.items()
    }
    figures = {
        key: {
            seed: contest.figures(result, seed, bounds_s)
            for seed, result in results.items()
            if not result.error
        }
        for key, results in found.items()
    }
    rows = []
    for (name, load, pool), own in figures.items():
        results = found[name, load, pool]
        if not results:
            continue
        base = figures.get((_BASELINE, load, pool), {})
        ratios = [
            own[seed]["latency_s"]["p99"] / base[seed]["latency_s"]["p99"]
            for seed in sorted(own.keys() & base.keys())
        ]
        rows.append(
            {
                "policy": name,
                "load": load,
                "kv_memory": pool,
                "num_seeds": len(own),
                "errors": sorted({each.error for each in results.values() if each.error}),
                **{name: figures_over(own.values(), *keys) for name, keys in _FIGURES.items()},
                _RATIO: interval(ratios) if ratios else None,
            }
        )
    return rows


# Name of a figure -> its keys in the figures of a run.
_FIGURES = {
    "output_tokens_per_s": ("output_tokens_per_s",),
    **{
        f"{name}_{percentile}": (name, percentile)
        for name in ("latency_s", "time_to_first_token_s", "time_per_output_token_s")
        for percentile in ("p50", "p90", "p99")
    },
    "goodput_share": ("goodput", "share"),
    **{name: (name,) for name in ("fairness", "num_preemptions", "hit_share")},
}
# The policy whose p99 of the latency is the unit of a figure, part by part.
_BASELINE = "vllm_like"
_RATIO = "latency_p99_ratio"
# Column of the table -> its figure, and what that is multiplied with.
_COLUMNS = {
    "tokens/s": ("output_tokens_per_s", 1),
    "latency p50": ("latency_s_p50", 1),
    "p90": ("latency_s_p90", 1),
    "p99": ("latency_s_p99", 1),
    f"p99 / {_BASELINE}": (_RATIO, 1),
    "1st token p50": ("time_to_first_token_s_p50", 1),
    "1st token p99": ("time_to_first_token_s_p99", 1),
    "a token p99 (ms)": ("time_per_output_token_s_p99", 1000),
    "goodput": ("goodput_share", 1),
    "fairness": ("fairness", 1),
}


def _about(contest: Contest, bounds_s: dict[str, float]) -> str:
    """Return what was simulated, and what was left out of the trace."""
    base, trace, seeds = contest.base, contest.trace, len(contest.parts)
    bounds = ", ".join(f"{name} {1000 * s:g} ms" for name, s in bounds_s.items())
    left_out = (
        (trace.num_empty, "without a prompt left out"),
        (trace.num_too_long, "too long for the pool left out"),
        (trace.num_without_answer, "without an answer get one token"),
    )
    return "; ".join(
        (
            f"{base.trace} ({trace.format}), {base.num_requests} requests in each of {seeds} "
            f"part{'s' * (seeds > 1)}",
            f"{base.model} on {base.device}, simulated",
            f"goodput within {bounds}",
            *(f"{number:,} {why}" for number, why in left_out if number),
        )
    )


def _caption(contest: Contest) -> str:
    return "seconds" + (
        "; ± half the width of a 95 % interval over the parts" if len(contest.parts) > 1 else ""
    )


def _cells_of(contest: Contest, rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the head of the table, and its rows."""
    from jaxserve.core.sizes import format_bytes

    has_load, has_pool = len(contest.loads) > 1, len(contest.pools) > 1
    shown = {
        title: figure
        for title, figure in _COLUMNS.items()
        if figure[0] != _RATIO or any(row[_RATIO] for row in rows)
    }
    head = ["policy", *["load"] * has_load, *["KV"] * has_pool, *shown]
    return [
        head,
        *(
            [
                row["policy"],
                *[f"{row['load']:g}"] * has_load,
                *[format_bytes(row["kv_memory"])] * has_pool,
                *(_shown(row[name], scale) for name, scale in shown.values()),
            ]
            for row in rows
        ),
    ]


def _table(contest: Contest, rows: Sequence[dict[str, Any]], bounds_s: dict[str, float]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=_about(contest, bounds_s),
        title_justify="left",
        caption=_caption(contest),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    head, *lines = _cells_of(contest, rows)
    for name in head:
        is_name = name == "policy"
        table.add_column(name, justify="left" if is_name else "right", no_wrap=is_name)
    before = None
    for row, line in zip(rows, lines, strict=True):
        place = row["load"], row["kv_memory"]
        if before not in (None, place):
            table.add_section()
        before = place
        table.add_row(*line)
    return table


def _write_page(
    page: Path,
    contest: Contest,
    rows: Sequence[dict[str, Any]],
    bounds_s: dict[str, float],
    played: Sequence[tuple[ArenaRun, ArenaResult]],
) -> None:
    from jaxserve.report.arena import arena_page

    about = f"{_about(contest, bounds_s)}; {_caption(contest)}."
    title = f"Policies on {Path(contest.base.trace).name}"
    try:
        page.write_text(
            arena_page(title, about, _cells_of(contest, rows), played), encoding="utf-8"
        )
    except OSError as error:
        raise InvalidConfigError(
            f"--page {page} cannot be written: {error}; pass another file"
        ) from error


def _shown(figure: tuple[float, float | None] | None, scale: float) -> str:
    """Return a mean with three digits, and its half width with two, or as many places."""
    if figure is None:
        return "-"
    mean, half = figure
    places = _places(scale * mean, 3)
    text = f"{scale * mean:,.{places}f}"
    if half is None:
        return text
    return f"{text} ±{scale * half:,.{min(places, _places(scale * half, 2))}f}"


def _places(number: float, num_digits: int) -> int:
    """Return the places after the point, at most 4, that show this many digits of a number."""
    if not number:
        return 0
    return min(4, max(0, num_digits - 1 - math.floor(math.log10(abs(number)))))


def _chosen(kept: ArenaResults, wanted: dict[str, Any]) -> ArenaRun:
    given = {name: value for name, value in wanted.items() if value is not None}
    found = [
        run
        for run in kept.runs()
        if all(getattr(run, name) == value for name, value in given.items())
    ]
    if not found:
        raise InvalidConfigError(
            f"{kept.path} has no run with {given}; its policies are "
            f"{', '.join(dict.fromkeys(run.policy for run in kept.runs())) or 'none'}"
        )
    return found[-1]


def _request(text: str, result: ArenaResult) -> int:
    """Return the number of a request by its text."""
    if result.error:
        raise InvalidConfigError(f"this run failed: {result.error}; pass another policy or seed")
    if text == "slowest":
        return max(result.requests, key=lambda each: each.latency_s).number
    numbers = {str(each.number): each.number for each in result.requests}
    if text not in numbers:
        raise InvalidConfigError(
            f"request {text!r} is not in the run; pass slowest, or 0 to {len(numbers) - 1}"
        )
    return numbers[text]


def _simple(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        is_text = name in ("what", "at first", "policy")
        table.add_column(name, justify="left" if is_text else "right")
    return table


def _table_of_causes(spans: Sequence[Span]) -> Table:
    table = _simple("what", "seconds", "share", "steps")
    whole_s = sum(span.seconds for span in spans)
    causes = dict.fromkeys(span.cause for span in spans)
    of_cause = {cause: [span for span in spans if span.cause == cause] for cause in causes}
    for cause, own in sorted(of_cause.items(), key=lambda each: -sum(s.seconds for s in each[1])):
        seconds = sum(span.seconds for span in own)
        num_steps = sum(span.num_steps for span in own)
        table.add_row(cause, f"{seconds:.3f}", f"{seconds / whole_s:.0%}", str(num_steps))
    return table


def _table_of_spans(spans: Sequence[Span], arrival_s: float) -> Table:
    """Return the times of a request in order; neighbours that are short are one row."""
    table = _simple("from", "to", "what", "at first", "steps")
    least_s = _LEAST_SHARE * sum(span.seconds for span in spans)
    for row in _joined(spans, least_s):
        causes = dict.fromkeys(span.cause for span in row)
        table.add_row(
            f"{max(0.0, row[0].start_s - arrival_s):.3f}",
            f"{row[-1].end_s - arrival_s:.3f}",
            ", ".join(causes),
            row[-1].detail if len(row) == 1 else "",
            str(sum(span.num_steps for span in row)),
        )
    return table


def _joined(spans: Sequence[Span], least_s: float) -> Iterator[list[Span]]:
    short: list[Span] = []
    for span in spans:
        if span.seconds < least_s:
            short.append(span)
            continue
        if short:
            yield short
            short = []
        yield [span]
    if short:
        yield short


def _table_of_others(others: dict[str, Any], own: str) -> Table:
    table = _simple("policy", "admitted", "first token", "end", "preempted")
    for name, each in sorted(others.items(), key=lambda pair: pair[1].latency_s):
        table.add_row(
            f"{name} (this run)" if name == own else name,
            *(
                f"{at - each.arrival_s:.3f}"
                for at in (each.admitted_s, each.first_token_s, each.finished_s)
            ),
            str(each.num_preemptions),
        )
    return table
