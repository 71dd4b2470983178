"""Which states of recurrent layers to keep, simulated: `python -m benchmarks.conversations.states`.

Conversations, agents, and questions about documents, on the shape of a hybrid model: our retention
of states beside Marconi's, a grid, and none, each with the same pool, and with `--host-states` on
the host. The real scheduler makes every decision; the step times are those of a roofline.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
from tqdm import tqdm

from benchmarks.common.harness import Benchmark, numbers, option, some_of, whole_numbers
from benchmarks.common.repeats import Figures, repeats, summary
from jaxserve.core.request import Completion
from jaxserve.execution.step_cost import StepWork
from jaxserve.memory.cached_page import PageKeys
from jaxserve.memory.snapshots import Grid, LearnedReuse, Marconi, StateRetention
from jaxserve.planning import simulate
from jaxserve.planning.schedules import CLUSTERS
from jaxserve.planning.step_roofline import ModelShape, RooflineCost
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import DeviceOnly, Tiered
from jaxserve.workload.conversations import Talk, Talks, UserTurn

_PAGE_TOKENS, _MAX_CONTEXT, _MAX_SLOTS = 32, 32_768, 16
# The pages hold many more tokens than the states of any pool here, so that states decide.
_POOL_TOKENS = 400_000
_LONGEST, _MAX_TURNS = 1024, 20


# ---- models ----


@final
@dataclass(frozen=True, kw_only=True)
class HybridCost:
    """The step times of a model whose layers of attention are `steps.model.num_layers`.

    Each row reads and writes its state once an iteration, and each copy of a state once.
    """

    steps: RooflineCost

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        plan = work.plan
        num_copies = len(plan.saves) + len(plan.restores) + len(plan.rows) * len(work.decoded)
        moved = 2 * self.steps.state_bytes * num_copies
        return self.steps.device_s(work) + moved / self.steps.roofs.memory_bytes_per_s

    @property
    def state_tokens(self) -> float:
        """The tokens whose keys and values take as many bytes as a state."""
        return self.steps.state_bytes / self.steps.model.kv_bytes_per_token


def _cost(state_bytes: float, **shape: Any) -> HybridCost:
    cluster = CLUSTERS["A100"]
    steps = RooflineCost(
        model=ModelShape(**shape),
        roofs=cluster.roofs,
        page_tokens=_PAGE_TOKENS,
        efficiency=cluster.compute_efficiency,
        state_bytes=state_bytes,
    )
    return HybridCost(steps=steps)


SHAPES = {
    # 29 of 32 layers are Mamba-2, of 128 heads of 64 channels and 128 numbers each, in float32.
    "bamba-9b": _cost(
        29 * 128 * 64 * 128 * 4, num_params=9.8e9, num_layers=3, hidden_size=4096, group_size=4
    ),
    # 24 of 32 layers are gated delta rules, of 32 heads of 128 x 128 numbers, in float32.
    "qwen3.5-like": _cost(
        24 * 32 * 128 * 128 * 4, num_params=9e9, num_layers=8, hidden_size=4096, group_size=4
    ),
}


# ---- workloads ----


def _lengths(rng: np.random.Generator, mean: float, num: int) -> list[int]:
    drawn = rng.lognormal(math.log(mean) - 0.5, 1.0, num)
    return np.clip(np.ceil(drawn), 1, _LONGEST).astype(int).tolist()


def _tokens(rng: np.random.Generator, num: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, 1 << 30, num).tolist())


def _talk(
    rng: np.random.Generator,
    begin: tuple[int, ...],
    num_turns: int,
    arrival_s: float,
    *,
    question: float,
    answer: float,
    reactions_s: Iterable[float],
) -> Talk:
    """Return a conversation whose first question follows the tokens of `begin`."""
    own = zip(
        _lengths(rng, question, num_turns),
        _lengths(rng, answer, num_turns),
        reactions_s,
        strict=True,
    )
    turns = [
        UserTurn(token_ids=_tokens(rng, asked), num_output_tokens=told, reaction_s=float(pause_s))
        for asked, told, pause_s in own
    ]
    turns[0] = replace(turns[0], token_ids=begin + turns[0].token_ids)
    return Talk(turns=tuple(turns), arrival_s=arrival_s)


def conversations(rng: np.random.Generator, num: int) -> list[Talk]:
    """Return conversations with one of four system prompts, and a minute between two turns."""
    systems = [_tokens(rng, 1024) for _ in range(4)]
    talks, begin_s = [], 0.0
    while sum(len(talk.turns) for talk in talks) < num:
        num_turns = min(int(rng.geometric(1 / 5.3)), _MAX_TURNS)
        pauses_s = 60 * rng.standard_exponential(num_turns)
        system = systems[rng.integers(4)]
        talks.append(
            _talk(rng, system, num_turns, begin_s, question=77, answer=300, reactions_s=pauses_s)
        )
        begin_s += 5.3 * rng.standard_exponential()
    return talks


def agents(rng: np.random.Generator, num: int) -> list[Talk]:
    """Return three attempts at each task, with one of two descriptions of tools, and short pauses.

    An attempt has eight turns on average, each after a tool of two seconds (median).
    """
    tools = [_tokens(rng, 3000) for _ in range(2)]
    talks, begin_s = [], 0.0
    while sum(len(talk.turns) for talk in talks) < num:
        task = tools[rng.integers(2)] + _tokens(rng, _lengths(rng, 600, 1)[0])
        for _ in range(3):
            num_turns = min(int(rng.geometric(1 / 8)), _MAX_TURNS)
            pauses_s = 2 * rng.lognormal(0.0, 1.0, num_turns)
            at_s = begin_s + rng.standard_exponential()
            talks.append(
                _talk(rng, task, num_turns, at_s, question=400, answer=80, reactions_s=pauses_s)
            )
        begin_s += 15 * rng.standard_exponential()
    return talks


def documents(rng: np.random.Generator, num: int) -> list[Talk]:
    """Return questions, one a second, about sixteen documents, of which some are asked more."""
    sizes = np.clip(rng.lognormal(math.log(6000), 0.5, 16), 1000, 20_000).astype(int)
    texts = [_tokens(rng, int(size)) for size in sizes]
    shares = 1 / np.arange(1, 17)
    chosen = rng.choice(16, num, p=shares / shares.sum())
    times_s = np.cumsum(rng.standard_exponential(num))
    return [
        _talk(rng, texts[text], 1, float(at_s), question=50, answer=100, reactions_s=(0.0,))
        for text, at_s in zip(chosen, times_s, strict=True)
    ]


WORKLOADS: dict[str, Callable[[np.random.Generator, int], list[Talk]]] = {
    draw.__name__: draw for draw in (conversations, agents, documents)
}


# ---- runs ----


def run(options: argparse.Namespace) -> dict[str, Any]:
    shapes = some_of(options.shapes, "--shapes", SHAPES)
    workloads = some_of(options.workloads, "--workloads", WORKLOADS)
    pools = whole_numbers(options.states, "--states")
    cases = [(s, w, num) for s in shapes for w in workloads for num in pools]
    with tqdm(total=len(cases), unit="case", leave=False, delay=2) as bar:
        rows = []
        for shape, workload, num_states in cases:
            bar.set_postfix_str(f"{shape}, {workload}, {num_states} states")
            policies = _policies(SHAPES[shape], workload, num_states, options)
            about = {"shape": shape, "workload": workload, "num_states": num_states}
            rows.append({**about, "policies": policies})
            bar.update()
    return {"rows": rows}


def _policies(
    cost: HybridCost, workload: str, num_states: int, options: argparse.Namespace
) -> Mapping[str, Figures]:
    def runs(states: StateRetention | None, **about: float) -> list[Figures]:
        seeds = range(options.repeats)
        return [{**_play(cost, workload, num_states, states, options, s), **about} for s in seeds]

    weights = numbers(options.weights, "--weights")
    marconis = [
        runs(Marconi(weight=weight, state_tokens=cost.state_tokens), weight=weight)
        for weight in weights
    ]
    found = {
        "ours": runs(LearnedReuse()),
        "marconi": max(marconis, key=lambda own: sum(each["hit"] for each in own)),
        "grid": runs(Grid(options.grid)),
        "none": runs(None),
    }
    return {name: summary(own) for name, own in found.items()}


def _play(
    cost: HybridCost,
    workload: str,
    num_states: int,
    states: StateRetention | None,
    options: argparse.Namespace,
    seed: int,
) -> Figures:
    talks = Talks(WORKLOADS[workload](np.random.default_rng(seed), options.num_requests))
    has_host = states is not None and options.host_states > 0
    num_pages = _POOL_TOKENS // _PAGE_TOKENS
    config = replace(
        cost.steps.config(
            num_pages=num_pages,
            num_host_pages=num_pages if has_host else 0,
            max_slots=_MAX_SLOTS,
            max_context=_MAX_CONTEXT,
        ),
        has_slot_state=True,
        num_snapshots=0 if states is None else num_states,
        num_host_snapshots=options.host_states if has_host else 0,
    )
    kind = Tiered if has_host else DeviceOnly
    retention = kind() if states is None else kind(states=states)
    done = simulate(
        talks.items,
        replace(PRESETS["pensieve_device_only"], retention=retention),
        config,
        cost,
        follow_up=talks.follow_up,
        swap_costs=cost.steps.swap_costs(),
        progress=False,
    )
    firsts_s = [each.timing.time_to_first_token_s or 0.0 for each in done.completions]
    num_prompt = sum(len(each.prompt_token_ids) for each in done.completions)
    return {
        "hit": sum(each.num_cached_tokens for each in done.completions) / num_prompt,
        "recomputed_tokens": num_recomputed(done.completions),
        "first_token_s": {f"p{level}": float(np.percentile(firsts_s, level)) for level in (50, 99)},
        "num_snapshots_saved": done.stats.num_snapshots_saved,
        "num_snapshots_restored": done.stats.num_snapshots_restored,
        "num_snapshots_out": done.stats.num_snapshots_out,
        "num_snapshots_in": done.stats.num_snapshots_in,
    }


def num_recomputed(completions: Iterable[Completion]) -> int:
    """Return the prompt tokens that were computed although an earlier request had the same.

    Whole pages count. The last token of a prompt is computed in any case.
    """
    seen: set[bytes] = set()
    num = 0
    for each in sorted(completions, key=lambda each: each.timing.arrival_s):
        tokens = (*each.prompt_token_ids, *each.token_ids)
        keys = PageKeys().of(tokens, _PAGE_TOKENS, b"")
        num_seen = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        known = min(num_seen * _PAGE_TOKENS, len(each.prompt_token_ids) - 1)
        num += max(0, known - each.num_cached_tokens)
        seen.update(keys)
    return num


OPTIONS = (
    option("--shapes", ",".join(SHAPES), "shapes of models, separated by commas"),
    option("--workloads", ",".join(WORKLOADS), "separated by commas"),
    option("--states", "4,8,32", "states that a pool holds, separated by commas"),
    option("--host-states", 0, "states that the host holds beside these, with as many pages"),
    option("--grid", 512, "tokens between two states of the grid"),
    option("--weights", "0.1,0.5,2", "Marconi's weights; the one that finds the most is shown"),
    option("--num-requests", 240, "of each run; turns count each"),
    repeats("retention, with other requests", 3),
)
main = Benchmark(__doc__, run, OPTIONS, "states")


if __name__ == "__main__":
    sys.exit(main())
