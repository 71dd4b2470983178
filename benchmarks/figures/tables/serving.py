"""Tables of throughput and latency: all requests at once, peers, policies, load, simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common.repeats import Spread
from benchmarks.figures.losses import losses
from benchmarks.figures.markdown import caption, linked, runs, shown, table, where
from benchmarks.figures.results import Result, bound_name, is_quantised
from benchmarks.figures.style import name
from benchmarks.figures.tables.peers import engines

_OFFLINE = (
    "workload",
    "runs",
    "output tokens/s",
    "of the bound",
    "device waits for host",
    "cold start",
    "warm start",
)


def offline(results: Sequence[Result], link: Callable[[Result], str]) -> list[str]:
    """Return one table for all results, and one for the peers of each result that has them."""
    rows = [_offline_row(result, link(result)) for result in results]
    first = [table(_OFFLINE, rows), *[""] * (len(results) - 1)]
    return [
        f"{text}\n\n{peers(result, link(result))}".strip() if result.has_peers else text
        for text, result in zip(first, results, strict=True)
    ]


def _offline_row(result: Result, link: str) -> list[str]:
    what = (
        f"{result.number('num_requests'):.0f} {result.get('workload')} requests, "
        f"{_model(result)} in {result.get('precision')}, policy {result.get('policy')}, "
        f"{where(result)}"
    )
    # The bound is that of weights in the model's dtype.
    reached = "" if is_quantised(result) else f"{result.number('bound', 'reached'):.0%} of "
    starts = [result.optional("startup", kind, "ready_s") for kind in ("cold", "warm")]
    return [
        what,
        runs(result),
        shown(result.spread((), "output_tokens_per_s"), ".0f", link=link),
        reached and f"{reached}{bound_name(result)}",
        shown(result.spread((), "host_gap_share"), ".1%"),
        *("" if start is None else f"{start:.0f} s" for start in starts),
    ]


def _model(result: Result) -> str:
    weights = f", weights in {result.get('quantize')}," if is_quantised(result) else ""
    return f"{result.get('model')}{weights}"


def peers(result: Result, link: str) -> str:
    """Return every engine on the requests of an offline result, and where ours is behind."""
    arguments = (result.number("num_requests"), result.get("workload"), _model(result).strip(","))
    what = "{:.0f} {} requests, {}, every engine in turns".format(*arguments)
    repeats = result.number("compare", "repeats")
    how = f"medians of {repeats:.0f} whole runs (least to most)"
    return f"{caption(result, what, link, how=how)}\n\n{engines(result, ('compare',), link)}"


def policies(result: Result, link: str) -> str:
    """Return policies on one workload, and what those by predicted length lost."""
    rows, rates = [], {}
    for policy, _ in result.items("policies"):
        at = ("policies", policy)
        rates[policy] = result.spread(at, "output_tokens_per_s")
        columns = (
            (("latency_s", "p50"), ".1f", " s"),
            (("latency_s", "p99"), ".1f", " s"),
            (("time_to_first_token_s", "p50"), ".2f", " s"),
            (("average_batch",), ".1f", ""),
            (("engine", "num_iterations"), ".0f", ""),
            (("num_preemptions",), ".0f", ""),
        )
        rows.append(
            [
                name(policy),
                shown(rates[policy], ".0f", link=link),
                *(_shown(result.optional_spread(at, *keys), *how) for keys, *how in columns),
            ]
        )
    arguments = result.get("arguments")
    what = (
        f"{arguments['num_requests']} {arguments['workload']} requests, {_when(arguments)}, "
        f"{arguments['model']}"
    )
    if arguments.get("kv_memory"):
        what += f", a page pool of {arguments['kv_memory']}"
    if arguments.get("max_slots"):
        what += f", at most {arguments['max_slots']} at once"
    header = (
        *("policy", "output tokens/s", "latency, median", "99th percentile", "first token"),
        *("average batch", "iterations", "preempted"),
    )
    text = f"{caption(result, what, link)}\n\n{table(header, rows)}"
    return _with(text, losses("output tokens/s", {"": rates}))


def _when(arguments: Mapping[str, Any]) -> str:
    """Return the arrivals of a workload in words."""
    arrivals = arguments["arrivals"]
    if arrivals is None and arguments["workload"].startswith("recorded:"):
        return "as they were recorded"
    return "all at once" if arrivals in (None, "all") else f"arrivals {arrivals}"


def online(result: Result, link: str) -> str:
    """Return every policy at every rate, and what those by predicted length lost in latency."""
    rows = []
    latencies: dict[str, dict[str, Spread]] = {}
    for policy, _ in result.items("policies"):
        for i, _ in result.items("policies", policy, "points"):
            at = ("policies", policy, "points", i)
            rate = result.number(*at, "rate")
            share = result.optional_spread(at, "goodput", "share")
            p90 = result.spread(at, "normalised_latency_s", "p90")
            latencies.setdefault(f"at {rate:.2g} requests/s", {})[policy] = p90
            rows.append(
                [
                    name(policy),
                    linked(rate, ".2g", link),
                    shown(result.spread(at, "requests_per_s"), ".2g"),
                    shown(result.spread(at, "output_tokens_per_s"), ".0f"),
                    shown(p90, ".3f", " s"),
                    shown(result.spread(at, "time_to_first_token_s", "p90"), ".2f", " s"),
                    _shown(share, ".0%"),
                ]
            )
    arguments = result.get("arguments")
    what = (
        f"{arguments['num_requests']} {arguments['workload']} requests a rate, {arguments['model']}"
    )
    header = ("policy", "requests/s", "served", "tokens/s", "p90 s/token", "p90 first token",
              "within limits")  # fmt: skip
    lost = losses("p90 s/token", latencies, is_lower_better=True)
    return _with(f"{caption(result, what, link)}\n\n{table(header, rows)}", lost)


def simulate(result: Result, link: str) -> str:
    """Return measured and predicted figures of every policy, and the error of the predictions."""
    rows = []
    for i, _ in result.items("policies"):
        at = ("policies", i)
        row = [name(result.get(*at, "policy"))]
        columns = (
            (("output_tokens_per_s",), "output_tokens_per_s", ".0f"),
            (("latency_s", "p99"), "latency_p99_s", ".1f"),
        )
        for keys, error, form in columns:
            row += [
                shown(result.spread(at, "measured", *keys), form, link=link),
                shown(result.spread(at, "predicted", *keys), form),
                shown(result.spread(at, "error", error), "+.1%"),
            ]
        rows.append(row)
    header = (
        *("policy", "measured tokens/s", "predicted", "error"),
        *("measured p99 latency, s", "predicted", "error"),
    )
    return f"{caption(result, 'Measured and simulated', link)}\n\n{table(header, rows)}"


def _shown(spread: Spread | None, form: str, unit: str = "") -> str:
    return "" if spread is None else shown(spread, form, unit)


def _with(text: str, sentence: str) -> str:
    return f"{text}\n\n{sentence}" if sentence else text
