"""Figures 6 to 11 and tables 5 and 6 of the ExeGPT paper, its plans measured, and drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import mean
from typing import Any

from benchmarks.figures.render import (
    Cell,
    Column,
    Table,
    caption,
    drawn,
    joined,
    linked,
    name,
    show_in,
    table,
)
from benchmarks.figures.results import Place

_BASELINES = ("fastertransformer", "deepspeed", "orca", "vllm")
_FAMILIES = ("rra", "waa", "continuous")
_STATIC = "fastertransformer"
# A baseline is ahead from this ratio on.
_LEAST = 1.005
_Point = dict[str, Any]


def simulated(result: Place) -> str:
    """Return the gains, every figure and table next to the paper's, and the lost comparisons."""
    return joined(
        _gains(result),
        _in_words(result),
        _kept(result) if result.get("played") else "",
        _search(result),
        drawn(_points("figure"), "points.*", result),
        _lost(result),
        drawn(_points("figure 7"), "figure_7.*", result),
        _checked(result),
        _long_tailed(result),
        drawn(_CHANGED, "figure_11.*", result) if result.get("figure_11") else "",
        drawn(_MONOTONE, "table_5.*", result) if result.get("table_5") else "",
        drawn(_CASE_STUDY, "table_6.*", result),
    )


# ---- plans and schedules on a device ----


def bounds(result: Place) -> str:
    """Return plans and hand-tuned batch sizes under equal bounds, and the lost comparisons."""
    points = [(task, point) for task, own in result.items("tasks") for point in own]
    policies = list(dict.fromkeys(policy for _, point in points for policy in point["best"]))
    header = ("task", "bound, s", *map(name, policies), "plan", "p99, s", "within the bound")
    rows, behind, ahead, late = [], 0, 0, 0
    for task, point in points:
        planned = point["exegpt"]
        best = [point["best"].get(policy) for policy in policies]
        cells = [f"{own['answers_per_s']:.3f} ({own['batch']})" if own else "NS" for own in best]
        rows.append([task, _bound(point), *cells, *_planned(planned, result.link)])
        most = max((own["answers_per_s"] for own in best if own), default=0.0)
        behind += most > (planned["answers_per_s"] if planned else 0.0)
        is_late = bool(planned and planned["p99_s"] > (point["bound_s"] or math.inf))
        late += is_late
        ahead += bool(planned and not is_late and planned["answers_per_s"] >= most)
    what = (
        "Answers a second of {arguments[num_requests]} requests, lengths times "
        "{arguments[scale]:g}, {arguments[model]}; each policy with its best batch size of "
        "{arguments[batches]} that keeps the bound"
    )
    return joined(
        caption(result, show_in(what, result)),
        table(header, rows),
        f"The plan is behind the best of the others under {behind} of {len(points)} bounds. Its "
        f"own p99 is over {late} of them; sizes of the others whose p99 is over the bound do not "
        f"count. It is ahead, with its p99 within the bound, under {ahead}.",
        show_in(_ERRORS, result) if "p99_s" in result.get("simulated") else "",
    )


def _planned(planned: dict[str, Any] | None, link: str) -> list[str]:
    if not planned:
        return ["NS", "", ""]
    failed = planned.get("num_failed", 0)
    rounds = f" (NS in {failed} of {failed + planned['num_runs']})" if failed else ""
    rate = linked(planned["answers_per_s"], ".3f", link) + rounds
    return [rate, f"{planned['p99_s']:.2f}", f"{planned['within']:.0%}"]


_ERRORS = (
    "Simulated with measured step times, {simulated[configurations]:num} configurations: "
    "throughput {simulated[answers_per_s][median]:.1%} off in the median and "
    "{simulated[answers_per_s][most]:.1%} at most, p99 {simulated[p99_s][median]:.1%} and "
    "{simulated[p99_s][most]:.1%}."
)
_MEASURED_ERRORS = (
    "Throughput is {errors[output_tokens_per_s][median]:.1%} off in the median and "
    "{errors[output_tokens_per_s][most]:.1%} at most, p99 from admission to end "
    "{errors[p99_s][median]:.1%} and {errors[p99_s][most]:.1%}. In both, {num_within_5%} of "
    "{schedules:num} schedules are within 5%, and {num_within_10%} within 10%."
)


def _measured_below(whole: Place) -> Iterator[str]:
    schedules, policies = whole.each("schedules.*"), whole.each("policies.*")
    if schedules:
        yield show_in(_MEASURED_ERRORS, whole)
    if skipped := whole.get("skipped"):
        yield f"Left out, since the time was up: {', '.join(skipped)} devices."
    named = [
        show_in(cell, each)
        for cell, some in (("{schedule} on {groups}", schedules), ("{policy}", policies))
        for each in some
        if not each.get("tokens_agree")
    ]
    others = ", ".join(name(each.get("policy")) for each in policies)
    yield (
        f"The tokens of {', '.join(named)} differ from those of the first policy ({others})."
        if named
        else f"All schedules give the same tokens, which are those of {others} on one device."
    )


MEASURED = Table(
    what="{arguments[num_requests]} requests that all wait from the start, random weights of "
    "{arguments[model]}; the error of the simulation beside each figure",
    rows="schedules.*",
    columns=(
        ("schedule", "{schedule}"),
        ("devices", "{groups}"),
        ("output tokens/s", "{measured[output_tokens_per_s]:@~.1f}"),
        ("simulated", "{error[output_tokens_per_s]:+.1%}"),
        ("p99, s", "{measured[p99_s]:@~.2f}"),
        ("simulated", "{error[p99_s]:+.1%}"),
        ("first token, s", "{measured[first_token_p50_s]:@~.2f}"),
        ("simulated", "{error[first_token_p50_s]:+.1%}"),
    ),
    below=_measured_below,
)


# ---- drift ----


def _drift(whole: Place) -> str:
    bound_s = whole.optional("bound_s")
    bound = "no bound" if bound_s is None else f"the bound of {bound_s:.1f} s"
    return (
        f"Answers a second of RRA, and the share within {bound}, from the change on "
        f"({whole.get('arguments')['after']} answers) and of their second half"
    )


DRIFT = Table(
    what=_drift,
    rows="drifts.*",
    columns=(
        ("change", "{changed}"),
        ("to", "{to:g}"),
        ("left alone", "{left_alone[from_drift][answers_per_s]:@.2f}"),
        ("within", "{left_alone[from_drift][share_in_bound]:.1%}"),
        ("adapted", "{adapted[from_drift][answers_per_s]:@.2f}"),
        ("within", "{adapted[from_drift][share_in_bound]:.1%}"),
        ("adapted, settled", "{adapted[settled][answers_per_s]:@.2f}"),
        ("within", "{adapted[settled][share_in_bound]:.1%}"),
        ("planned anew, settled", "{planned_anew[settled][answers_per_s]:@.2f}"),
        ("within", "{planned_anew[settled][share_in_bound]:.1%}"),
        ("plans", "{adapted[adopted]:num}"),
    ),
    how=lambda whole: f"one simulation each, seed {whole.get('arguments')['seed']}",
)


# ---- figures and tables of the paper ----


def _bound(point: _Point) -> str:
    return "none" if point["bound_s"] is None else f"{point['bound_s']:.1f}"


def _per_s(value: float | None) -> str:
    return "NS" if value is None else f"{value:.2f}"


def _rate(*keys: str) -> Cell:
    return lambda row: _per_s(row.get(*keys))


def _bound_of(row: Place) -> str:
    return _bound(row.get())


def _gains(result: Place) -> str:
    header = ("mean gain over FasterTransformer", "plan", "RRA and WAA", "paper")
    paper = result.get("paper_mean_gain")

    def cells(of: str, *keys: str) -> list[str]:
        return [show_in(f"{{{key}[{of}]:@.2f?}}", result) for key in keys]

    rows = [
        [named, *cells(key, "mean_gain", "mean_gain_exegpt"), f"{paper[key]:g}"]
        for key, named in (("small", "figure 6"), ("large", "figure 8"), ("all", "all"))
    ]
    for baseline in _BASELINES[1:]:
        gains = cells(baseline, "mean_gain_over", "mean_gain_exegpt_over")
        rows.append([f"all, over {name(baseline)} instead", *gains, ""])
    what = "Throughput under the paper's four bounds, A40 and A100 as rooflines"
    how = "estimated, and bounded schedules simulated with sampled lengths"
    return joined(caption(result, what, how=how), table(header, rows))


def _num_of(result: Place) -> str:
    pairs = result.items("played", "num_runs_of")
    return ", ".join(f"{num} of {name(policy)}" for policy, num in pairs)


def _kept(result: Place) -> str:
    return show_in(
        "Of {played[num_answers]} answers in {played[num_runs]} simulations by the real scheduler, "
        f"of plans and of the best schedules of RRA and WAA ({_num_of(result)}), "
        "{played[within][mean]:.2%} kept the bound (at least {played[within][least]:.2%} in each). "
        "{played[longer_share]:.2%} were longer than planned for; of the others "
        "{played[missed_by_others][mean]:.2%} missed it (at most "
        "{played[missed_by_others][most]:.2%}). Throughput was "
        "{played[throughput_error][least]:+.1%} to {played[throughput_error][most]:+.1%} off its "
        "estimate.",
        result,
    )


def _search(result: Place) -> str:
    shares = result.items("search", "most_evaluated_share")
    evaluated = ", ".join(f"{share:.2%} ({model})" for model, share in shares)
    return show_in(
        "The longest search took {search[most_s]:.2f} s. It evaluated at most "
        f"{evaluated} of the configurations. Algorithm 1 alone misses the best schedule for "
        "{algorithm_1[missed_share]:.0%} of {algorithm_1[num_cases]} bounds, for "
        "{algorithm_1[beyond_tolerance_share]:.0%} by more than its tolerance, and finds "
        "{algorithm_1[worst_share]:.0%} of its throughput at worst.",
        result,
    )


def _system(each: str) -> Cell:
    return lambda row: _per_s(row.get("per_s_of").get(each))


def _within(row: Place) -> str:
    point = row.get()
    # The best of RRA and WAA is played too, if the plan differs from it.
    played = [run for run in point.get("played", ()) if run["policy"] == point["policy"]]
    return f"{mean(run['within'] for run in played):.1%}" if played else ""


def _points(figure: str) -> tuple[Column, ...]:
    number = "7" if figure == "figure 7" else "{figure}"
    return (
        (figure, number + ": {model}, {num_devices} {cluster}"),
        ("task", "{task}"),
        ("bound, s", _bound_of),
        *((name(system), _system(system)) for system in (*_BASELINES, *_FAMILIES)),
        ("plan", _rate("per_s")),
        ("gain", "{gain:@.2f?}"),
        ("schedule", _schedule),
        ("latency, s", "{latency_s:.1f?}"),
        ("within the bound", _within),
    )


def _schedule(row: Place) -> str:
    point = row.get()
    if "policy" not in point:
        return "none"
    if point["policy"] == "continuous":
        chunks = f", chunks {point['chunk_tokens']}" if point["chunk_tokens"] else ""
        schedule = f"continuous, at most {point['max_running']}{chunks}"
    elif point["policy"] == "rra":
        schedule = f"rra B_E {point['encode_batch']}, N_D {point['num_decodes']}"
    else:
        schedule = show_in("{policy} B_E {encode_batch}, B_m {num_micro_batches}", row)
    num_sharded = point["num_sharded_devices"]
    return f"{schedule}; {num_sharded} in shards of {point['degree']}" if num_sharded else schedule


def _lost(result: Place) -> str:
    """Return how often a baseline is ahead of the plan, and of ExeGPT's own schedules."""
    points = result.get("points")
    lost, own = _ahead(points, "per_s"), _ahead(points, "exegpt_per_s")
    families = [point.get("policy", "none").partition("_")[0] for point in points]
    counts = ", ".join(f"{each} {families.count(each)} times" for each in _FAMILIES)
    bounds = f"{len(points)} bounds"
    none = f"No baseline is ahead of the plan under any of {bounds}. "
    return (
        (f"Ahead of the plan under {bounds} are {lost}. " if lost else none)
        + (f"Ahead of the better one of RRA and WAA are {own}. " if own else "")
        + f"The plan is {counts}. Baselines have the same kernels as the schedules and no host "
        "time a step; ORCA and vLLM have the same latency margins, too, and the others none. vLLM "
        "is continuous batching with all devices of a machine in one shard group, so the plan, "
        "which chooses the groups, has all that it has."
    )


def _ahead(points: Sequence[_Point], of: str) -> str:
    """Return which baselines are ahead of a throughput, how often, and by how much."""
    parts = []
    for system in _BASELINES:
        ahead = [
            point["per_s_of"][system] / point[of] if point.get(of) else math.inf
            for point in points
            if (point["per_s_of"].get(system) or 0.0) > _LEAST * (point.get(of) or 0.0)
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


_CHECKED: tuple[Column, ...] = (
    ("figure 7", "{above2[task]}"),
    ("bound, s", lambda row: _bound_of(row.above(2))),
    ("policy", lambda row: name(str(row.at[-1]))),
    ("batch", "{batch}"),
    ("answers/s", "{per_s:@.2f}"),
    ("estimated", "{estimated_per_s:.2f}"),
    ("p99, s", "{p99_length_s:.2f?}"),
    ("estimated", "{estimated_latency_s:.2f}"),
    ("within the bound", "{within:.1%}"),
)


def _checked(result: Place) -> str:
    rows = [each for each in result.each("figure_7.*.checked.*") if each.get()]
    return drawn(_CHECKED, lambda _: rows, result) if rows else ""


_LONG_TAILED = (
    ("figure 10, stand-ins", "{data_set}"),
    ("model", "{model}"),
    ("bound, s", _bound_of),
    ("FasterTransformer", "{static_per_s:.2f}"),
    ("rra", _rate("rra_per_s")),
    ("s", _rate("rra_latency_s")),
    ("waa", _rate("waa_per_s")),
    ("s", _rate("waa_latency_s")),
    ("gain", "{gain:@.2f}"),
)


def _long_tailed(whole: Place) -> str:
    gains = [row["gain"] for _, row in whole.items("figure_10")]
    if not gains:
        return ""
    return joined(
        drawn(_LONG_TAILED, "figure_10.*", whole),
        f"Figure 10 has {mean(gains):.1f} on average and {max(gains):.1f} at most; the paper, with "
        "its data sets, 4.4 and 8.7.",
    )


def _over_bound(figure: str) -> Cell:
    return lambda row: f"{row.get(figure) / row.get('bound_s'):.2f}"


_CHANGED = (
    ("figure 11", "{policy}, {bound_s:.1f} s"),
    ("changed", "{changed}"),
    ("by", "{by:g}"),
    ("left alone /s", "{left_alone_per_s:@.2f}"),
    ("planned anew /s", _rate("planned_per_s")),
    ("p99 over bound", _over_bound("left_alone_latency_s")),
    ("same length over bound", _over_bound("left_alone_same_length_s")),
)
_MONOTONE = (
    ("table 5", "{task}"),
    ("tolerance", "{tolerance:.0%}"),
    ("variable", "{policy} {variable}"),
    ("latency, %", "{latency:@.1f}"),
    ("paper", "{paper[0]:g}"),
    ("throughput, %", "{throughput:.1f}"),
    ("paper", "{paper[1]:g}"),
)
_CASE_STUDY = (
    ("table 6", "{policy}"),
    ("B_E", "{encode_batch}"),
    ("N_D", "{num_decodes}"),
    ("T_P", "{degree}"),
    ("latency, s", "{latency_s:@.2f}"),
    ("paper", "{paper_latency_s:.2f}"),
    ("answers/s", "{per_s:.2f}"),
    ("paper", "{paper_per_s:.2f}"),
)


# ---- what the paper says in words ----


def _in_words(result: Place) -> str:
    """Return a row for each figure that the paper gives in its text; "" without points."""
    rows = [*_gains_in_words(result), *_margins(result), *_changes(result)]
    return table(("paper, in words", "paper", "plan", "RRA and WAA", "RRA"), rows) if rows else ""


def _gains_in_words(result: Place) -> Iterator[list[str]]:
    """Yield gains over FasterTransformer: of figure 6 the largest, of figure 8 all (section 7)."""
    points: list[_Point] = [point for _, point in result.items("points")]
    eighth = [point for point in points if point["figure"] == 8]
    throughputs: tuple[Callable[[_Point], float | None], ...] = (
        lambda point: point.get("per_s"),
        lambda point: point.get("exegpt_per_s"),
        lambda point: point["per_s_of"].get("rra"),
    )
    for named, paper, own, of in (
        ("figure 6, largest gain", "5.4", [p for p in points if p["figure"] == 6], max),
        ("figure 8, least gain", "1.1", eighth, min),
        ("figure 8, largest gain", "15.2", eighth, max),
        ("figure 8, mean gain", "3.2", eighth, mean),
        (
            "figure 8 without a bound, mean gain",
            "2.2",
            [point for point in eighth if point["bound_s"] is None],
            mean,
        ),
    ):
        cells = []
        for throughput in throughputs:
            gains = [
                per_s / point["per_s_of"][_STATIC]
                for point in own
                if (per_s := throughput(point)) and point["per_s_of"].get(_STATIC)
            ]
            cells.append(linked(of(gains), ".2f", result.link) if gains else "")
        if any(cells):
            yield [named, paper, *cells]


def _of_figure_11(result: Place, policy: str) -> list[_Point]:
    return [row for _, row in result.items("figure_11") if row["policy"] == policy]


def _margins(result: Place) -> Iterator[list[str]]:
    """Yield how much a p99 latency grows if lengths change and the schedule of WAA does not.

    That is the tighter bound under which the schedule has to be found (section 7.6): of all answers
    (SLA a), and of answers of the earlier lengths (SLA b).
    """
    rows = {(row["changed"], row["by"]): row for row in _of_figure_11(result, "waa")}
    for changed, by, papers in (("mean", 1.15, ("13%", "10%")), ("deviation", 1.3, ("5%", "0%"))):
        after, before = rows.get((changed, by)), rows.get((changed, 1.0))
        if after is None or before is None:
            continue
        keys = ("left_alone_latency_s", "left_alone_same_length_s")
        for sla, key, paper in zip("ab", keys, papers, strict=True):
            margin = after[key] / before[key] - 1
            named = f"figure 11, WAA, {changed} times {by:g}: tighter bound, SLA {sla}"
            yield [named, paper, "", linked(margin, ".0%", result.link), ""]


def _changes(result: Place) -> Iterator[list[str]]:
    """Yield the largest gap of RRA's unchanged schedule to the one planned anew."""
    keys = {
        "throughput": ("left_alone_per_s", "planned_per_s"),
        "p99": ("left_alone_latency_s", "planned_latency_s"),
    }
    for named, papers in (("mean", ("28%", "12.6%")), ("others", ("11%", "17%"))):
        for (what, (left_alone, planned)), paper in zip(keys.items(), papers, strict=True):
            found = [
                abs(row[left_alone] / row[planned] - 1)
                for row in _of_figure_11(result, "rra")
                if (row["changed"] == "mean") == (named == "mean")
                if row.get(planned) and math.isfinite(row[planned])
            ]
            if found:
                at = f"figure 11, RRA, {named}: {what} of the unchanged schedule off by at most"
                yield [at, f"under {paper}", "", "", linked(max(found), ".0%", result.link)]
