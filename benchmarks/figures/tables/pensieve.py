"""Tables beside figures 3.12 to 3.16 of the Pensieve thesis, simulated."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.counters import PrefixCounts
from benchmarks.common.repeats import Spread
from benchmarks.figures import style
from benchmarks.figures.losses import losses
from benchmarks.figures.markdown import caption, linked, table
from benchmarks.figures.results import Result


def tables(result: Result, link: str) -> str:
    """Return throughput at one latency, what was lost in it, and figure 3.14."""
    bound = result.number("arguments", "bound")
    header = (
        *("figure", "rounds, reaction", "policy", f"requests/s at {bound:g} s a token"),
        *("of stateless", "thesis", "p90 s/token at the lowest rate"),
    )
    share, seconds = (result.number("arguments", name) for name in ("efficiency", "seconds"))
    what = (
        f"ShareGPT's conversations for {seconds:.0f} s, A100 80 GB as {share:.0%} of its rooflines"
    )
    whole = table(header, list(_gains(result, link)))
    gains = f"{caption(result, what, link, how='simulated')}\n\n{whole}"
    if lost := losses(f"requests/s at {bound:g} s a token", _at_bound(result)):
        gains += f"\n\n{lost}"
    header = (
        *("figure 3.14", "requests/s", "hit with LRU", "with cost over time"),
        *("tokens recomputed with LRU", "with cost over time", "fewer"),
    )
    rows = list(_evictions(result, link))
    return f"{gains}\n\n{table(header, rows)}" if rows else gains


def _gains(result: Result, link: str) -> Iterator[list[str]]:
    """Yield a row a policy of each panel; "over" where conversations ran out within the bound."""
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


def _at_bound(result: Result) -> dict[str, dict[str, Spread]]:
    """Return what the policies of each panel serve at the bound, where they reach it."""
    return {
        f"{each['figure']}, {each['model']}": {
            policy: Spread.of([curve["requests_per_s_at_bound"]])
            for policy, curve in each["policies"].items()
            if curve["requests_per_s_at_bound"] is not None
        }
        for _, each in result.items("sets")
        if "auto" in each["policies"]
    }


def _evictions(result: Result, link: str) -> Iterator[list[str]]:
    """Yield the rates of figure 3.14 that both policies played and at which LRU evicted tokens."""
    for s, each in result.items("sets"):
        if not {"pensieve_lru", "pensieve"} <= each["policies"].keys():
            continue
        lru, ours = (_by_rate(result, s, policy) for policy in ("pensieve_lru", "pensieve"))
        for rate in sorted(lru.keys() & ours.keys()):
            counts = [PrefixCounts.of(result.get(*found[rate], "engine")) for found in (lru, ours)]
            evicted = [each.evicted for each in counts]
            if not evicted[0]:
                continue
            yield [
                each["model"],
                f"{rate:.2f}",
                *(f"{each.hit_share:.1%}" for each in counts),
                linked(evicted[0], ".0f", link),
                f"{evicted[1]:.0f}",
                f"{1 - evicted[1] / evicted[0]:.1%}",
            ]


def _by_rate(result: Result, s: int, policy: str) -> dict[float, tuple[str | int, ...]]:
    """Return the place of each point of a curve in the result, by rate."""
    at = ("sets", s, "policies", policy, "points")
    return {result.number(*at, i, "rate"): (*at, i) for i, _ in result.items(*at)}
