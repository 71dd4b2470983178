"""Two replicas with roles against two plain ones: `python -m benchmarks.roles MODEL`.

Both fleets answer the same random prompts with the same arrivals. Times are the caller's, from the
submission on, so that they include transfers between replicas. Each run starts its own fleet, since
the fleets may need the same devices. It needs the extra `fleet`, and devices for two replicas.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from benchmarks.common import environment
from benchmarks.common.harness import Benchmark, option
from benchmarks.common.repeats import Figures, repeats, summary, take_turns
from benchmarks.common.serving import raise_error
from jaxserve.core.metrics import spread
from jaxserve.engine.answers import Piece
from jaxserve.workload import WorkloadItem, random_items
from jaxserve.workload.items import with_arrivals

if TYPE_CHECKING:
    from jaxserve import Fleet


# Arguments of `Fleet`, by the name of the contender.
CONTENDERS: dict[str, dict[str, Any]] = {
    "roles": {"roles": {"prefill": 1, "decode": 1}},
    "whole": {"replicas": 2},
}


def run(options: argparse.Namespace) -> dict[str, Any]:
    from jaxserve import Fleet

    answers = []

    def play(name: str) -> Figures:
        with Fleet(options.model, progress=False, **CONTENDERS[name], **options.settings) as fleet:
            figures, tokens = _measured(fleet, options)
        answers.append(tokens)
        return figures

    runs = take_turns(list(CONTENDERS), options.repeats, play)
    return {
        "same_tokens": all(tokens == answers[0] for tokens in answers),
        "fleets": {name: summary(of_one) for name, of_one in runs.items()},
        **environment.describe("ray"),
    }


def _measured(fleet: Fleet, options: argparse.Namespace) -> tuple[Figures, list[Any]]:
    """Return the figures of one run, and the tokens of its answers."""

    def drawn(count: int, seed: int) -> list[WorkloadItem]:
        return random_items(
            count,
            num_prompt_tokens=options.prompt_tokens,
            num_output_tokens=options.output_tokens,
            vocab_size=fleet.vocab_size,
            seed=seed,
        )

    items = with_arrivals(drawn(options.num_requests, options.seed), options.arrivals, options.seed)
    # Other prompts first, one for each replica, so that no first step is measured.
    warm = drawn(2, options.seed + 1)
    fleet.generate([list(item.prompt_token_ids) for item in warm], [item.params() for item in warm])
    before = fleet.stats()

    def sink(at_s: list[float]) -> Callable[[Piece], None]:
        begin_s = time.perf_counter()

        def add(piece: Piece) -> None:
            if piece.token_ids:
                at_s.append(time.perf_counter() - begin_s)

        return add

    begin_s = time.perf_counter()
    times: list[list[float]] = [[] for _ in items]
    submitted = []
    for item, at_s in zip(items, times, strict=True):
        time.sleep(max(0.0, begin_s + item.arrival_s - time.perf_counter()))
        prompt = list(item.prompt_token_ids)
        submitted.append(fleet.submit(prompt, item.params(), on_piece=sink(at_s)))
    done = [pending.result() for pending in submitted]
    wall_s = time.perf_counter() - begin_s
    raise_error(done)
    after = fleet.stats()
    return {
        "wall_s": wall_s,
        "output_tokens_per_s": sum(len(each.token_ids) for each in done) / wall_s,
        "first_token_s": spread([each[0] for each in times]),
        "latency_s": spread([each[-1] for each in times]),
        "gap_s": spread([b - a for each in times for a, b in itertools.pairwise(each)]),
        "tokens_sent": after.num_prefix_hit_on_host - before.num_prefix_hit_on_host,
    }, [each.token_ids for each in done]


OPTIONS = (
    option("model", "smollm2-135m", "a name, folder or GGUF file"),
    option("settings", {}, "JSON of further `Fleet` settings", json.loads),
    option("--num-requests", 64, "requests of a run"),
    option("--prompt-tokens", 512, "tokens of each prompt"),
    option("--output-tokens", 64, "tokens of each answer"),
    option("--arrivals", "poisson:2", "all, constant:S or poisson:R, per second"),
    option("--seed", 0, "of prompts and arrivals"),
    repeats("fleet"),
)
main = Benchmark(__doc__, run, OPTIONS, "roles")


if __name__ == "__main__":
    sys.exit(main())
