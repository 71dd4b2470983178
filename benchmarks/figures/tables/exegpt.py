"""Tables beside figures 6 to 11 and tables 5 and 6 of the ExeGPT paper, and measured plans."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result
from benchmarks.figures.style import name
from benchmarks.figures.tables.exegpt_paper import in_words

_BASELINES = ("fastertransformer", "deepspeed", "orca", "vllm")
_FAMILIES = ("rra", "waa", "continuous")
_LEAST = 1.005


def tables(result: Result, link: str) -> str:
    """Return the gains, every figure and table beside the paper, and what was lost."""
    return "\n\n".join(
        part
        for part in (
            _gains(result, link),
            in_words(result, link),
            _kept(result),
            _search(result),
            _points("points", "figure", result, link),
            _lost(result),
            _points("figure_7", "figure 7", result, link),
            _checked(result, link),
            _long_tailed(result, link),
            _changed(result, link),
            _monotone(result, link),
            _case_study(result, link),
        )
        if part
    )


def bounds(result: Result, link: str) -> str:
    """Return plans and hand-tuned batch sizes under equal bounds, and what was lost."""
    policies = list(dict.fromkeys(_policies(result)))
    header = ("task", "bound, s", *map(name, policies), "plan", "p99, s", "within the bound")
    rows, behind, ahead, late, num = [], 0, 0, 0, 0
    for task, points in result.items("tasks"):
        for point in points:
            planned, best = point["exegpt"], point["best"]
            cells = [
                f"{best[p]['answers_per_s']:.3f} ({best[p]['batch']})" if best.get(p) else "NS"
                for p in policies
            ]
            own = ["NS", "", ""]
            if planned:
                failed = planned.get("num_failed", 0)
                rounds = f" (NS in {failed} of {failed + planned['num_runs']})" if failed else ""
                own = [
                    linked(planned["answers_per_s"], ".3f", link) + rounds,
                    f"{planned['p99_s']:.2f}",
                    f"{planned['within']:.0%}",
                ]
            rows.append([task, _bound(point), *cells, *own])
            most = max((best[p]["answers_per_s"] for p in policies if best.get(p)), default=0.0)
            num += 1
            behind += most > (planned["answers_per_s"] if planned else 0.0)
            is_late = bool(planned and planned["p99_s"] > (point["bound_s"] or math.inf))
            late += is_late
            ahead += bool(planned and not is_late and planned["answers_per_s"] >= most)
    arguments = result.get("arguments")
    what = (
        f"Answers a second of {arguments['num_requests']} requests, lengths times "
        f"{arguments['scale']:g}, {arguments['model']}; each policy with its best batch size of "
        f"{arguments['batches']} that keeps the bound"
    )
    parts = [
        f"{caption(result, what, link)}\n\n{table(header, rows)}",
        f"The plan is behind the best of the others under {behind} of {num} bounds. Its own p99 is "
        f"over {late} of them; sizes of the others whose p99 is over the bound do not count. It is "
        f"ahead, with its p99 within the bound, under {ahead}.",
    ]
    simulated = result.get("simulated")
    if "p99_s" in simulated:
        answers, p99 = simulated["answers_per_s"], simulated["p99_s"]
        parts.append(
            f"Simulated with measured step times, {len(simulated['configurations'])} "
            f"configurations: throughput {answers['median']:.1%} off in the median and "
            f"{answers['most']:.1%} at most, p99 {p99['median']:.1%} and {p99['most']:.1%}."
        )
    return "\n\n".join(parts)


def measured(result: Result, link: str) -> str:
    """Return schedules on devices, how far their simulations are off, and whether tokens agree."""
    figures = {
        "output_tokens_per_s": ("output tokens/s", ".1f"),
        "p99_s": ("p99, s", ".2f"),
        "first_token_p50_s": ("first token, s", ".2f"),
    }
    header = ["schedule", "devices"]
    for heading, _ in figures.values():
        header += [heading, "simulated"]
    rows = []
    for i, each in result.items("schedules"):
        row = [each["schedule"], each["groups"]]
        for key, (_, form) in figures.items():
            spread = result.spread(("schedules", i, "measured"), key)
            row += [shown(spread, form, link=link), f"{each['error'][key]:+.1%}"]
        rows.append(row)
    arguments = result.get("arguments")
    what = (
        f"{arguments['num_requests']} requests that all wait from the start, random weights of "
        f"{arguments['model']}; the error of the simulation beside each figure"
    )
    parts = [f"{caption(result, what, link)}\n\n{table(header, rows)}"]
    if rows:
        errors = result.get("errors")
        throughput, p99 = errors["output_tokens_per_s"], errors["p99_s"]
        parts.append(
            f"Throughput is {throughput['median']:.1%} off in the median and "
            f"{throughput['most']:.1%} at most, p99 from admission to end {p99['median']:.1%} and "
            f"{p99['most']:.1%}. In both, {result.get('num_within_5%')} of {len(rows)} schedules "
            f"are within 5%, and {result.get('num_within_10%')} within 10%."
        )
    if skipped := result.get("skipped"):
        parts.append(f"Left out, since the time was up: {', '.join(skipped)} devices.")
    named = [
        f"{each['schedule']} on {each['groups']}"
        for _, each in result.items("schedules")
        if not each["tokens_agree"]
    ]
    named += [each["policy"] for _, each in result.items("policies") if not each["tokens_agree"]]
    others = ", ".join(name(each["policy"]) for _, each in result.items("policies"))
    parts.append(
        f"The tokens of {', '.join(named)} differ from those of the first policy ({others})."
        if named
        else f"All schedules give the same tokens, which are those of {others} on one device."
    )
    return "\n\n".join(parts)


def _policies(result: Result) -> Iterator[str]:
    for _, points in result.items("tasks"):
        for point in points:
            yield from point["best"]


def _gains(result: Result, link: str) -> str:
    header = ("mean gain over FasterTransformer", "plan", "RRA and WAA", "paper")
    paper = result.get("paper_mean_gain")

    def cells(*keys: str) -> list[str]:
        return [_linked(result.get(key, keys[-1]), link) for key in keys[:-1]]

    rows = [
        [named, *cells("mean_gain", "mean_gain_exegpt", key), f"{paper[key]:g}"]
        for key, named in (("small", "figure 6"), ("large", "figure 8"), ("all", "all"))
    ]
    overlapping = result.get("mean_gain_overlapping")
    rows.append(["all, if RRA's rounds overlap", "", _linked(overlapping, link), ""])
    rows += [
        [f"all, over {name(each)} instead"]
        + [*cells("mean_gain_over", "mean_gain_exegpt_over", each), ""]
        for each in _BASELINES
        if each != "fastertransformer"
    ]
    what = "Throughput under the paper's four bounds, A40 and A100 as rooflines"
    how = "estimated, and bounded schedules simulated with sampled lengths"
    return f"{caption(result, what, link, how=how)}\n\n{table(header, rows)}"


def _kept(result: Result) -> str:
    """Return how many simulated answers kept their bounds."""
    played = result.get("played")
    if played is None:
        return ""
    within, others = played["within"], played["missed_by_others"]
    errors = played["throughput_error"]
    num_of = ", ".join(f"{num} of {name(policy)}" for policy, num in played["num_runs_of"].items())
    return (
        f"Of {played['num_answers']} answers in {played['num_runs']} simulations by the real "
        f"scheduler, of plans and of the best schedules of RRA and WAA ({num_of}), "
        f"{within['mean']:.2%} kept the bound (at least {within['least']:.2%} in each). "
        f"{played['longer_share']:.2%} were "
        f"longer than planned for; of the others {others['mean']:.2%} missed it (at most "
        f"{others['most']:.2%}). Throughput was {errors['least']:+.1%} to "
        f"{errors['most']:+.1%} off its estimate."
    )


def _search(result: Result) -> str:
    search, missed = result.get("search"), result.get("algorithm_1")
    shares = search["most_evaluated_share"]
    return (
        f"The longest search took {search['most_s']:.2f} s. It evaluated at most "
        + ", ".join(f"{share:.2%} ({model})" for model, share in shares.items())
        + f" of the configurations. Algorithm 1 alone misses the best schedule for "
        f"{missed['missed_share']:.0%} of {missed['num_cases']} bounds, for "
        f"{missed['beyond_tolerance_share']:.0%} by more than its tolerance, and finds "
        f"{missed['worst_share']:.0%} of its throughput at worst."
    )


def _points(key: str, figure: str, result: Result, link: str) -> str:
    header = (
        *(figure, "task", "bound, s", *map(name, _BASELINES), *_FAMILIES, "plan", "gain"),
        *("schedule", "latency, s", "within the bound"),
    )
    rows = []
    for _, point in result.items(key):
        # The best of RRA and WAA is played, too, where the plan is another.
        played = [run for run in point.get("played", ()) if run["policy"] == point["policy"]]
        within = [run["within"] for run in played]
        number = point["figure"] if key == "points" else 7
        rows.append(
            [
                f"{number}: {point['model']}, {point['num_devices']} {point['cluster']}",
                point["task"],
                _bound(point),
                *(_per_s(point["per_s_of"].get(each)) for each in (*_BASELINES, *_FAMILIES)),
                _per_s(point["per_s"]),
                "" if point["gain"] is None else linked(point["gain"], ".2f", link),
                _schedule(point),
                f"{point['latency_s']:.1f}" if "latency_s" in point else "",
                f"{sum(within) / len(within):.1%}" if within else "",
            ]
        )
    return table(header, rows)


def _schedule(point: dict[str, Any]) -> str:
    """Return a plan's schedule in a few words."""
    if "policy" not in point:
        return "none"
    if point["policy"] == "continuous":
        chunks = f", chunks {point['chunk_tokens']}" if point["chunk_tokens"] else ""
        schedule = f"continuous, at most {point['max_running']}{chunks}"
    elif point["policy"] == "rra":
        schedule = f"rra B_E {point['encode_batch']}, N_D {point['num_decodes']}"
    else:
        batches = point["encode_batch"], point["num_micro_batches"]
        schedule = f"{point['policy']} B_E {batches[0]}, B_m {batches[1]}"
    num_sharded = point["num_sharded_devices"]
    return f"{schedule}; {num_sharded} in shards of {point['degree']}" if num_sharded else schedule


def _lost(result: Result) -> str:
    """Return how often a baseline is ahead of the plan, and of ExeGPT's own schedules."""
    points = result.get("points")
    lost, own = _ahead(points, "per_s"), _ahead(points, "exegpt_per_s")
    families = [point.get("policy", "none").partition("_")[0] for point in points]
    counts = ", ".join(f"{each} {families.count(each)} times" for each in _FAMILIES)
    return (
        (
            f"Ahead of the plan under {len(points)} bounds are {lost}. "
            if lost
            else f"No baseline is ahead of the plan under any of {len(points)} bounds. "
        )
        + (f"Ahead of the better one of RRA and WAA are {own}. " if own else "")
        + f"The plan is {counts}. Baselines have the same kernels as the schedules and no host "
        "time a step; ORCA and vLLM have the same latency margins, too, and the others none. vLLM "
        "is continuous batching with all devices of a machine in one shard group, so the plan, "
        "which chooses the groups, has all that it has."
    )


def _ahead(points: Sequence[dict[str, Any]], of: str) -> str:
    """Return which baselines are ahead of a throughput, how often, and by how much."""
    parts = []
    for system in _BASELINES:
        ahead = [
            point["per_s_of"][system] / point[of] if point.get(of) else math.inf
            for point in points
            if point["per_s_of"].get(system)
            if point["per_s_of"][system] > _LEAST * (point.get(of) or 0.0)
        ]
        if ahead:
            most = max((each for each in ahead if each < math.inf), default=math.inf)
            alone = ahead.count(math.inf)
            parts.append(
                f"{name(system)} {len(ahead)} times"
                + (f", by {most - 1:.0%} at most" if most < math.inf else "")
                + (f", {alone} of them where nothing else keeps the bound" if alone else "")
            )
    return "; ".join(parts)


def _checked(result: Result, link: str) -> str:
    header = ("figure 7", "bound, s", "policy", "batch", "answers/s", "estimated", "p99, s",
              "estimated", "within the bound")  # fmt: skip
    rows = [
        [
            point["task"],
            _bound(point),
            name(system),
            str(each["batch"]),
            linked(each["per_s"], ".2f", link),
            f"{each['estimated_per_s']:.2f}",
            "" if each["p99_length_s"] is None else f"{each['p99_length_s']:.2f}",
            f"{each['estimated_latency_s']:.2f}",
            f"{each['within']:.1%}",
        ]
        for _, point in result.items("figure_7")
        for system, each in point["checked"].items()
        if each
    ]
    return table(header, rows) if rows else ""


def _long_tailed(result: Result, link: str) -> str:
    header = ("figure 10, stand-ins", "model", "bound, s", "FasterTransformer",
              "rra", "s", "waa", "s", "gain")  # fmt: skip
    rows = [
        [
            row["data_set"],
            row["model"],
            _bound(row),
            f"{row['static_per_s']:.2f}",
            _per_s(row["rra_per_s"]),
            _per_s(row["rra_latency_s"]),
            _per_s(row["waa_per_s"]),
            _per_s(row["waa_latency_s"]),
            linked(row["gain"], ".2f", link),
        ]
        for _, row in result.items("figure_10")
    ]
    if not rows:
        return ""
    gains = [row["gain"] for _, row in result.items("figure_10")]
    mean = sum(gains) / len(gains)
    return (
        f"{table(header, rows)}\n\nFigure 10 has {mean:.1f} on average and {max(gains):.1f} at "
        "most; the paper, with its data sets, 4.4 and 8.7."
    )


def _changed(result: Result, link: str) -> str:
    header = ("figure 11", "changed", "by", "left alone /s", "planned anew /s", "p99 over bound",
              "same length over bound")  # fmt: skip
    rows = [
        [
            f"{row['policy']}, {row['bound_s']:.1f} s",
            row["changed"],
            f"{row['by']:g}",
            linked(row["left_alone_per_s"], ".2f", link),
            _per_s(row["planned_per_s"]),
            f"{row['left_alone_latency_s'] / row['bound_s']:.2f}",
            f"{row['left_alone_same_length_s'] / row['bound_s']:.2f}",
        ]
        for _, row in result.items("figure_11")
    ]
    return table(header, rows) if rows else ""


def _monotone(result: Result, link: str) -> str:
    header = ("table 5", "tolerance", "variable", "latency, %", "paper", "throughput, %", "paper")
    rows = [
        [
            row["task"],
            f"{row['tolerance']:.0%}",
            f"{row['policy']} {row['variable']}",
            linked(row["latency"], ".1f", link),
            f"{row['paper'][0]:g}",
            f"{row['throughput']:.1f}",
            f"{row['paper'][1]:g}",
        ]
        for _, row in result.items("table_5")
    ]
    return table(header, rows) if rows else ""


def _case_study(result: Result, link: str) -> str:
    header = ("table 6", "B_E", "N_D", "T_P", "latency, s", "paper", "answers/s", "paper")
    rows: Sequence[Sequence[str]] = [
        [
            row["policy"],
            str(row["encode_batch"]),
            str(row["num_decodes"]),
            str(row["degree"]),
            linked(row["latency_s"], ".2f", link),
            f"{row['paper_latency_s']:.2f}",
            f"{row['per_s']:.2f}",
            f"{row['paper_per_s']:.2f}",
        ]
        for _, row in result.items("table_6")
    ]
    return table(header, rows)


def _bound(point: dict[str, Any]) -> str:
    return "none" if point["bound_s"] is None else f"{point['bound_s']:.1f}"


def _per_s(value: float | None) -> str:
    return "NS" if value is None else f"{value:.2f}"


def _linked(value: float | None, link: str) -> str:
    return "" if value is None else linked(value, ".2f", link)
