"""Tables of cellular batching beside other policies and systems."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.repeats import Spread
from benchmarks.figures import style
from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result


def tables(result: Result, link: str) -> str:
    """Return a row for each policy of each workload, and one for each other system."""
    parts = []
    hidden = result.get("sizes", "hidden_size")
    workload = result.get("arguments", "lengths")
    if result.get("compared"):
        header = (
            *("workload", "", "policy", "most requests/s", "ours over it"),
            *("p90 at moderate load is lower by", "queueing", "computing", "batch"),
        )
        what = f"Hidden size {hidden}, sentences as in {workload}"
        rows = list(_policies(result, link))
        parts.append(f"{caption(result, what, link)}\n\n{table(header, rows)}")
    if result.data.get("compare"):
        header = ("workload", "load", "system", "requests/s", "p50", "p90", "agree", "")
        what = f"Other systems, hidden size {hidden}, the same requests and weights"
        rows = list(_systems(result, link))
        parts.append(f"{caption(result, what, link)}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def _policies(result: Result, link: str) -> Iterator[list[str]]:
    for index, entry in result.items("compared"):
        for name, _ in result.items("compared", index, "peaks_per_s"):
            at = ("compared", index)
            over = result.optional(*at, "peak_over", name)
            lower = result.optional(*at, "p90_lower_by", name)
            point = _at_half(result, entry["application"], entry["how"], name)
            yield [
                *(entry["application"], entry["how"], style.name(name)),
                linked(result.number(*at, "peaks_per_s", name), ".1f", link),
                "" if over is None else f"{over:.2f}",
                "" if lower is None else f"{lower:.0%}",
                *(
                    f"{_ms(result, point, part)} ms" if point is not None else ""
                    for part in ("queueing_s", "computing_s")
                ),
                "" if point is None else f"{result.number('points', point, 'average_batch'):.1f}",
            ]


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


def _spread_ms(result: Result, at: tuple[str | int, ...], name: str) -> Spread:
    found = result.spread(at, "latency_s", name)
    return Spread(1000 * found.median, 1000 * found.low, 1000 * found.high, found.num_runs)
