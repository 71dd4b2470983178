"""Tables of what HTTP and grammars cost."""

from __future__ import annotations

from benchmarks.figures.markdown import caption, shown, table
from benchmarks.figures.results import Result

# Ways to the model that are our own; a peer is compared with the last of them that was measured.
_OURS = ("in process", "socket", "http", "completions")


def http(result: Result, link: str) -> str:
    """Return the ways to the model for each number of connections, and what HTTP costs."""
    rows, behind = [], []
    for i, point in result.items("points"):
        costs = [("points", i, name) for name in ("costs", "costs_beside_socket")]
        outside = result.spread(costs[0], "outside_engine_s")
        for way, _ in result.items("points", i, "ways"):
            at = ("points", i, "ways", way)
            row = [f"{point['connections']:,}", way]
            row.append(shown(result.spread(at, "at_once", "tokens_per_s"), ".0f", link=link))
            for what in ("first_token_s", "token_s"):
                for level in ("p50", "p99"):
                    spread = result.optional_spread(at, "poisson", what, level)
                    row.append("" if spread is None else shown(spread.over(1e-3), ".1f", " ms"))
            own = result.optional_spread(at, "poisson", "share_of_own_rate")
            row.append("" if own is None else shown(own, ".0%"))
            if way != "http":
                row += [""] * 5
            else:
                row.append(shown(outside.over(1e-3), ".1f", " ms"))
                for each in costs:
                    row.append(shown(result.spread(each, "throughput_share"), ".1%"))
                    later = result.spread(each, "first_token_later_s")
                    row.append(shown(later.over(1e-3), ".1f", " ms"))
            rows.append(row)
        behind += _where_behind(result, i)
    arguments = result.get("arguments")
    what = (
        f"{arguments['workload']} requests to {arguments['model']}, each on its connection: tokens "
        "a second when all come at once, latencies of Poisson arrivals, whose rate is the same for "
        "all ways: half of the requests a second that jaxserve answers in process"
    )
    header = ["connections", "way", "output tokens/s", "first token, median", "99th percentile"]
    header += ["a token, median", "99th percentile"]
    header += ["arrivals, of the requests that the way itself answers at once"]
    header += ["of the first token outside the engine, mean"]
    for base in ("in process", "over sockets"):
        header += [f"of the throughput {base}", f"first token later than {base}, median"]
    failed = [f"{name} failed: {reason}" for name, reason in result.items("failed")]
    return "\n\n".join([caption(result, what, link), table(header, rows), *behind, *failed])


def _where_behind(result: Result, i: int) -> list[str]:
    """Return a sentence for each peer that is ahead of us in something at a point."""
    ways = [way for way, _ in result.items("points", i, "ways")]
    own = [way for way in _OURS if way in ways][-1]
    sentences = []
    for peer in ways:
        found = []
        if peer not in _OURS:
            theirs, ours = (("points", i, "ways", way) for way in (peer, own))
            rates = [result.spread(at, "at_once", "tokens_per_s") for at in (theirs, ours)]
            if rates[0].median > rates[1].median:
                found.append("tokens/s: {:.0f} to {:.0f}".format(*(r.median for r in rates)))
            for kind, name in (("first_token_s", "first token"), ("token_s", "a token")):
                for level, of in (("p50", "median"), ("p99", "99th percentile")):
                    times = [
                        result.optional_spread(at, "poisson", kind, level) for at in (theirs, ours)
                    ]
                    late = [1e3 * each.median for each in times if each is not None]
                    if len(late) == 2 and late[0] < late[1]:
                        found.append("{}, {}: {:.0f} to {:.0f} ms".format(name, of, *late))
        if found:
            connections = result.get("points", i)["connections"]
            sentences.append(
                f"jaxserve ({own}) is behind {peer} at {connections:,} connections in "
                f"{'; '.join(found)}."
            )
    return sentences


def structured(result: Result, link: str) -> str:
    """Return the cost of a token with grammars and without."""
    rows = []
    for kind in ("with", "without"):
        spreads = [
            result.spread((kind,), name)
            for name in ("token_s", "mask_token_s", "forced_share", "host_gap_share")
        ]
        token, mask, forced, gap = spreads
        rows.append(
            [
                f"{kind} schemas",
                shown(result.spread((kind,), "tokens_per_s"), ".0f", link=link),
                shown(token.over(1e-3), ".2f", " ms"),
                shown(mask.over(1e-3), ".2f", " ms"),
                shown(forced, ".0%"),
                shown(gap, ".0%"),
                shown(result.spread(("costs",), "throughput_share"), ".1%")
                if kind == "with"
                else "",
            ]
        )
    arguments = result.get("arguments")
    number = arguments["num_requests"] or "32"
    what = f"{number} {arguments['workload']} requests at once, {arguments['model']}"
    what += ", greedy" if arguments.get("temperature") == 0 else ""
    header = ("answers", "output tokens/s", "a token", "masks a token, on host threads")
    header += ("forced", "device idle for the host", "of the throughput without")
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"
