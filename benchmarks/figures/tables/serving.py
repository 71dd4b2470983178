"""A result into Markdown: every row that holds numbers links to the file they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.figures import pensieve
from benchmarks.figures.flover_charts import runs_of
from benchmarks.figures.markdown import caption, linked, table, where
from benchmarks.figures.results import Result, bound_name
from benchmarks.figures.style import name

HEADINGS = {
    "offline": "All requests at once",
    "policies": "Policies on one workload",
    "online": "Latency against load",
    "conversations": "Conversations that come back",
    "flover": "Flover's section VI",
    "simulate": "Predicted and measured",
    "predictor": "Predicted lengths of answers",
    "probe": "What is left of answers",
    "s3": "S3's models on its GPU, simulated",
    "pensieve": "Pensieve's models on its GPUs, simulated",
    "scattered": "Attention over scattered pages",
    "restore": "Coming back from the host",
    "loading": "Memory for loading a checkpoint",
    "sharding": "What plans send, and how full pipelines are",
    "gpu_check": "One GPU in ten minutes",
}
_OFFLINE = (
    "workload",
    "output tokens/s",
    "of the bound",
    "device waits for host",
    "cold start",
    "warm start",
)


def tables(kind: str, results: Sequence[Result], link: Callable[[Result], str]) -> list[str]:
    """Markdown by result; the offline ones share a table, so only the first holds it.

    Args:
      link: the file's address as the page sees it.

    Raises:
      ResultFileError: a file lacks what its kind has.
    """
    if kind == "offline":
        rows = [_offline_row(result, link(result)) for result in results]
        first = [table(_OFFLINE, rows), *[""] * (len(results) - 1)]
        return [
            f"{text}\n\n{_peers(result, link(result))}".strip() if result.has_peers else text
            for text, result in zip(first, results, strict=True)
        ]
    make = {
        "policies": _policies,
        "online": _online,
        "conversations": _conversations,
        "flover": _flover,
        "simulate": _simulate,
        "predictor": _predictor,
        "probe": _probe,
        "s3": _s3,
        "pensieve": pensieve.tables,
        "scattered": _scattered,
        "restore": _restore,
        "loading": _loading,
        "sharding": _sharding,
        "gpu_check": _gpu_check,
    }[kind]
    return [make(result, link(result)) for result in results]


def _offline_row(result: Result, link: str) -> list[str]:
    what = (
        f"{result.number('num_requests'):.0f} {result.get('workload')} requests, "
        f"{result.get('model')} in {result.get('precision')}, policy {result.get('policy')}, "
        f"{where(result)}"
    )
    starts = [result.optional("startup", kind, "ready_s") for kind in ("cold", "warm")]
    return [
        what,
        linked(result.number("output_tokens_per_s"), ".0f", link),
        f"{result.number('bound', 'reached'):.0%} of {bound_name(result)}",
        f"{result.number('host_gap_share'):.1%}",
        *("" if start is None else f"{start:.0f} s" for start in starts),
    ]


def _peers(result: Result, link: str) -> str:
    """Every engine on the offline result's requests; one that failed says why."""
    rows = []
    for engine, figures in result.items("compare", "engines"):
        at = ("compare", "engines", engine)
        if figures.get("error"):
            rows.append([name(engine), f"[failed]({link})", " ".join(figures["error"].split()), ""])
            continue
        rows.append(
            [
                name(engine),
                linked(result.number(*at, "output_tokens_per_s"), ".0f", link),
                f"{result.number(*at, 'jaxserve_is_faster_by'):.2f}",
                f"{result.number(*at, 'startup_s'):.1f} s",
            ]
        )
    what = "The same requests beside other engines, runs interleaved"
    header = ("engine", "output tokens/s", "jaxserve is faster by", "start-up")
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _policies(result: Result, link: str) -> str:
    rows = []
    for policy, _ in result.items("policies"):
        at = ("policies", policy)
        rows.append(
            [
                name(policy),
                linked(result.number(*at, "output_tokens_per_s"), ".0f", link),
                f"{result.number(*at, 'latency_s', 'p50'):.1f} s",
                f"{result.number(*at, 'latency_s', 'p99'):.1f} s",
                f"{result.number(*at, 'time_to_first_token_s', 'p50'):.2f} s",
                _optional(result, (*at, "average_batch"), ".1f"),
                _optional(result, (*at, "engine", "num_iterations"), ".0f"),
                _optional(result, (*at, "num_preemptions"), ".0f"),
            ]
        )
    arguments = result.get("arguments")
    what = (
        f"{arguments['num_requests']} {arguments['workload']} requests, {_when(arguments)}, "
        f"{arguments['model']}"
    )
    if arguments.get("kv_memory"):
        what += f", a page pool of {arguments['kv_memory']}"
    if arguments.get("max_slots"):
        what += f", at most {arguments['max_slots']} at once"
    header = (
        *("policy", "output tokens/s", "latency, median", "99th percentile", "first token"),
        *("average batch", "iterations", "preempted"),
    )
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _when(arguments: Mapping[str, Any]) -> str:
    """When a workload's requests come, in words."""
    arrivals = arguments["arrivals"]
    if arrivals is None and arguments["workload"].startswith("recorded:"):
        return "as they were recorded"
    return "all at once" if arrivals in (None, "all") else f"arrivals {arrivals}"


def _online(result: Result, link: str) -> str:
    rows = []
    for policy, _ in result.items("policies"):
        for i, _ in result.items("policies", policy, "points"):
            at = ("policies", policy, "points", i)
            share = result.optional(*at, "goodput", "share")
            rows.append(
                [
                    name(policy),
                    linked(result.number(*at, "rate"), ".2g", link),
                    f"{result.number(*at, 'requests_per_s'):.2g}",
                    f"{result.number(*at, 'output_tokens_per_s'):.0f}",
                    f"{result.number(*at, 'normalised_latency_s', 'p90'):.3f} s",
                    f"{result.number(*at, 'time_to_first_token_s', 'p90'):.2f} s",
                    "" if share is None else f"{share:.0%}",
                ]
            )
    arguments = result.get("arguments")
    what = f"{arguments['num_requests']} {arguments['workload']} requests a rate"
    header = ("policy", "requests/s", "served", "tokens/s", "p90 s/token", "p90 first token",
              "within limits")  # fmt: skip
    return f"{caption(result, what + ', ' + arguments['model'], link)}\n\n{table(header, rows)}"


def _conversations(result: Result, link: str) -> str:
    rows = []
    for s, _ in result.items("sets"):
        of = (
            f"{result.number('sets', s, 'min_rounds'):.0f} or more, "
            f"{result.number('sets', s, 'reaction_s'):g} s"
        )
        for policy, curve in result.items("sets", s, "policies"):
            at = ("sets", s, "policies", policy, "points", len(curve["points"]) - 1)
            sought = max(1.0, result.number(*at, "engine", "num_sought"))
            most = f"[over {result.number(*at, 'requests_per_s'):.2f}]({link})"
            served, ratio = curve["requests_per_s_at_bound"], curve["of_stateless"]
            rows.append(
                [
                    of,
                    name(policy),
                    most if served is None else linked(served, ".2f", link),
                    "" if ratio is None else f"{ratio:.2f}",
                    f"{result.number(*at, 'requests_per_s'):.2f}",
                    f"{result.number(*at, 'engine', 'num_found') / sought:.0%}",
                    f"{result.number(*at, 'engine', 'num_found_on_host') / sought:.0%}",
                    f"{result.number(*at, 'engine', 'num_lost'):.0f}",
                ]
            )
    arguments = result.get("arguments")
    how = "simulated from measured step times" if arguments["simulated"] else "measured"
    what = f"{arguments['num_conversations']} conversations a rate, {arguments['model']}, {how}"
    bound = f"requests/s at {arguments['bound']:g} s a token"
    header = ("rounds, reaction", "policy", bound, "of stateless", "requests/s at the highest rate",
              "found", "on the host", "tokens lost")  # fmt: skip
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _flover(result: Result, link: str) -> str:
    """Total times at the largest number of requests; the figures show the rest."""
    last = {policy: runs[-1] for policy, runs in runs_of(result, "constant").items()}
    slowest_s = None
    if "concurrent_instances" in last:
        slowest_s = result.number("constant", last["concurrent_instances"], "wall_s")
    rows = []
    for policy, i in last.items():
        wall_s = result.number("constant", i, "wall_s")
        ratio = "" if slowest_s is None else f"{slowest_s / wall_s:.1f}"
        rate = result.number("constant", i, "output_tokens_per_s")
        rows.append([name(policy), linked(wall_s, ".1f", link), ratio, f"{rate:.0f}"])
    arguments = result.get("arguments")
    what = (
        f"{arguments['max_requests']} requests of {arguments['output_tokens']} output tokens, one "
        f"every {result.number('interval_s'):.2f} s, {arguments['model']}"
    )
    header = ("policy", "total time, s", "faster than concurrent instances by", "output tokens/s")
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _simulate(result: Result, link: str) -> str:
    rows = []
    for i, _ in result.items("runs"):
        row = [name(result.get("runs", i, "policy"))]
        for at, form in ((("output_tokens_per_s",), ".0f"), (("latency_s", "p99"), ".1f")):
            measured = result.number("runs", i, "measured", *at)
            predicted = result.number("runs", i, "predicted", *at)
            error = f"{predicted / measured - 1:+.1%}"
            row += [linked(measured, form, link), f"{predicted:{form}}", error]
        rows.append(row)
    header = (
        *("policy", "measured tokens/s", "predicted", "error"),
        *("measured p99 latency, s", "predicted", "error"),
    )
    return f"{caption(result, 'Measured and simulated', link)}\n\n{table(header, rows)}"


def _predictor(result: Result, link: str) -> str:
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
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _probe(result: Result, link: str) -> str:
    """Error in tokens and share of right buckets, a row a way to predict."""
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
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _s3(result: Result, link: str) -> str:
    """Tables 2, 3 and 4 of the paper, its numbers beside ours."""
    known = ("orca", "s3", "s3_oracle")
    rows = []
    for model, runs in result.items("models"):
        for policy in runs:
            at = ("models", model, policy)
            row = [model, name(policy)]
            for key in ("output_tokens_per_s", "average_batch", "num_iterations"):
                theirs = result.get("paper").get(model, {}).get(key, ())
                row.append(linked(result.number(*at, key), ".0f", link))
                row += [f"{own:.0f}" for n, own in zip(known, theirs, strict=False) if n == policy]
                row += [""] * (len(row) % 2)
            rates = result.get("slo").get(model, {}).get(policy, ())
            within = [each["requests_within_per_s"] for each in rates]
            row.append(f"{max(within):.2f}" if within else "")
            rows.append(row)
    header = (
        *("model", "policy", "tokens/s", "paper", "batch", "paper", "iterations", "paper"),
        "requests/s within 0.1875 s a token, at the best rate",
    )
    arguments = result.get("arguments")
    what = (
        f"{arguments['num_requests']} requests of ShareGPT's lengths, all at once, A100 80 GB as "
        "rooflines, simulated"
    )
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _scattered(result: Result, link: str) -> str:
    ways = ("over_pages_s", "copied_out_s", "one_token_at_a_time_s")
    rows = []
    for i, _ in result.items("contexts"):
        first, *others = (1e3 * result.number("contexts", i, way) for way in ways)
        context = f"{result.number('contexts', i, 'context'):.0f}"
        rows.append([context, linked(first, ".2f", link), *(f"{ms:.2f}" for ms in others)])
    arguments = result.get("arguments")
    what = f"{arguments['batch']} rows of {arguments['queries']} tokens, milliseconds"
    header = ("context", *(name(way.removesuffix("_s")) for way in ways))
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _restore(result: Result, link: str) -> str:
    rows = []
    for i, point in result.items("points"):
        first, lost = (
            1e3 * result.number("points", i, key) for key in ("first_token_s", "others_lost_s")
        )
        at = [name(point["situation"]), f"{point['length']:,}", name(point["way"])]
        rows.append([*at, linked(first, ".0f", link), f"{lost:.0f}"])
    header = ("slot", "tokens", "pages come", "first token, ms", "others lost, ms")
    what = (
        f"Pages of {result.number('page_bytes') / 1e6:.2f} MB, {result.get('arguments')['model']}"
    )
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _loading(result: Result, link: str) -> str:
    row = [
        f"{result.get('shape')}, {result.get('dtype')}, {result.number('num_shards'):.0f} shards",
        f"{result.number('checkpoint_bytes') / 1e9:.2f} GB",
        f"{result.number('peak_host_bytes') / 1e9:.2f} GB",
        linked(result.number("ratio"), ".2f", link),
        f"{result.number('load_s'):.0f} s",
    ]
    header = ("checkpoint", "size", "peak host memory", "over the size", "from disk in")
    return f"{caption(result, 'A random checkpoint', link)}\n\n{table(header, [row])}"


def _sharding(result: Result, link: str) -> str:
    rows = []
    for i, run in result.items("runs"):
        sent = result.number("runs", i, "decode", "bytes")
        least = result.number("runs", i, "decode", "least_bytes")
        row = [str(run["plan"]), linked(sent, ",.0f", link)]
        row += [f"{sent / least:.2f}" if least else ""]
        for share in ("bubble", "ideal_bubble"):
            found = result.optional("runs", i, "pipeline", share)
            row.append("" if found is None else f"{found:.1%}")
        rows.append(row)
    header = ("plan", "bytes a decode iteration", "of the least", "bubble", "ideal")
    layers = result.get("model", "layers")
    what = f"{result.number('rows'):.0f} sequences of a model of {layers} layers"
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def _gpu_check(result: Result, link: str) -> str:
    rows = [
        [bar["what"], bar["wanted"], bar["found"] and f"[{bar['found']}]({link})", bar["verdict"]]
        for _, bar in result.items("bars")
    ]
    header = ("what", "wanted", "found", "verdict")
    return f"{caption(result, 'Beside what was aimed for', link)}\n\n{table(header, rows)}"


def _optional(result: Result, at: Sequence[str], form: str) -> str:
    found = result.optional(*at)
    return "" if found is None else f"{found:{form}}"
