"""Figures 4 to 7 of the Flover paper, measured: `python -m benchmarks.flover --help`.

Section VI with every time scaled to this model: the paper's milliseconds are relative to the 5,800
ms that one request takes there, and lengths relative to its 512 tokens. A repeat takes about a
quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import (
    REQUEST_LEVEL_AND_ITERATION_LEVEL,
    VARIANTS,
    parse_policies,
    policy_options,
)
from benchmarks.common.repeats import Figures, repeats, summary, take_turns
from benchmarks.common.serving import Runtimes, measure
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.scheduling.iteration.request_level import Static
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload import WorkloadItem, random_items
from jaxserve.workload.items import with_arrivals

# The paper's request alone (figure 5), its interval (VI-B), the mean intervals of figure 5 that are
# played here, and the windows of dynamic batching (VI-E): milliseconds.
PAPER_ALONE_MS = 5800
PAPER_INTERVAL_MS = 500
POISSON_MS = (50, 500, 2000)
WINDOWS_MS = (2000, 8000, 16000)
# Shortest answer and longest answers of figure 6, as shares of the fixed length elsewhere.
SHORTEST = 0.25
LONGEST = (0.5, 1.0, 2.0)
WITHOUT_SHUFFLE = VARIANTS["flover_without_shuffle"]


@final
class SectionVI:
    """A runtime for every policy, and the paper's workloads for them.

    Attributes:
      alone_s: seconds of one request alone (median of three), to which all times are relative.
    """

    def __init__(self, options: argparse.Namespace, runtimes: Runtimes, policies: Sequence[Policy]):
        self._options = options
        unshuffled = runtimes.open(WITHOUT_SHUFFLE)
        self._vocab_size = unshuffled.model_config.vocab_size
        alone = [
            measure(unshuffled, self._items(1), label="one request alone")[0]["latency_s"]["p50"]
            for _ in range(3)
        ]
        self.alone_s = statistics.median(alone)
        self._names = [policy.name for policy in policies]
        self._windows = () if options.quick else WINDOWS_MS
        self._runtimes = {WITHOUT_SHUFFLE.name: unshuffled}
        for policy in [*map(self._scaled, policies), *map(self._window, self._windows)]:
            if policy.name not in self._runtimes:
                self._runtimes[policy.name] = runtimes.open(policy)

    def seconds(self, paper_ms: float) -> float:
        """Return the paper's time in seconds of this machine."""
        return paper_ms / PAPER_ALONE_MS * self.alone_s

    def play(self) -> dict[str, list[Figures]]:
        """Return the figures by part, point and policy; see `summary`."""
        most, num_tokens = self._options.max_requests, self._options.output_tokens
        counts = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
        constant = f"constant:{self.seconds(PAPER_INTERVAL_MS)}"
        names = self._names
        shuffles = list(dict.fromkeys([*names, WITHOUT_SHUFFLE.name]))
        lengths = [(round(SHORTEST * num_tokens), round(b * num_tokens)) for b in LONGEST]
        windows = {
            self._window(ms).name: {"paper_ms": ms, "window_s": self.seconds(ms)}
            for ms in self._windows
        }
        return {
            "constant": [
                {**point, "num_requests": count}
                for count in counts
                for point in self._points(names, self._items(count), constant, count == most)
            ],
            "poisson": [
                {**point, "paper_ms": ms, "mean_interval_s": self.seconds(ms)}
                for ms in POISSON_MS
                for point in self._points(
                    names, self._items(most), f"poisson:{1 / self.seconds(ms)}"
                )
            ],
            "uniform": [
                {**point, "shortest": shortest, "longest": longest}
                for shortest, longest in lengths
                for point in self._points(shuffles, self._items(most, shortest, longest), constant)
            ],
            "windows": [
                {**point, **windows[point["policy"]]}
                for point in self._points(list(windows), self._items(most), constant, True)
            ],
        }

    def _points(
        self,
        names: Sequence[str],
        items: Sequence[WorkloadItem],
        pattern: str,
        keeps_timeline: bool = False,
    ) -> list[Figures]:
        """Play one workload against every policy in turns; a point for each of them.

        Args:
          keeps_timeline: add `requests`: when each request of the run of median length arrived,
            had its first token, and ended.
        """
        arriving = with_arrivals(items, pattern, self._options.seed)

        def play(name: str) -> tuple[Figures, list[Completion]]:
            figures, done = measure(self._runtimes[name], arriving, label=name)
            return {**figures, "overlap": overlap(done)}, done

        at = f"{len(items)} requests, {pattern}"
        points = []
        for name, runs in take_turns(names, self._options.repeats, play, at=at).items():
            points.append({"policy": name, **summary([figures for figures, _ in runs])})
            if keeps_timeline:
                ordered = sorted(runs, key=lambda run: run[0]["wall_s"])
                points[-1]["requests"] = timeline(ordered[(len(runs) - 1) // 2][1])
        return points

    def _items(
        self, count: int, shortest: int | None = None, longest: int | None = None
    ) -> list[WorkloadItem]:
        return random_items(
            count,
            num_prompt_tokens=self._options.prompt_tokens,
            num_output_tokens=longest or self._options.output_tokens,
            min_output_tokens=shortest,
            vocab_size=self._vocab_size,
            seed=self._options.seed,
        )

    def _scaled(self, policy: Policy) -> Policy:
        if not isinstance(policy.iteration, Static):
            return policy
        window_s = self.seconds(1000 * policy.iteration.window_s)
        return replace(policy, iteration=Static(window_s=window_s))

    def _window(self, paper_ms: float) -> Policy:
        iteration = Static(window_s=self.seconds(paper_ms))
        name = f"window_{paper_ms}ms"
        return replace(PRESETS["triton_window"], name=name, iteration=iteration)


def overlap(done: Sequence[Completion]) -> float:
    """Mean share of the requests that run at once, from the first start to the last end."""
    spans = [
        (item.timing.admitted_s, item.timing.finished_s)
        for item in done
        if item.timing.admitted_s is not None and item.timing.finished_s is not None
    ]
    whole_s = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return sum(end - begin for begin, end in spans) / whole_s / len(spans)


def timeline(done: Sequence[Completion]) -> list[dict[str, Any]]:
    """Return tokens and times of each request: seconds from the first arrival of all."""
    origin_s = min(item.timing.arrival_s for item in done)
    return [
        {
            "num_output_tokens": len(item.token_ids),
            "arrival_s": item.timing.arrival_s - origin_s,
            "first_token_s": (item.timing.first_token_s or origin_s) - origin_s,
            "finished_s": (item.timing.finished_s or origin_s) - origin_s,
        }
        for item in done
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.quick:
        options.max_requests, options.output_tokens, options.repeats = 4, 8, 1
    if options.max_requests < 1 or options.output_tokens < 8:
        raise InvalidConfigError(
            f"max_requests={options.max_requests} and output_tokens={options.output_tokens}; "
            "give at least one request and 8 tokens"
        )
    policies = parse_policies(options.policies)
    options.max_context = options.prompt_tokens + round(max(LONGEST) * options.output_tokens)
    with Runtimes(options) as runtimes:
        section = SectionVI(options, runtimes, policies)
        parts = section.play()
    return {"alone_s": section.alone_s, "interval_s": section.seconds(PAPER_INTERVAL_MS), **parts}


OPTIONS = (
    option("--max-requests", 32, "1, 2, 4, ... up to this many"),
    option("--prompt-tokens", 16, "of each prompt"),
    option("--output-tokens", 32, "of each answer; the paper has 512"),
    option("--seed", 0, "of prompts, lengths and arrivals"),
    option("--quick", False, "4 requests of 8 tokens, once"),
    repeats("policy"),
    *policy_options(REQUEST_LEVEL_AND_ITERATION_LEVEL, max_context=None),
)
main = Benchmark(__doc__, run, OPTIONS, "flover")


if __name__ == "__main__":
    sys.exit(main())
