"""Tables of conversations that come back, of attention over their pages, and of restoring them."""

from __future__ import annotations

from benchmarks.common.counters import PrefixCounts
from benchmarks.common.repeats import Spread
from benchmarks.figures.losses import losses
from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result
from benchmarks.figures.style import name


def conversations(result: Result, link: str) -> str:
    """Return every policy at its highest rate, and what those by predicted length lost there.

    Requests at the bound are "over" the highest rate where p90 stays within the bound.
    """
    rows = []
    latencies: dict[str, dict[str, Spread]] = {}
    for s, _ in result.items("sets"):
        of = (
            f"{result.number('sets', s, 'min_rounds'):.0f} or more, "
            f"{result.number('sets', s, 'reaction_s'):g} s"
        )
        for policy, curve in result.items("sets", s, "policies"):
            at = ("sets", s, "policies", policy, "points", len(curve["points"]) - 1)
            prefix = PrefixCounts.of(result.get(*at, "engine"))
            most = f"[over {result.spread(at, 'requests_per_s').median:.2f}]({link})"
            served, ratio = curve["requests_per_s_at_bound"], curve["of_stateless"]
            p90 = result.spread(at, "normalised_latency_s", "p90")
            latencies.setdefault(of, {})[policy] = p90
            rows.append(
                [
                    of,
                    name(policy),
                    most if served is None else linked(served, ".2f", link),
                    "" if ratio is None else f"{ratio:.2f}",
                    shown(result.spread(at, "requests_per_s"), ".2f"),
                    shown(p90, ".3f", " s"),
                    f"{prefix.hit_share:.0%}",
                    f"{prefix.hit_on_host_share:.0%}",
                    f"{prefix.evicted:.0f}",
                ]
            )
    arguments = result.get("arguments")
    what = f"{arguments['num_conversations']} conversations a rate, {arguments['model']}"
    how = "simulated with measured step times" if arguments["simulated"] else None
    bound = f"requests/s at {arguments['bound']:g} s a token"
    header = ("rounds, reaction", "policy", bound, "of stateless", "requests/s at the highest rate",
              "p90 s/token there", "hit", "on the host", "tokens evicted")  # fmt: skip
    lost = losses("p90 s/token at the highest rate", latencies, is_lower_better=True)
    text = f"{caption(result, what, link, how=how)}\n\n{table(header, rows)}"
    return f"{text}\n\n{lost}" if lost else text


def scattered(result: Result, link: str) -> str:
    """Return milliseconds of every way to attend to scattered pages."""
    ways = ("over_pages_s", "copied_out_s", "one_token_at_a_time_s")
    rows = []
    for i, _ in result.items("contexts"):
        first, *others = (_in_ms(result.spread(("contexts", i), way)) for way in ways)
        context = f"{result.number('contexts', i, 'context'):.0f}"
        cells = (shown(each, ".2f") for each in others)
        rows.append([context, shown(first, ".2f", link=link), *cells])
    arguments = result.get("arguments")
    what = f"{arguments['batch']} rows of {arguments['queries']} tokens, milliseconds"
    header = ("context", *(name(way.removesuffix("_s")) for way in ways))
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def restore(result: Result, link: str) -> str:
    """Return milliseconds to the first token, and lost by others, for every way of restoring."""
    rows = []
    for i, point in result.items("points"):
        first, lost = (
            _in_ms(result.spread(("points", i), key)) for key in ("first_token_s", "others_lost_s")
        )
        at = [name(point["situation"]), f"{point['length']:,}", name(point["way"])]
        rows.append([*at, shown(first, ".0f", link=link), shown(lost, ".0f")])
    header = ("slot", "tokens", "pages come", "first token, ms", "others lost, ms")
    what = (
        f"Pages of {result.number('page_bytes') / 1e6:.2f} MB, {result.get('arguments')['model']}"
    )
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _in_ms(spread: Spread) -> Spread:
    return Spread(1e3 * spread.median, 1e3 * spread.low, 1e3 * spread.high, spread.num_runs)
