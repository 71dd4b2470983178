"""Tables of what a trainer asks for: the same bits, adapters, speculation."""

from __future__ import annotations

from benchmarks.common.repeats import Spread
from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result
from benchmarks.figures.tables.peers import engines

# Throughput that adapters are to keep, of that without any.
_LEAST_ADAPTED = 0.8
# Lookup decoding costs at most this share of the throughput without it.
_LEAST_SPECULATING = 0.98


def invariance(result: Result, link: str) -> str:
    """Return the pairs that were compared, how steps were cut in them, and what differed."""
    rows = []
    for way, _ in result.items("ways"):
        names = ("num_pairs", "num_different", "num_preemptions", "num_pages_in", "num_prefix_hit")
        numbers = [result.number("ways", way, each) for each in names]
        rows.append(
            [way, linked(numbers[0], ",.0f", link), *(f"{each:,.0f}" for each in numbers[1:])]
        )
    rates = {
        mode: shown(result.spread(("cost", mode), "tokens_per_s"), ".0f")
        for mode in ("deterministic", "ordinary")
    }
    what = (
        f"{result.number('num_requests'):.0f} {result.get('arguments')['workload']} requests, "
        f"{result.get('arguments')['model']}, in random batches"
    )
    header = ("steps", "pairs", "different", "preempted", "pages restored", "cached tokens")
    own, drawn = (
        f"{result.number(name, 'num_different'):.0f} of {result.number(name, 'num_answers'):.0f}"
        for name in ("scores", "processed_scores")
    )
    scored = (
        f"`rt.score` differs in {own} answers, and in {drawn} for the distributions that tokens "
        f"were drawn from. Output tokens a second: {rates['deterministic']} with "
        f"`deterministic=True`, {rates['ordinary']} without."
    )
    return f"{caption(result, what, link)}\n\n{table(header, rows)}\n\n{scored}"


def residual(result: Result, link: str) -> str:
    """Return how far reported log-probabilities are from the trainer's, a row for each mode."""
    rows = []
    for mode, _ in result.items("modes"):
        at = ("modes", mode)
        rows.append(
            [
                mode,
                linked(result.number(*at, "num_different"), ",.0f", link),
                *(
                    f"{result.number(*at, name):.1e}"
                    for name in ("mean", "largest", "largest_ratio_error", "kl")
                ),
            ]
        )
    arguments = result.get("arguments")
    first = next(iter(result.get("modes")))
    what = (
        f"{result.number('modes', first, 'num_tokens'):,.0f} drawn tokens of {arguments['model']} "
        "in each mode, beside the trainer's log-probabilities in float32"
    )
    header = ("serving", "tokens with other bits", "mean difference", "largest",
              "largest error of a ratio", "KL divergence per token")  # fmt: skip
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def adapters(result: Result, link: str) -> str:
    """Return the throughput with numbers of adapters in one batch, and which keep too little."""
    short = []
    rows = [
        [
            "none can be loaded",
            shown(result.spread(("without",), "tokens_per_s"), ".0f", link=link),
            "1.00",
        ]
    ]
    for i, case in result.items("cases"):
        at = ("cases", i)
        share = _kept(result, *at, "share_of_throughput")
        rows.append(
            [
                f"{case['num_adapters']:,}",
                shown(result.spread(at, "tokens_per_s"), ".0f", link=link),
                shown(share, ".2f"),
            ]
        )
        if share.median < _LEAST_ADAPTED:
            short.append(f"{case['num_adapters']:,} adapters ({share.median:.3f})")
    arguments = result.get("arguments")
    what = (
        f"{arguments['num_requests']} {arguments['workload']} requests at once, "
        f"{arguments['model']}, adapters of rank {arguments['rank']} for all matrices"
        + (f", kept in {dtype}" if (dtype := arguments.get("adapter_dtype")) else "")
    )
    load = f"Loading one from arrays takes {result.number('load_s'):.2f} s (median)."
    header = ("adapters in the batch", "output tokens/s", "of the throughput without")
    said = f"Less than {_LEAST_ADAPTED} of the throughput without: {'; '.join(short)}."
    parts = [caption(result, what, link), table(header, rows), said if short else "", load]
    return "\n\n".join(filter(None, parts))


def speculation(result: Result, link: str) -> str:
    """Return the throughput with and without speculation, and where it cost some."""
    rows, behind = [], []
    for i, case in result.items("cases"):
        for way, _ in result.items("cases", i, "is_faster_by"):
            at = ("cases", i)
            faster = _kept(result, *at, "is_faster_by", way)
            rows.append(
                [
                    case["kind"],
                    f"{case['num_requests']:,}",
                    way,
                    shown(result.spread((*at, "without"), "tokens_per_s"), ".0f", link=link),
                    shown(result.spread((*at, way), "tokens_per_s"), ".0f", link=link),
                    shown(faster, ".2f"),
                    shown(result.spread((*at, way), "accepted_share"), ".0%"),
                ]
            )
            if faster.median < _LEAST_SPECULATING:
                where = f"{case['kind']}, {case['num_requests']:,} requests, {way}"
                behind.append(f"{where} ({faster.median:.2f})")
    arguments = result.get("arguments")
    what = (
        f"Greedy answers of {arguments['output_tokens']} tokens by {arguments['model']}, with and "
        "without speculation in turns, the same tokens"
    )
    header = ("prompts", "requests", "proposer", "output tokens/s without", "with")
    header += ("faster by", "proposals accepted")
    said = f"Less than {_LEAST_SPECULATING} of the speed without: {'; '.join(behind)}."
    parts = [caption(result, what, link), table(header, rows), said if behind else ""]
    for kind, _ in result.items("peers"):
        parts += [
            f"Every engine with its own lookup decoding, prompts of the kind `{kind}`:",
            engines(result, ("peers", kind), link),
        ]
    return "\n\n".join(filter(None, parts))


def _kept(result: Result, *keys: str | int) -> Spread:
    """Return a spread that the file itself has, of ratios of runs beside each other."""
    low, high = result.get(*keys, "range")
    return Spread(result.number(*keys, "median"), low, high, result.repeats)
