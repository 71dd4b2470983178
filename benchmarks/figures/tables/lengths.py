"""Tables of predicted lengths of answers, and of what is left of them."""

from __future__ import annotations

from benchmarks.figures.markdown import caption, linked, table
from benchmarks.figures.results import Result


def predictor(result: Result, link: str) -> str:
    """Return accuracy and kept promises of the predictor and its baselines."""
    rows = []
    for i, one in result.items("contenders"):
        at = ("contenders", i)
        rows.append(
            [
                str(one["name"]),
                linked(result.number(*at, "accuracy"), ".1%", link),
                f"{result.number(*at, 'wrong_by'):.2f}",
                f"{result.number(*at, 'error_tokens'):.0f}",
                f"{result.number(*at, 'under_prediction'):.1%}",
                *(
                    f"{promise['missed']:.1%} ({promise['reserved_tokens']:.0f})"
                    for promise in one["promises"].values()
                ),
            ]
        )
    edges = result.get("bucket_edges")
    what = (
        f"{result.number('num_examples', 'test'):.0f} {result.get('settings', 'data')} prompts, "
        f"{len(edges) - 1} buckets up to {edges[-1]} tokens; outgrown reservations and, in "
        "brackets, their mean length in tokens"
    )
    header = (
        *("predictor", "accuracy", "wrong by, buckets", "error, tokens", "too short"),
        *(f"outgrown at {float(p):.0%}" for p in result.get("contenders", 0, "promises")),
    )
    return f"{caption(result, what, link, how='one training')}\n\n{table(header, rows)}"


def probe(result: Result, link: str) -> str:
    """Return error in tokens and share of right buckets, a row for each way to predict."""
    cells: dict[str, dict[int | None, str]] = {}
    for i, one in result.items("figures"):
        error, right = (result.number("figures", i, k) for k in ("error_tokens", "accuracy"))
        row = cells.setdefault(one["name"], {})
        text = f"{linked(error, '.0f', link)}" if not row else f"{error:.0f}"
        row[one["elapsed"]] = f"{text} ({right:.0%})"
    at = list(dict.fromkeys(elapsed for row in cells.values() for elapsed in row))
    rows = [[name, *(row.get(elapsed, "") for elapsed in at)] for name, row in cells.items()]
    cost = ("iteration_us_without", "iteration_us_with", "slower_by", "batch_size")
    without, with_it, slower_by, size = (result.number("cost", each) for each in cost)
    what = (
        f"Tokens by which what is left of {result.number('num_answers', 'test'):.0f} answers was "
        "mistaken, and share of right buckets in brackets, by tokens that had come; an iteration "
        f"of {size:.0f} rows takes {without:.0f} us, with the probe {with_it:.0f} us "
        f"({slower_by:+.1%})"
    )
    header = ("", *("all" if elapsed is None else f"{elapsed}" for elapsed in at))
    return f"{caption(result, what, link, how='one training')}\n\n{table(header, rows)}"
