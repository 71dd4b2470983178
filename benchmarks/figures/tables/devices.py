"""Tables of loading, of sharding plans, and of one GPU."""

from __future__ import annotations

from benchmarks.figures.markdown import caption, linked, shown, table
from benchmarks.figures.results import Result


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
