"""Bytes that sharding plans send, and bubbles of stages: `python -m benchmarks.sharding --help`.

Prints for each plan the bytes that a decode iteration sends and the least that the
plan allows, the bubbles of a stage plan's pipeline and the ideal, and step times. Times mean
nothing on forced host devices, which share the cores of the processor; counts and ratios hold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, final

from benchmarks.common.harness import Benchmark, option

if TYPE_CHECKING:
    from jaxserve.execution.staged import Pass
    from jaxserve.models.families.llama import LlamaConfig
    from jaxserve.runtime import Runtime
    from jaxserve.sharding import StagePlan


_OP = re.compile(
    r"= (?P<shapes>[^=]*?) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r"(?P<rest>.*)"
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<sizes>[\d,]*)\]")
_BITS = {"pred": 8}
_VOCAB_SIZE, _HOST_DEVICES = 2048, 8


@final
@dataclass(frozen=True)
class Collective:
    """One operation between devices.

    Attributes:
      kind: its name in HLO, e.g. "all-reduce".
      shapes: of its results on one device.
      num_bytes: of these results.
      in_branch: whether it is in a branch of a `lax.cond`, and so runs in some steps only.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    in_branch: bool


def collectives_of(executable: Any) -> list[Collective]:
    """Return the collectives of a compiled function, each once, also inside a loop."""
    return [_collective(match) for match in _OP.finditer(executable.as_text())]


def _collective(match: re.Match[str]) -> Collective:
    shapes, num_bytes = [], 0
    for shape in _SHAPE.finditer(match["shapes"]):
        sizes = tuple(int(size) for size in shape["sizes"].split(",") if size)
        shapes.append(sizes)
        digits = re.search(r"\d+", shape["dtype"])
        bits = int(digits[0]) if digits else _BITS[shape["dtype"]]
        num_bytes += prod(sizes) * bits // 8
    return Collective(match["kind"], tuple(shapes), num_bytes, "/cond/branch" in match["rest"])


@final
@dataclass(frozen=True)
class Fill:
    """The times of a pipeline, in the unit of the costs.

    Attributes:
      total: from the start of the first pass to the end of the last.
      ideal: the least time of any order: the work of the busiest stage, and one pass through the
        other stages.
    """

    total: float
    busy: tuple[float, ...]
    ideal: float

    @property
    def bubble(self) -> float:
        """Share of the time in which the busiest stage is idle."""
        return 1 - max(self.busy) / self.total

    @property
    def ideal_bubble(self) -> float:
        return 1 - max(self.busy) / self.ideal


def play(passes: Sequence[Pass], costs: Sequence[float]) -> Fill:
    """Play passes back on stages that process them in order of submission, one at a time.

    A pass begins when the last pass that sampled for one of its slots has left the last stage.

    Args:
      costs: of a pass on each stage.
    """
    free = [0.0] * len(costs)
    sampled: dict[int, float] = {}
    for each in passes:
        ready = max((sampled.get(slot, 0.0) for slot in each.slots), default=0.0)
        for stage, cost in enumerate(costs):
            ready = free[stage] = max(ready, free[stage]) + cost
        if each.samples:
            sampled |= dict.fromkeys(each.slots, ready)
    busy = tuple(cost * len(passes) for cost in costs)
    return Fill(total=max(free), busy=busy, ideal=max(busy) + sum(costs) - max(costs))


PLANS = "1,tensor:2,tensor:4,tensor:8,4+4,2+3+3,3x4+3x2+1+1"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every plan on the same model and requests."""
    # Set before JAX is imported; it has no effect with GPUs.
    flag = f"--xla_force_host_platform_device_count={_HOST_DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    import jax

    runs = [_run(plan, options) for plan in options.plans.split(",")]
    expected = runs[0].pop("answers")
    for each in runs[1:]:
        each["same_tokens"] = each.pop("answers") == expected
    return {
        "times_mean_something": jax.default_backend() != "cpu",
        "model": {name: getattr(options, name) for name in ("layers", "hidden_size")},
        "rows": options.rows,
        "runs": runs,
    }


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from flax import nnx

    from jaxserve import Runtime, SamplingParams
    from jaxserve.models.families.llama import Llama, LlamaConfig
    from jaxserve.sharding import StagePlan
    from jaxserve.steps.sampling.sampler import Variant

    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 2,
        num_layers=options.layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=options.hidden_size // 8,
        max_position_embeddings=256,
    )
    plan = _plan(name)
    passes: list[Pass] = []
    with Runtime(
        Llama(config, rngs=nnx.Rngs(0)),
        mesh=plan,
        max_slots=options.rows,
        max_context=256,
        policy=options.policy,
        warmup="full",
    ) as rt:
        executor: Any = rt._replicas.first.executor  # what it compiled and gets is private
        if isinstance(plan, StagePlan):
            executor.watch(passes.append)
        prompts = [[1 + i] * 8 for i in range(options.rows)]
        answers = rt.generate(prompts, SamplingParams(max_tokens=options.output_tokens))
        result: dict[str, Any] = {
            "plan": name,
            "answers": [answer.token_ids for answer in answers],
            "step_s": _median_step_s(rt),
        }
        if not isinstance(plan, StagePlan):
            _, decode = executor.compiled_steps(Variant.GREEDY)
            shards = 1 if plan is None else plan.shape["tensor"]
            result["decode"] = _tensor_traffic(decode, config, options.rows, shards)
            return result
        rows = passes[-1].num_rows
        result["micro_batches"] = plan.micro_batches
        result["decode"] = _stage_traffic(plan, config, rows)
        # One pass costs a stage its layers over its shards.
        fill = play(passes, [len(stage.layers) / stage.num_shards for stage in plan.stages])
        result["pipeline"] = {
            "passes": len(passes),
            "bubble": fill.bubble,
            "ideal_bubble": fill.ideal_bubble,
            "busy": [busy / fill.total for busy in fill.busy],
        }
        return result


def _tensor_traffic(executable: Any, config: LlamaConfig, rows: int, shards: int) -> dict[str, Any]:
    """Return the bytes that one iteration sends, and the least that tensor parallelism allows.

    The least is two sums a layer, one for the embedding, and the likeliest token of each shard.
    What is in branches does not count.
    """
    found = [each for each in collectives_of(executable) if not each.in_branch]
    sent = sum(each.num_bytes for each in found)
    row = config.hidden_size * 4
    least = rows * ((2 * config.num_layers + 1) * row + 8 * shards) if shards > 1 else 0
    kinds = dict(Counter(each.kind for each in found))
    ratio = sent / least if least else None
    return {"count": kinds, "bytes": sent, "least_bytes": least, "ratio": ratio}


def _stage_traffic(plan: StagePlan, config: LlamaConfig, rows: int) -> dict[str, Any]:
    """Return the bytes that one pass of `rows` rows sends from stage to stage, and back as tokens.

    Every device of a stage gets a copy; the least is one copy for each stage.
    """
    copies = [stage.num_shards for stage in plan.stages]
    hidden, token = rows * config.hidden_size * 4, rows * 5
    sent = hidden * sum(copies[1:]) + token * sum(copies[:-1])
    least = (hidden + token) * (len(copies) - 1)
    return {"bytes": sent, "least_bytes": least, "ratio": sent / least}


def _plan(text: str) -> Any:
    from jaxserve.sharding import StagePlan, make_mesh

    if text == "1":
        return None
    if text.startswith("tensor:"):
        return make_mesh(tensor=int(text.removeprefix("tensor:")))
    stages = [stage.split("x") for stage in text.split("+")]
    return StagePlan.of(
        [int(layers) for layers, *_ in stages],
        tensor=[int(shards[0]) if shards else 1 for _, *shards in stages],
    )


def _median_step_s(rt: Runtime) -> dict[str, float]:
    """Return the median seconds of a decode iteration and of a mixed step."""
    steps = rt.report().steps
    found: dict[str, list[float]] = {"mixed": [], "decode": []}
    for before, step in itertools.pairwise(steps):
        kind = "decode" if step.kind == "decode loop" else "mixed"
        if step.collected_s is not None and before.collected_s is not None:
            seconds = step.collected_s - before.collected_s
            found[kind].append(seconds / step.num_iterations)
    return {kind: statistics.median(times) for kind, times in found.items() if times}


OPTIONS = (
    option("--plans", PLANS, "1, tensor:SHARDS, or stages of LAYERSxSHARDS joined with +"),
    option("--rows", 16, "sequences that run at once"),
    option("--output-tokens", 32, "of each"),
    option("--layers", 8, "of the random model"),
    option("--hidden-size", 256, "of the random model"),
    option("--policy", "auto", "scheduling preset"),
)
main = Benchmark(__doc__, run, OPTIONS, "sharding")


if __name__ == "__main__":
    sys.exit(main())
