"""Tables of starts, compilation, loading, few bits, host time, sharding, roles, one GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result
from benchmarks.figures.style import name

# The parts of a start that tables show, in `benchmarks.startup.once`, and their headings.
_STARTUP_PARTS = {
    "imports": "imports",
    "tokenizer": "tokenizer",
    "weights": "weights",
    "cache": "page pool",
    "first_answer": "first answer",
    "second_answer": "second answer",
}


def startup(result: Result, link: str) -> str:
    """Return where the seconds of cold and of warm starts go."""
    rows = []
    for kind in ("cold", "warm"):
        seconds = {part: result.spread((kind,), f"{part}_s") for part in _STARTUP_PARTS}
        first = result.spread((kind,), "first_token_s")
        loaded, compiled = (
            result.spread((kind,), count).median for count in ("num_loaded", "num_compiled")
        )
        rows.append(
            [
                kind,
                shown(first, ".1f", " s", link),
                *(shown(spread, ".1f", " s") for spread in seconds.values()),
                f"{loaded:.0f} loaded, {compiled:.0f} compiled",
                shown(result.spread((kind,), "resident_bytes").over(1e9), ".2f", " GB"),
            ]
        )
    header = ("start", "first token", *_STARTUP_PARTS.values(), "executables", "resident")
    what = f"Starts of {result.get('model')} in new processes"
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def loading(result: Result, link: str) -> str:
    """Return the peak host memory of loading a checkpoint."""
    peak = result.spread((), "peak_host_bytes")
    row = [
        f"{result.get('shape')}, {result.get('dtype')}, {result.number('num_shards'):.0f} shards",
        f"{result.number('checkpoint_bytes') / 1e9:.2f} GB",
        f"{peak.median / 1e9:.2f} GB",
        shown(result.spread((), "ratio"), ".2f", link=link),
        shown(result.spread((), "load_s"), ".0f", " s"),
    ]
    header = ("checkpoint", "size", "peak host memory", "over the size", "from disk in")
    return f"{caption(result, 'A random checkpoint', link)}\n\n{table(header, [row])}"


def compile_times(result: Result, link: str) -> str:
    """Return how long a start compiles, one executable after the other and on its threads."""
    rows = [
        [
            name,
            f"{len(result.get(way, 'executables')):,}",
            linked(result.number(way, "wall_s"), ".0f", link) + " s",
            f"{result.number(way, 'sum_s'):.0f} s",
        ]
        for way, name in (("serial", "one after the other"), ("parallel", "on a start's threads"))
    ]
    arguments = result.get("arguments")
    target = "an H100" if arguments["target"] == "h100" else "its own CPU"
    what = (
        f"Executables of a Llama of the shape {arguments['shape']} with {arguments['layout']} "
        f"layers, {arguments['max_slots']} slots and steps of {arguments['max_step_tokens']:,} "
        f"tokens, compiled for {target} without a cache"
    )
    header = ("compiled", "executables", "all are made after", "sum of the seconds of each")
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def quality(result: Result, link: str) -> str:
    """Return how far the model with weights in few bits is from the unquantised one."""
    base = result.number("unquantised", "perplexity")
    size = result.number("unquantised", "weights_bytes")
    rows = [["unquantised", f"{size / 1e6:.0f} MB", linked(base, ".3f", link), "", "", ""]]
    for format, _ in result.items("formats"):
        numbers = [
            result.number("formats", format, key)
            for key in ("weights_bytes", "perplexity", "divergence", "agreement")
        ]
        size, perplexity, divergence, agreement = numbers
        row = [format, f"{size / 1e6:.0f} MB", linked(perplexity, ".3f", link)]
        rows.append([*row, f"{perplexity / base:.3f}", f"{divergence:.4f}", f"{agreement:.1%}"])
    what = (
        f"{result.number('num_tokens'):,.0f} tokens of held-out ShareGPT texts, "
        f"{result.get('model')} in {result.get('dtype')}"
    )
    header = ("weights", "size", "perplexity", "ratio", "KL divergence, nats", "same greedy token")
    worse = [f"Worse than it should be: {text}." for _, text in result.items("warnings")]
    text = caption(result, what, link, how="one pass, which nothing random is in")
    return "\n\n".join([text, table(header, rows), *worse])


def planning(result: Result, link: str) -> str:
    """Return the host's milliseconds a step, of each checkout that was measured.

    There is a row for each policy and context: the point whose planning takes longest.
    """
    checkouts = [key for key, _ in result.items("points")]
    slowest: dict[tuple[str, int | None], tuple[Any, Any]] = {}
    for i, point in result.items("points", "here"):
        place = point["policy"], point.get("max_context")
        p99 = result.spread(("points", "here", i), "planning_ms", "p99").median
        if place not in slowest or p99 > slowest[place][0]:
            slowest[place] = p99, (i, point)
    rows = []
    for _, (i, point) in slowest.values():
        context = point.get("max_context")
        row = [name(point["policy"]), f"{point['max_slots']}", f"{point['num_waiting']:,}"]
        row.append("" if context is None else f"{context:,}")
        for checkout in checkouts:
            at = ("points", checkout, i)
            row.append(shown(result.spread(at, "planning_ms", "p50"), ".2f", link=link))
            row.append(shown(result.spread(at, "planning_ms", "p99"), ".2f"))
            row.append(shown(result.spread(at, "planning_ms", "max"), ".1f"))
            row.append(shown(result.spread(at, "host_ms", "p50"), ".2f"))
        rows.append(row)
    columns = ("planning, median", "99th percentile", "worst", "host, median")
    names = {"here": "this commit", "against": f"{result.get('arguments')['against']}"}
    header = [f"{what}, {names[each]}" for each in checkouts for what in columns]
    what = "Milliseconds a step, simulated device; of each policy and context the slowest point"
    places = ("policy", "slots", "waiting", "context")
    return f"{caption(result, what, link)}\n\n{table((*places, *header), rows)}"


def sharding(result: Result, link: str) -> str:
    """Return what plans send, counted in compiled steps, and bubbles of pipelines."""
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
    return f"{caption(result, what, link, how='counted')}\n\n{table(header, rows)}"


def roles(result: Result, link: str) -> str:
    """Return throughput and latencies of a fleet with roles, and of plain replicas."""
    rows = []
    for fleet, _ in result.items("fleets"):
        at = ("fleets", fleet)
        row = [{"roles": "one of each role", "whole": "two without roles"}[fleet]]
        row.append(shown(result.spread(at, "output_tokens_per_s"), ".0f", link=link))
        for what in ("first_token_s", "latency_s", "gap_s"):
            row += [shown(result.spread(at, what, each), ".2f", " s") for each in ("p50", "p99")]
        rows.append(row)
    latencies = ("first token", "answer", "between tokens")
    columns = [f"{what}, {each}" for what in latencies for each in ("median", "p99")]
    given = result.get("arguments")
    what = (
        f"{given['num_requests']} prompts of {given['prompt_tokens']} tokens, answers of "
        f"{given['output_tokens']}, arrivals {given['arrivals']}"
    )
    header = ("replicas", "output tokens/s", *columns)
    return f"{caption(result, what, link)}\n\n{table(header, rows)}"


def gpu_check(result: Result, link: str) -> str:
    """Return the bars of a gpu-check."""
    rows = [
        [bar["what"], bar["wanted"], bar["found"] and f"[{bar['found']}]({link})", bar["verdict"]]
        for _, bar in result.items("bars")
    ]
    header = ("what", "wanted", "found", "verdict")
    return (
        f"{caption(result, 'Results and their bars', link, how='one run')}\n\n{table(header, rows)}"
    )
