"""Tables of cellular batching beside other policies and systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.repeats import Spread
from benchmarks.figures import style
from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result

# Goals: our peak over that of the best baseline, about as in the thesis.
WANTED = {"lstm": 1.25, "seq2seq": 1.6, "treelstm": 1.8}
# Goal: our peak over that of the ideal, on identical trees.
WANTED_OF_IDEAL = 0.7
# Goal: nodes a second of the host on one core.
WANTED_NODES = 100_000
_IDEAL = "identical_graphs"
_OURS = "jaxserve"
_GOALS = (
    *("workload", "", "best baseline", "wanted", "ours over it"),
    *("best within 0.5 s", "ours over it", "p90 lower by (wanted 37% to 90%)"),
    "ours over the ideal",
)
_POLICIES = (
    *("workload", "", "policy", "most requests/s", "ours over it", "with p90 within 0.5 s"),
    *("ours over it", "p90 at moderate load is lower by", "queueing", "computing", "batch"),
)


def tables(result: Result, link: str) -> str:
    """Return a row for each policy of each workload, and one for each other system."""
    parts = []
    hidden = result.get("sizes", "hidden_size")
    workload = result.get("arguments", "lengths")
    if result.get("compared"):
        what = f"Hidden size {hidden}, sentences as in {workload}"
        parts.append(
            f"{caption(result, what, link)}\n\n{table(_GOALS, list(_goals(result, link)))}"
        )
        parts += [text for text in (_losses(result),) if text]
        parts.append(table(_POLICIES, list(_policies(result, link))))
    if result.data.get("compare"):
        header = ("workload", "load", "system", "requests/s", "p50", "p90", "agree", "")
        how = (
            ""
            if result.get("arguments").get("unfolded")
            else ("; ours computes products with embeddings when it loads the model")
        )
        what = f"Other systems, hidden size {hidden}, the same requests and weights{how}"
        rows = list(_systems(result, link))
        parts.append(f"{caption(result, what, link)}\n\n{table(header, rows)}")
        parts += list(_behind(result.data["compare"]))
    return "\n\n".join(parts)


def host(result: Result, link: str) -> str:
    """Return a row for each application: nodes a second of everything, and of the policy alone."""
    header = ("application", "nodes/s", "nodes/s of the policy alone", "requests/s")
    rows = [
        [
            entry["application"],
            shown(result.spread(("points", index), "nodes_per_s"), ",.0f", link=link),
            shown(result.spread(("points", index), "scheduled_per_s"), ",.0f"),
            shown(result.spread(("points", index), "requests_per_s"), ",.0f"),
        ]
        for index, entry in result.items("points")
    ]
    what = f"Everything but the device, on one thread (wanted {WANTED_NODES:,} nodes/s)"
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _goals(result: Result, link: str) -> Iterator[list[str]]:
    """Yield for each workload our ratios to the best baselines, beside those that were wanted."""
    for index, entry in result.items("compared"):
        at, best = ("compared", index), entry["best"]
        if best is None:
            continue
        wanted = WANTED.get(entry["application"])
        ideal = result.optional(*at, "peak_over", _IDEAL)
        yield [
            *(entry["application"], entry["how"], style.name(best)),
            "" if wanted is None else f"{wanted:g}",
            linked(result.number(*at, "peak_over", best), ".2f", link),
            style.name(entry["best_within"]),
            _ratio(result.optional(*at, "within_over", entry["best_within"])),
            _share(result.optional(*at, "p90_lower_by", best)),
            "" if ideal is None else f"{ideal:.2f} (wanted {WANTED_OF_IDEAL:g})",
        ]


def _losses(result: Result) -> str:
    """Return where our peak is behind a baseline or behind what was wanted; "" for nowhere."""
    found = []
    for index, entry in result.items("compared"):
        best, where = entry["best"], f"{entry['application']} ({entry['how']})"
        if best is None:
            continue
        over = result.number("compared", index, "peak_over", best)
        wanted = WANTED.get(entry["application"])
        if over < 1:
            found.append(f"{where}: {over:.2f} of {style.name(best)}")
        elif wanted is not None and over < wanted:
            found.append(f"{where}: {over:.2f} times {style.name(best)}, wanted {wanted:g}")
        lower = result.optional("compared", index, "p90_lower_by", best)
        if lower is not None and lower < 0:
            found.append(f"{where}: p90 {-lower:.0%} higher than that of {style.name(best)}")
        ideal = result.optional("compared", index, "peak_over", _IDEAL)
        if ideal is not None and ideal < WANTED_OF_IDEAL:
            found.append(f"{where}: {ideal:.2f} of the ideal, wanted {WANTED_OF_IDEAL:g}")
    return f"Lost or short: {'; '.join(found)}." if found else ""


def _policies(result: Result, link: str) -> Iterator[list[str]]:
    for index, entry in result.items("compared"):
        for name, _ in result.items("compared", index, "peaks_per_s"):
            at = ("compared", index)
            point = _at_half(result, entry["application"], entry["how"], name)
            yield [
                *(entry["application"], entry["how"], style.name(name)),
                linked(result.number(*at, "peaks_per_s", name), ".1f", link),
                _ratio(result.optional(*at, "peak_over", name)),
                f"{result.number(*at, 'peaks_within_per_s', name):.1f}",
                _ratio(result.optional(*at, "within_over", name)),
                _share(result.optional(*at, "p90_lower_by", name)),
                *(
                    f"{_ms(result, point, part)} ms" if point is not None else ""
                    for part in ("queueing_s", "computing_s")
                ),
                "" if point is None else f"{result.number('points', point, 'average_batch'):.1f}",
            ]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _at_half(result: Result, application: str, how: str, policy: str) -> int | None:
    """Return the place of a policy's point with the highest rate of at most half of its peak."""
    own = [
        (point["rate"], index, point["requests_per_s"])
        for index, point in result.items("points")
        if (point["application"], point["how"], point["policy"]) == (application, how, policy)
    ]
    peak = max(served for _, _, served in own)
    moderate = [(rate, index) for rate, index, _ in own if rate is not None and rate <= peak / 2]
    return max(moderate, default=(0.0, None))[1]


def _ms(result: Result, point: int, part: str) -> str:
    return f"{1000 * result.number('points', point, part, 'p90'):.2f}"


def _systems(result: Result, link: str) -> Iterator[list[str]]:
    for index, entry in result.items("compare"):
        at = ("compare", index)
        cells = [entry["application"], entry["load"], style.name(entry["engine"])]
        if not entry["runs"]:
            yield [*cells, "", "", "", "", (entry["error"] or "").partition("\n")[0]]
            continue
        served = result.spread(at, "requests_per_s")
        p50, p90 = (_spread_ms(result, at, name) for name in ("p50", "p90"))
        agree = result.optional(*at, "agreeing")
        yield [
            *cells,
            shown(served, ".1f", link=link),
            *(shown(p50, ".1f", " ms"), shown(p90, ".1f", " ms")),
            "" if agree is None else f"{agree:.0%}",
            "",
        ]


def _behind(systems: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each workload and load in which another system is ahead of ours."""
    ran = [entry for entry in systems if entry["runs"]]
    for ours in (entry for entry in ran if entry["engine"] == _OURS):
        where = ours["application"], ours["load"]
        beside = [entry for entry in ran if (entry["application"], entry["load"]) == where]
        most = max(beside, key=lambda entry: entry["requests_per_s"])
        soonest = min(beside, key=lambda entry: entry["latency_s"]["p90"])
        lost = []
        if most is not ours:
            times = most["requests_per_s"] / ours["requests_per_s"]
            lost.append(f"{style.name(most['engine'])} serves {times:.2f} times as many requests/s")
        if soonest is not ours:
            share = soonest["latency_s"]["p90"] / ours["latency_s"]["p90"]
            lost.append(f"{style.name(soonest['engine'])} has {share:.2f} times its p90")
        if lost:
            yield f"jaxserve is behind on {where[0]}, {where[1]}: {', and '.join(lost)}."


def _spread_ms(result: Result, at: tuple[str | int, ...], name: str) -> Spread:
    found = result.spread(at, "latency_s", name)
    return Spread(1000 * found.median, 1000 * found.low, 1000 * found.high, found.num_runs)
