"""Bits of a request in any two batches: `python -m benchmarks.invariance --help`.

Requests are computed in random batches, by runtimes that cut them into steps differently. Tokens
and log-probabilities of a request must have the same bits in each of them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import numpy as np

from benchmarks.common import workloads
from benchmarks.common.counters import counters_of, since
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.policies import policy_options
from benchmarks.common.repeats import Figures, ratio, repeats, summary, take_turns
from benchmarks.common.serving import Runtimes, answered, raise_error
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.scheduling.presets import get_policy
from jaxserve.workload import WorkloadItem

if TYPE_CHECKING:
    from jaxserve.runtime import Runtime

_COSTS = ("ordinary", "deterministic")
_MOST_LISTED = 100


@final
@dataclass
class Requests:
    """Requests, their first answers, and where a later answer differs.

    Attributes:
      first: request -> its tokens and log-probabilities.
      different: way, request, and the first token that differs, or -1 if only log-probabilities do.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]
    first: dict[int, Completion] = field(default_factory=dict)
    different: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, items: list[WorkloadItem], seed: int) -> Requests:
        """Return the requests of a workload: greedy and drawn, some truncated or with penalties."""
        params = [
            SamplingParams(
                max_tokens=item.num_output_tokens,
                temperature=float(i % 3 > 0),
                top_p=0.9 if i % 4 == 1 else 1.0,
                top_k=40 if i % 4 == 2 else 0,
                repetition_penalty=1.1 if i % 5 == 3 else 1.0,
                presence_penalty=0.4 if i % 7 == 5 else 0.0,
                ignore_eos=True,
                seed=seed + i,
                logprobs=2,
            )
            for i, item in enumerate(items)
        ]
        return cls([list(item.prompt_token_ids) for item in items], params)

    def compare(self, rt: Runtime, chosen: list[int], way: str) -> int:
        """Compute some of the requests together; return the number that had an earlier answer."""
        done = rt.generate(
            [self.prompts[i] for i in chosen], [self.params[i] for i in chosen], progress=False
        )
        raise_error(done)
        num_pairs = 0
        for i, each in zip(chosen, done, strict=True):
            num_pairs += i in self.first
            before = self.first.setdefault(i, each)
            if (before.token_ids, before.logprobs) != (each.token_ids, each.logprobs):
                pairs = enumerate(zip(before.token_ids, each.token_ids, strict=False))
                token = next((place for place, (a, b) in pairs if a != b), -1)
                self.different.append({"way": way, "request": i, "token": token})
        return num_pairs


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.pairs < 1:
        raise InvalidConfigError(f"--pairs is {options.pairs}; it must be at least 1")
    own: dict[str, Any] = {"deterministic": True, "warmup": False}
    with Runtimes(options) as open_runtimes:
        rt = open_runtimes.open(**own)
        requests = Requests.of(workloads.items(options, rt), options.seed)
        runtimes = {
            "whole": rt,
            "short steps": open_runtimes.open(
                **own,
                max_step_tokens=max(32, rt.config.max_slots),
                max_decode_iterations=1,
                page_size=16,
            ),
            "small pool": open_runtimes.open(
                get_policy("pensieve"), **own, kv_memory=_small_pool(rt, requests)
            ),
            "speculating": open_runtimes.open(**own, speculation="lookup"),
        }
        ways = {
            way: _compared(each, requests, way, -(-options.pairs // len(runtimes)), options.seed)
            for way, each in runtimes.items()
        }
        scores, processed = _scored(rt, requests)
        cost = _cost(open_runtimes, options, requests)
    return {
        "num_requests": len(requests.prompts),
        "num_pairs": sum(each["num_pairs"] for each in ways.values()),
        "num_different": len(requests.different),
        "different": requests.different[:_MOST_LISTED],
        "ways": ways,
        "scores": scores,
        "processed_scores": processed,
        "cost": cost,
    }


def _small_pool(rt: Runtime, requests: Requests) -> int:
    """Return bytes for pages of the two longest requests, so that more requests are preempted."""
    stats = rt.stats()
    longest = max(
        len(prompt) + (each.max_tokens or 0)
        for prompt, each in zip(requests.prompts, requests.params, strict=True)
    )
    num_pages = 2 * -(-longest // stats.page_size) + 2
    return num_pages * (stats.pool_bytes // stats.num_pages)


def _compared(
    rt: Runtime, requests: Requests, way: str, num_pairs: int, seed: int
) -> dict[str, Any]:
    """Return the counts of one way, after the requested number of pairs of batches of a request."""
    rng = random.Random(f"{seed} {way}")
    before, begin_s = counters_of(rt.stats()), time.perf_counter()
    num_before, found, num_batches = len(requests.different), 0, 0
    count = len(requests.prompts)
    while found < num_pairs:
        if rng.random() < 0.3:
            rt.forget_kept_pages()
        chosen = rng.sample(range(count), rng.randint(1, min(count, 2 * rt.config.max_slots)))
        found += requests.compare(rt, chosen, way)
        num_batches += 1
        print(f"{way}: {found} of {num_pairs} pairs", file=sys.stderr)
    engine = since(before, counters_of(rt.stats()))
    names = ("num_preemptions", "num_pages_in", "num_recomputed", "num_prefix_hit")
    return {
        "num_batches": num_batches,
        "num_pairs": found,
        "num_different": len(requests.different) - num_before,
        "wall_s": time.perf_counter() - begin_s,
        **{name: engine[name] for name in names},
    }


def _scored(rt: Runtime, requests: Requests) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the number of answers whose `Runtime.score` differs from what sampling reported.

    The second result is that for the distributions that tokens were drawn from, where `score` has
    them.
    """
    answers = sorted(requests.first.items())
    whole = {i: [*requests.prompts[i], *each.token_ids] for i, each in answers}
    logprobs = {i: each.logprobs or () for i, each in answers}
    assert all(logprobs.values()), "every request asks for them"
    reported = [[token.logprob for token in logprobs[i]] for i in whole]
    drawn = [
        i
        for i in whole
        if requests.params[i].temperature and not requests.params[i].presence_penalty
    ]
    processed = [rt.score(whole[i], requests.params[i]) for i in drawn]
    drawn_from = [[token.processed_logprob for token in logprobs[i]] for i in drawn]
    scores = rt.score(list(whole.values()))
    return _differing(scores, reported), _differing(processed, drawn_from)


def _differing(scores: list[np.ndarray], reported: list[list[float]]) -> dict[str, Any]:
    """Compare the ends of scores, which belong to the answers, with the reported values."""
    most, num_different = 0.0, 0
    for score, each in zip(scores, reported, strict=True):
        own, wanted = score[len(score) - len(each) :], np.array(each, np.float32)
        num_different += not np.array_equal(own, wanted)
        most = max(most, float(np.abs(own - wanted).max()))
    return {"num_answers": len(scores), "num_different": num_different, "largest_difference": most}


def _cost(
    open_runtimes: Runtimes, options: argparse.Namespace, requests: Requests
) -> dict[str, Any]:
    runtimes = {
        name: open_runtimes.open(deterministic=name == "deterministic", warmup=False)
        for name in _COSTS
    }

    def play(name: str) -> Figures:
        return answered(runtimes[name], requests.prompts, requests.params)[0]

    take_turns(_COSTS, 1, play)  # compiles
    found = take_turns(_COSTS, options.repeats, play)
    return {
        **{name: summary(runs) for name, runs in found.items()},
        "throughput_share": ratio(found, "tokens_per_s", *reversed(_COSTS)),
    }


def _is_whole(result: dict[str, Any]) -> bool:
    scores = (result["scores"], result["processed_scores"])
    return not (result["num_different"] or any(each["num_different"] for each in scores))


OPTIONS = (
    *workloads.options(output_tokens=24),
    option("--pairs", 2000, "pairs of batches of a request that are compared"),
    repeats("mode"),
    *policy_options("auto"),
)
main = Benchmark(__doc__, run, OPTIONS, "invariance", is_whole=_is_whole)


if __name__ == "__main__":
    sys.exit(main())
