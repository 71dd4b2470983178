"""Tables beside those of the Flover and S3 papers."""

from __future__ import annotations

from benchmarks.common.repeats import Spread
from benchmarks.figures.charts.flover import runs_of
from benchmarks.figures.losses import losses
from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result
from benchmarks.figures.style import name


def flover(result: Result, link: str) -> str:
    """Return total times at the largest number of requests; the figures show the rest."""
    last = {policy: points[-1] for policy, points in runs_of(result, "constant").items()}
    slowest = None
    if "concurrent_instances" in last:
        slowest = result.spread(("constant", last["concurrent_instances"]), "wall_s")
    rows = []
    for policy, i in last.items():
        wall = result.spread(("constant", i), "wall_s")
        rows.append(
            [
                name(policy),
                shown(wall, ".1f", link=link),
                "" if slowest is None else f"{slowest.median / wall.median:.1f}",
                shown(result.spread(("constant", i), "output_tokens_per_s"), ".0f"),
            ]
        )
    arguments = result.get("arguments")
    what = (
        f"{arguments['max_requests']} requests of {arguments['output_tokens']} output tokens, one "
        f"every {result.number('interval_s'):.2f} s, {arguments['model']}"
    )
    header = ("policy", "total time, s", "faster than concurrent instances by", "output tokens/s")
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def s3(result: Result, link: str) -> str:
    """Return tables 2, 3 and 4 of the paper, its numbers beside ours, and what was lost."""
    known = ("orca", "s3", "s3_oracle")
    rows = []
    rates: dict[str, dict[str, Spread]] = {}
    for model, runs in result.items("models"):
        for policy in runs:
            at = ("models", model, policy)
            row = [model, name(policy)]
            for key in ("output_tokens_per_s", "average_batch", "num_iterations"):
                values = result.get("paper").get(model, {}).get(key, ())
                theirs = dict(zip(known, values, strict=False))
                row.append(linked(result.number(*at, key), ".0f", link))
                row.append(f"{theirs[policy]:.0f}" if policy in theirs else "")
            slo = result.get("slo").get(model, {}).get(policy, ())
            within = [each["requests_within_per_s"] for each in slo]
            row.append(f"{max(within):.2f}" if within else "")
            rows.append(row)
            rate = Spread.of([result.number(*at, "output_tokens_per_s")])
            rates.setdefault(model, {})[policy] = rate
    header = (
        *("model", "policy", "tokens/s", "paper", "batch", "paper", "iterations", "paper"),
        "requests/s within 0.1875 s a token, at the best rate",
    )
    arguments = result.get("arguments")
    what = (
        f"{arguments['num_requests']} requests of ShareGPT's lengths, all at once, A100 80 GB as "
        "rooflines"
    )
    text = f"{caption(result, what, link, how='simulated')}\n\n{table(header, rows)}"
    return f"{text}\n\n{losses('output tokens/s', rates)}"


def policies_grid(result: Result, link: str) -> str:
    """Return the throughput and p99 latency of `auto` over the best other preset's, by case."""
    places: dict[tuple[str, str], list[int]] = {}
    for i, row in enumerate(result.get("rows")):
        places.setdefault((row["workload"], row["pool"]), []).append(i)
    rows = []
    for place, indices in places.items():
        others = [i for i in indices if result.get("rows")[i]["policy"] != "auto"]
        rate = max(result.number("rows", i, "output_tokens_per_s") for i in others)
        p99 = min(result.number("rows", i, "latency_s", "p99") for i in others)
        for i in (each for each in indices if each not in others):
            own = result.number("rows", i, "output_tokens_per_s")
            own_p99 = result.number("rows", i, "latency_s", "p99")
            ratio = linked(own / rate, ".3f", link)
            rows.append([*place, result.get("rows")[i]["predictor"], ratio, f"{own_p99 / p99:.3f}"])
    header = ("workload", "pool", "predictor", "tokens/s over the best other", "p99 over it")
    arguments = result.get("arguments")
    memory = "no host memory" if arguments["no_host"] else "host memory"
    what = (
        f"auto, {arguments['num_requests']} requests all at once, {arguments['max_slots']} slots, "
        f"{memory}, Llama 3 8B on an A100 80 GB as rooflines"
    )
    return f"{caption(result, what, link, how='simulated')}\n\n{table(header, rows)}"
