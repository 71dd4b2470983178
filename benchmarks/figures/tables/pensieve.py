"""Figures 3.12 to 3.16 of the Pensieve thesis, simulated: tables and a plot a panel."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from benchmarks.figures import style
from benchmarks.figures.markdown import caption, linked, table
from benchmarks.figures.results import Result

# Lines of one plot, which have a colour each here.
COLOURS = {
    "vllm_like": style.INK,
    "pensieve_device_only": "#C0619A",
    "pensieve_lru": "#A67C00",
    "pensieve": "#D55E00",
    "auto": style.OURS,
}
_COLUMNS = 2


def tables(result: Result, link: str) -> str:
    """Throughput at one latency, and figure 3.14."""
    bound = result.number("arguments", "bound")
    header = (
        *("figure", "rounds, reaction", "policy", f"requests/s at {bound:g} s a token"),
        *("of stateless", "thesis", "p90 s/token at the lowest rate"),
    )
    share, seconds = (result.number("arguments", name) for name in ("efficiency", "seconds"))
    what = (
        f"ShareGPT's conversations for {seconds:.0f} s, A100 80 GB as {share:.0%} of its "
        "rooflines, simulated"
    )
    gains = f"{caption(result, what, link)}\n\n{table(header, list(_gains(result, link)))}"
    header = (
        *("figure 3.14", "requests/s", "found with LRU", "with cost over time"),
        *("tokens recomputed with LRU", "with cost over time", "fewer"),
    )
    rows = list(_evictions(result, link))
    return f"{gains}\n\n{table(header, rows)}" if rows else gains


def _gains(result: Result, link: str) -> Iterator[list[str]]:
    """Figures 3.12, 3.13, 3.15 and 3.16; "over" where conversations ran out within the bound."""
    for s, each in result.items("sets"):
        for policy, curve in result.items("sets", s, "policies"):
            served, ratio = curve["requests_per_s_at_bound"], curve["of_stateless"]
            at = ("sets", s, "policies", policy, "points")
            lowest_s = result.number(*at, 0, "normalised_latency_s", "p90")
            most = f"[over {result.number(*at, -1, 'requests_per_s'):.2f}]({link})"
            yield [
                f"{each['figure']}, {each['model']}",
                f"{each['min_rounds']} or more, {each['reaction_s']:g} s",
                style.name(policy),
                most if served is None else linked(served, ".2f", link),
                "" if ratio is None else f"{ratio:.2f}",
                f"{each['gain']:g}" if policy == "pensieve" and each["gain"] else "",
                f"{lowest_s:.3f} s",
            ]


def _evictions(result: Result, link: str) -> Iterator[list[str]]:
    """Figure 3.14: LRU and cost over time at the rates that both played, once something is lost."""
    for s, each in result.items("sets"):
        if not {"pensieve_lru", "pensieve"} <= each["policies"].keys():
            continue
        lru, ours = (_by_rate(result, s, policy) for policy in ("pensieve_lru", "pensieve"))
        for rate in sorted(lru.keys() & ours.keys()):
            engines = [(*found[rate], "engine") for found in (lru, ours)]
            lost = [result.number(*engine, "num_lost") for engine in engines]
            if not lost[0]:
                continue
            yield [
                each["model"],
                f"{rate:.2f}",
                *(f"{_share_found(result, engine):.1%}" for engine in engines),
                linked(lost[0], ".0f", link),
                f"{lost[1]:.0f}",
                f"{1 - lost[1] / lost[0]:.1%}",
            ]


def _by_rate(result: Result, s: int, policy: str) -> dict[float, tuple[str | int, ...]]:
    """Where the points of a curve lie in the result."""
    at = ("sets", s, "policies", policy, "points")
    return {result.number(*at, i, "rate"): (*at, i) for i, _ in result.items(*at)}


def chart(result: Result) -> Figure:
    """Normalised latency over throughput, a plot for each set of conversations."""
    sets = [s for s, _ in result.items("sets")]
    num_rows = -(-len(sets) // _COLUMNS)
    figure = style.canvas(8, 0.4 + 2.3 * num_rows)
    plots = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    bound = result.number("arguments", "bound")
    lines = {}
    for axes, s in zip(plots, sets, strict=False):
        for policy, _ in result.items("sets", s, "policies"):
            at = ("sets", s, "policies", policy, "points")
            points = [(*at, i) for i, _ in result.items(*at)]
            served = [result.number(*point, "requests_per_s") for point in points]
            p90 = [result.number(*point, "normalised_latency_s", "p90") for point in points]
            (lines[policy],) = axes.plot(served, p90, color=COLOURS.get(policy), marker="o")
        axes.axhline(bound, color=style.INK, linestyle="--", linewidth=1)
        axes.set(ylim=(0, 1.5 * bound), title=_title(result, s))
    for axes in plots[len(sets) :]:
        axes.set_axis_off()
    figure.supxlabel("requests served a second", fontsize=9)
    figure.supylabel("90th percentile of latency over output tokens, s", fontsize=9)
    names = [style.name(policy) for policy in lines]
    figure.legend(lines.values(), names, loc="outside upper left", ncols=len(names), frameon=False)
    return figure


def _title(result: Result, s: int) -> str:
    each = result.get("sets", s)
    return (
        f"{each['figure']}: {each['model']}, {each['min_rounds']} rounds or more, "
        f"{each['reaction_s']:g} s"
    )


def _share_found(result: Result, engine: tuple[str | int, ...]) -> float:
    """Of what the cache was asked for."""
    sought = max(1.0, result.number(*engine, "num_sought"))
    return result.number(*engine, "num_found") / sought
