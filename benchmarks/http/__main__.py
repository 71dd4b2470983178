"""What HTTP costs beside the same requests in process: `python -m benchmarks.http --help`.

The requests come from another process, each on a connection of its own, and stream tokens. Once all
come at once, for throughput; once as Poisson arrivals at half of that, for latencies. With
`--peer`, the same client sends the same prompts to other servers, and to this one in the same form.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.common import workloads
from benchmarks.common.output import arguments_of, command, show
from benchmarks.common.policies import add_policy_options, parse_policies
from benchmarks.common.repeats import add_repeats
from benchmarks.common.serving import Runtimes
from benchmarks.http.load import Seen, send
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.workload import WorkloadItem

Play = Callable[[Sequence[WorkloadItem], Sequence[float]], list[Seen]]


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the result; return the exit code."""
    return command(run, build_parser().parse_args(arguments), show_result=_print_table)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both ways for each number of connections."""
    from benchmarks.common import environment
    from jaxserve.server import ServerOptions, running

    counts = [int(text) for text in options.connections.split(",")]
    points = []
    with Runtimes(options) as open_runtimes:
        rt = open_runtimes.open(parse_policies(options.policies)[0])
        items = workloads.items(options, rt)
        serving = ServerOptions(
            model_name="model", port=0, max_waiting=2 * max(counts), log_requests=False
        )
        with running(rt, serving) as url:
            ways: dict[str, Play] = {
                "in process": lambda items, arrivals: _in_process(rt, items, arrivals),
                "http": lambda items, arrivals: _over_http(url, items, arrivals),
            }
            if options.peer:
                ways["completions"] = _completions(url, "model")
            for name, peer in options.peer:
                ways[name] = _completions(*peer)
            for play in ways.values():  # what is slow only once
                play(items[:2], [0.0] * min(2, len(items)))
            for count in counts:
                points.append(_point(ways, items, count, options))
    return {
        "benchmark": "http",
        "arguments": arguments_of(options),
        "repeats": options.repeats,
        "points": points,
        **environment.describe(),
    }


def _point(
    ways: dict[str, Play], items: list[WorkloadItem], count: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures for a number of requests, both ways in turns."""
    asked = [items[i % len(items)] for i in range(count)]
    found: dict[str, dict[str, list[Any]]] = {way: {"at_once": [], "poisson": []} for way in ways}
    for repeat in range(options.repeats):
        for way, play in ways.items():
            print(f"{count} requests, {way}, run {repeat + 1}", file=sys.stderr)
            found[way]["at_once"].append(_figures(play(asked, [0.0] * count), [0.0] * count))
        rate = 0.5 * found["in process"]["at_once"][-1]["requests_per_s"]
        rng = np.random.default_rng(options.seed + repeat)
        arrivals = np.cumsum(rng.exponential(1 / rate, count)).tolist()
        for way, play in ways.items():
            found[way]["poisson"].append(_figures(play(asked, arrivals), arrivals))
    ours, base = found["http"], found["in process"]
    share = [
        one["tokens_per_s"] / other["tokens_per_s"]
        for one, other in zip(ours["at_once"], base["at_once"], strict=True)
    ]
    later = [
        one["first_token_s"]["p50"] - other["first_token_s"]["p50"]
        for one, other in zip(ours["poisson"], base["poisson"], strict=True)
    ]
    peers = {name: runs for name, runs in found.items() if name not in ("in process", "http")}
    return {
        "connections": count,
        "runs": found,
        "peers_tokens_per_s": {
            name: median(run["tokens_per_s"] for run in runs["at_once"])
            for name, runs in peers.items()
        },
        "throughput_share": {"median": median(share), "range": [min(share), max(share)]},
        "first_token_later_s": {"median": median(later), "range": [min(later), max(later)]},
    }


def _figures(seen: list[Seen], arrivals_s: Sequence[float]) -> dict[str, Any]:
    wall_s = max(arrival + one.end_s for arrival, one in zip(arrivals_s, seen, strict=True))
    gaps = [b - a for one in seen for a, b in zip(one.times_s, one.times_s[1:], strict=False)]
    return {
        "wall_s": wall_s,
        "requests_per_s": len(seen) / wall_s,
        "tokens_per_s": sum(one.num_tokens for one in seen) / wall_s,
        "first_token_s": _percentiles([one.times_s[0] for one in seen]),
        "between_events_s": _percentiles(gaps) if gaps else None,
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(seconds, q)) for q in (50, 99)}


def _params(item: WorkloadItem) -> dict[str, Any]:
    return {"max_tokens": item.num_output_tokens, "ignore_eos": True, "temperature": 0.0}


def _over_http(url: str, items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[Seen]:
    bodies = [
        {
            "token_ids": list(map(int, item.prompt_token_ids)),
            "sampling_params": _params(item),
            "stream": True,
        }
        for item in items
    ]
    return send(url, bodies, arrivals_s)


def _completions(url: str, model: str) -> Play:
    """Return a way over a server's `/v1/completions`, as vLLM and llama.cpp have it, too."""

    def play(items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[Seen]:
        bodies = [
            {
                "model": model,
                "prompt": list(map(int, item.prompt_token_ids)),
                **_params(item),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for item in items
        ]
        return send(url, bodies, arrivals_s, "/v1/completions")

    return play


def _peer(text: str) -> tuple[str, tuple[str, str]]:
    """Return a server's name, and its address and model."""
    name, _, rest = text.partition("=")
    url, _, model = rest.partition(",")
    if not name or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a server; pass NAME=http://HOST:PORT,MODEL"
        )
    return name, (url, model or "model")


def _in_process(rt: Any, items: Sequence[WorkloadItem], arrivals_s: Sequence[float]) -> list[Seen]:
    """Submit each request at its time, on this thread."""
    begun_s = time.perf_counter() + 0.1
    seen = [Seen([], 0, 0.0) for _ in items]
    ended = threading.Semaphore(0)

    def sink(one: Seen, at_s: float) -> Callable[[Piece], None]:
        def take(piece: Piece) -> None:
            now_s = time.perf_counter() - at_s
            if piece.token_ids:
                one.times_s.append(now_s)
                one.num_tokens += len(piece.token_ids)
            if piece.finish_reason is not None:
                one.end_s = now_s
                ended.release()

        return take

    for item, arrival_s, one in zip(items, arrivals_s, seen, strict=True):
        at_s = begun_s + arrival_s
        time.sleep(max(0.0, at_s - time.perf_counter()))
        rt.submit(item.prompt_token_ids, SamplingParams(**_params(item)), on_piece=sink(one, at_s))
    for _ in items:
        ended.acquire()
    return seen


def _print_table(result: dict[str, Any]) -> None:
    table = Table(
        "connections", "way", "requests/s", "tokens/s", "first token p50 ms", "p99",
        "between events p50 ms", "p99", box=None, header_style="bold",
    )  # fmt: skip
    for point in result["points"]:
        for way, runs in point["runs"].items():
            at_once, poisson = runs["at_once"][0], runs["poisson"][0]
            first, gaps = poisson["first_token_s"], poisson["between_events_s"]
            table.add_row(
                str(point["connections"]),
                way,
                f"{at_once['requests_per_s']:.3g}",
                f"{at_once['tokens_per_s']:.0f}",
                f"{first['p50'] * 1e3:.1f}",
                f"{first['p99'] * 1e3:.1f}",
                f"{gaps['p50'] * 1e3:.1f}" if gaps else "",
                f"{gaps['p99'] * 1e3:.1f}" if gaps else "",
            )
        table.add_section()
    show(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.http",
        description="Requests over HTTP from another process beside the same requests in process. "
        "The client shares this machine's cores with the server. Prints a table and JSON.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--connections", default="1,64,1000", help="numbers of requests, each on its connection")
    add(
        "--peer", type=_peer, action="append", default=[], metavar="NAME=URL,MODEL",
        help="a server with OpenAI's completions that runs already, such as vLLM's or llama.cpp's",
    )  # fmt: skip
    workloads.add_arguments(parser)
    add_repeats(parser, "way at every number of connections")
    add_policy_options(parser, policies="auto", max_context=1024)
    return parser


if __name__ == "__main__":
    sys.exit(main())
