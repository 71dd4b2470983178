"""What HTTP costs over the same requests in process: `python -m benchmarks.http --help`.

The requests come from another process, each on its own connection, and stream tokens. They first
arrive all at once, for throughput; then as Poisson arrivals, for latencies. Their rate is the same
for every way: half of the requests a second that our engine answers in process. The same client
also sends requests over bare sockets, since it takes a share of the machine with any server. With
`--compare` and `--peer`, it sends the same prompts to other servers, and to this one in the same
form. No two requests to a server have the same prompt. Looking for thinking and calls of tools is
measured by itself, as a share of the CPU time that this process takes for a token.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from benchmarks.common import workloads
from benchmarks.common.harness import Benchmark, option, whole_numbers
from benchmarks.common.policies import policy_options
from benchmarks.common.processes import PeerError
from benchmarks.common.repeats import Figures, repeats, summary
from benchmarks.common.serving import Runtimes
from benchmarks.http import reading
from benchmarks.http.load import percentiles, phases
from benchmarks.http.peers.servers import PEERS, named, started
from benchmarks.http.ways import (
    DistinctPrompts,
    Way,
    bare_socket,
    completions_of,
    of_ours,
)
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.registry import resolve
from jaxserve.workload import WorkloadItem
from jaxserve.workload.load import TimedAnswer

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

# Poisson arrivals as a share of the requests a second that are answered in process, all at once.
LOAD = 0.5

OURS = ("in process", "socket", "http", "completions")
# Seconds after an answer within which the engine has recorded its request.
_RECORDED_WITHIN_S = 10.0


def run(options: argparse.Namespace) -> dict[str, Any]:
    from jaxserve.server import ServerOptions, running

    peers = named(options.compare)
    model = resolve(options.model)
    if peers and model.kind != "gguf":
        raise InvalidConfigError(
            f"--compare: servers get the weights of a GGUF file, and --model {options.model} has "
            "none; pass a registered name or such a file"
        )
    counts = whole_numbers(options.connections, "--connections")
    most = max(counts)
    if options.num_requests is None and not workloads.is_recorded(options):
        options.num_requests = most
    with Runtimes(options) as open_runtimes:
        rt = open_runtimes.open()
        items = workloads.items(options, rt)
        serving = ServerOptions(
            model_name="model",
            port=0,
            max_waiting=2 * most,
            max_connections=2 * most + 64,
            log_requests=False,
        )
        with (
            bare_socket(rt) as socket_url,
            running(rt, serving) as url,
            started(
                peers,
                model.fetch(),
                _asked(items, max(most, len(items))),
                batch_size=rt.config.max_slots,
            ) as servers,
        ):
            with_completions = bool(peers or options.peer)
            ways = of_ours(rt, socket_url, url, completions=with_completions)
            for name, (address, served) in options.peer:
                ways[name] = completions_of(address, served)
            for name, address in servers.urls.items():
                ways[name] = completions_of(address, "model", peers[name].fields)
            contest = _Contest(ways, DistinctPrompts(items), rt, servers.failed)
            contest.turn(items[:2], [0.0] * len(items[:2]))  # the first requests are slow
            read = reading.cpu_s_per_piece()
            points = [_point(contest, items, count, options, read) for count in counts]
    return {
        "points": points,
        "reading": read,
        "peers": {
            name: {
                "requirements": peer.environment.requirements,
                "startup_s": servers.startup_s.get(name),
            }
            for name, peer in peers.items()
        },
        "failed": contest.failed,
    }


def _asked(items: Sequence[WorkloadItem], count: int) -> list[WorkloadItem]:
    """Return `count` requests, starting again from the first if the workload has fewer."""
    return [items[i % len(items)] for i in range(count)]


def _point(
    contest: _Contest,
    items: Sequence[WorkloadItem],
    count: int,
    options: argparse.Namespace,
    read: Mapping[str, Figures],
) -> dict[str, Any]:
    """Return the figures for a number of requests, of all ways in turns."""
    asked = _asked(items, count)
    runs: dict[str, list[Figures]] = {name: [] for name in contest.ways}
    for repeat in range(options.repeats):
        print(f"{count} requests, run {repeat + 1} of {options.repeats}", file=sys.stderr)
        at_once = contest.turn(asked, [0.0] * count)
        rate = LOAD * at_once["in process"]["requests_per_s"]
        rng = np.random.default_rng(options.seed + repeat)
        arrivals_s = np.cumsum(rng.exponential(1 / rate, count)).tolist()
        poisson = contest.turn(asked, arrivals_s)
        for name, figures in poisson.items():
            figures["share_of_own_rate"] = rate / at_once[name]["requests_per_s"]
            runs[name].append({"at_once": at_once[name], "poisson": figures})
    http = runs["http"]
    return {
        "connections": count,
        "ways": {name: summary(each) for name, each in runs.items() if each},
        "costs": _costs(http, runs["in process"]),
        "costs_beside_socket": _costs(http, runs["socket"]),
        "share_of_reading": {
            kind: summary(
                [{"cpu": costs["cpu_s"] / run["at_once"]["cpu_s_per_token"]} for run in http]
            )
            for kind, costs in read.items()
        },
    }


def _costs(ours: Sequence[Figures], base: Sequence[Figures]) -> Figures:
    """Return the cost of HTTP over another way, in each run and in the middle one."""
    costs = []
    for both in zip(ours, base, strict=True):
        rates = [each["at_once"]["tokens_per_s"] for each in both]
        firsts = [each["poisson"]["first_token_s"]["p50"] for each in both]
        outside = [_outside_engine_s(each) for each in both]
        costs.append(
            {
                "throughput_share": rates[0] / rates[1],
                "first_token_later_s": firsts[0] - firsts[1],
                "outside_engine_s": outside[0],
                "outside_engine_later_s": outside[0] - outside[1],
            }
        )
    return summary(costs)


def _outside_engine_s(figures: Figures) -> float:
    """Return the mean seconds to the first token that are not the engine's."""
    parts = figures["poisson"]["phases"]
    return sum(part["mean"] for name, part in parts.items() if name != "engine_s")


@final
@dataclass(frozen=True)
class _Contest:
    """The ways that take turns.

    Attributes:
      prompts: makes the prompts of each turn, the same for all ways.
      rt: records how long its engine took for each request.
      failed: reasons why other servers no longer take part.
    """

    ways: Mapping[str, Way]
    prompts: DistinctPrompts
    rt: Runtime
    failed: dict[str, str]

    def turn(
        self, items: Sequence[WorkloadItem], arrivals_s: Sequence[float]
    ) -> dict[str, Figures]:
        """Return the figures of each way to answer requests that arrive at these seconds."""
        found, items = {}, self.prompts.of(items)
        for name, answer in self.ways.items():
            if name in self.failed:
                continue
            begun_s = time.process_time()
            try:
                seen = answer(items, arrivals_s)
            except PeerError as error:
                if name in OURS:
                    raise
                print(f"{name} failed: {error}", file=sys.stderr)
                self.failed[name] = str(error)
                continue
            found[name] = _figures(seen, arrivals_s)
            found[name]["phases"] = None
            if name in OURS:
                num_tokens = sum(one.num_tokens for one in seen)
                found[name]["cpu_s_per_token"] = (time.process_time() - begun_s) / num_tokens
                found[name]["phases"] = self._phases(seen)
        return found

    def _phases(self, seen: Sequence[TimedAnswer]) -> Figures:
        """Return the phases of our answers; the engine records the last ones a little later."""
        until_s = time.monotonic() + _RECORDED_WITHIN_S
        while (found := phases(seen, self.rt.report().requests)) is None:
            if time.monotonic() > until_s:
                raise RuntimeError("the engine has no record of an answer; report this")
            time.sleep(0.01)
        return found


def _figures(seen: Sequence[TimedAnswer], arrivals_s: Sequence[float]) -> Figures:
    wall_s = max(arrival + one.end_s for arrival, one in zip(arrivals_s, seen, strict=True))
    gaps = [b - a for one in seen for a, b in itertools.pairwise(one.times_s)]
    # The first event may also have several tokens; then this is less than the time of one token.
    each = [one.token_s for one in seen if one.token_s is not None]
    return {
        "wall_s": wall_s,
        "requests_per_s": len(seen) / wall_s,
        "tokens_per_s": sum(one.num_tokens for one in seen) / wall_s,
        "first_token_s": percentiles([one.times_s[0] for one in seen]),
        "token_s": percentiles(each),
        "between_events_s": percentiles(gaps),
    }


def _peer(text: str) -> tuple[str, tuple[str, str]]:
    """Return a server's name, and its address and model, for argparse."""
    name, _, rest = text.partition("=")
    url, _, model = rest.partition(",")
    if not name or not url.startswith("http://"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a server; pass NAME=http://HOST:PORT,MODEL"
        )
    if name in (*OURS, *PEERS):
        raise argparse.ArgumentTypeError(f"the name {name!r} is taken; pass another one")
    return name, (url, model or "model")


OPTIONS = (
    option("--connections", "1,64,1000", "numbers of requests, each on its connection"),
    option("--compare", "", f"servers to install, start and measure, too: {','.join(PEERS)}"),
    option(
        "--peer",
        [],
        "a server with OpenAI's completions that runs already",
        _peer,
        action="append",
        metavar="NAME=URL,MODEL",
    ),
    *workloads.options(many="as many as the largest number of connections"),
    repeats("way at every number of connections"),
    *policy_options("auto"),
)
main = Benchmark(__doc__, run, OPTIONS, "http")


if __name__ == "__main__":
    sys.exit(main())
