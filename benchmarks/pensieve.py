"""Section 3.6 of the Pensieve thesis, simulated: `python -m benchmarks.pensieve --help`.

The thesis's models on its GPUs, as rooflines, under the scheduler, page cache and supervisor that
serve on a device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import numpy as np
from tqdm import tqdm

from benchmarks.common import sweep
from benchmarks.common.counters import of_simulation
from benchmarks.common.harness import Benchmark, option, some_of
from benchmarks.common.policies import VARIANTS
from benchmarks.common.repeats import Figures
from benchmarks.common.sweep import STATELESS, Curve
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import summarise
from jaxserve.planning import simulate
from jaxserve.planning.step_roofline import A100, ModelShape, RooflineCost
from jaxserve.scheduling.presets import PRESETS
from jaxserve.workload.conversations import Talk, Talks, sample

# Section 3.6.1.
MAX_CONTEXT = 16384
PAGE_TOKENS = 32
REACTION_S = 60.0
KV_BYTES = 40e9  # of each GPU
HOST_BYTES = 220e9  # for each GPU


@final
@dataclass(frozen=True)
class Machine:
    """A model of table 3.1, the GPUs that share each of its layers, and the lowest rate played."""

    model: ModelShape
    num_gpus: int
    requests_per_s: float

    def config(self, cost: RooflineCost) -> EngineConfig:
        """Return a runtime's configuration with the thesis's memory; pages return on admission."""
        return cost.config(
            num_pages=self.num_gpus * KV_BYTES // cost.page_bytes,
            num_host_pages=self.num_gpus * HOST_BYTES // cost.page_bytes,
            max_slots=256,
            max_context=MAX_CONTEXT,
        )


# Llama 2-13B has 10 heads of keys and values here instead of 40, and 1.6e9 parameters fewer.
MACHINES = {
    "OPT-13B": Machine(ModelShape(num_params=12.85e9, num_layers=40, hidden_size=5120), 1, 0.4),
    "Llama 2-13B": Machine(
        ModelShape(num_params=11.44e9, num_layers=40, hidden_size=5120, group_size=4), 1, 3.0
    ),
    "OPT-66B": Machine(ModelShape(num_params=65.7e9, num_layers=64, hidden_size=9216), 4, 0.6),
    "Llama 2-70B": Machine(
        ModelShape(num_params=68.98e9, num_layers=80, hidden_size=8192, group_size=8), 4, 1.5
    ),
}
TWO = (STATELESS, "pensieve")
THREE = (STATELESS, "pensieve_device_only", "pensieve")
ALL = (STATELESS, "s3_oracle", *THREE[1:], "auto")
KNOWN = {**{name: PRESETS[name] for name in ALL}, "pensieve_lru": VARIANTS["pensieve_lru"]}


@final
@dataclass(frozen=True)
class Panel:
    """One plot of the thesis.

    Attributes:
      gain: the thesis's throughput over stateless serving; None if it gives none.
      bounds: the latency at which the curves end, over the latency bound.
    """

    figure: str
    model: str
    policies: Sequence[str]
    gain: float | None
    min_rounds: int = 1
    reaction_s: float = REACTION_S
    bounds: float = 1.0


PANELS = (
    Panel("3.12", "OPT-13B", ALL, 1.25),
    Panel("3.12", "Llama 2-13B", ALL, 1.52),
    Panel("3.13", "OPT-66B", ALL, 1.5),
    Panel("3.13", "Llama 2-70B", ALL, 1.6),
    Panel("3.14", "OPT-13B", ("pensieve_lru", "pensieve"), None, bounds=10.0),
    Panel("3.15", "OPT-13B", THREE, 1.3, min_rounds=5),
    Panel("3.15", "Llama 2-13B", THREE, 1.7, min_rounds=5),
    Panel("3.16", "Llama 2-13B", TWO, None, reaction_s=30.0),
    Panel("3.16", "Llama 2-13B", TWO, 1.4, reaction_s=120.0),
)


# From one rate of a curve to the next.
FACTOR = 1.4


def played(options: argparse.Namespace, panel: Panel, talks: Sequence[Talk], bar: tqdm) -> Figures:
    """Play the policies at rising rates, each until its p90 is beyond the panel's bound."""
    turns_each = float(np.mean([len(talk.turns) for talk in talks]))
    lowest = MACHINES[panel.model].requests_per_s
    highest = turns_each * talks[-1].arrival_s / options.seconds
    if highest < lowest:
        raise InvalidConfigError(
            f"{len(talks)} conversations are {highest:.2f} requests a second for "
            f"{options.seconds:g} s, and {panel.model} is to have {lowest:g} or more; give more "
            "--num-conversations or fewer --seconds"
        )
    curves: dict[str, Curve] = {}
    for name in panel.policies:

        def at(rate: float, name: str = name) -> Figures:
            bar.set_postfix_str(f"{panel.figure}, {panel.model}, {name}, {rate:.2f}/s")
            begun = beginning(talks, rate / turns_each, panel.reaction_s, options.seconds)
            return {"rate": rate, **figures(panel, name, begun, options)}

        curve = curves[name] = curve_of(at, lowest, highest, panel.bounds * options.bound)
        last = curve.points[-1]
        bar.write(
            f"{panel.figure}, {panel.model}, {name}: {last['requests_per_s']:.2f} requests/s at "
            f"{sweep.p90(last):.3f} s a token, stopped by {curve.stopped_by}",
            file=sys.stderr,
        )
        bar.update()
    return {**asdict(panel), "policies": sweep.at_bound(curves, options.bound)}


def curve_of(
    at: Callable[[float], Figures], lowest: float, highest: float, bound_s: float
) -> Curve:
    """Play rates that rise until p90 is beyond the bound, and one between the last two.

    Args:
      highest: the rate beyond which there are too few conversations.
    """
    points: list[Figures] = []
    while not points or sweep.p90(points[-1]) <= bound_s:
        rate = lowest * FACTOR ** len(points)
        if rate > highest:
            return Curve(points, stopped_by="number of conversations")
        points.append(at(rate))
    if len(points) > 1:
        points.insert(-1, at(points[-1]["rate"] / FACTOR**0.5))
    return Curve(points, stopped_by="bound")


def figures(
    panel: Panel, policy: str, talks: Sequence[Talk], options: argparse.Namespace
) -> Figures:
    """Play a policy at one rate.

    Returns:
      Figures of requests that ended after the warm-up, and the engine's counters.
    """
    cost, client = cost_of(options, panel.model), Talks(talks)
    done = simulate(
        client.items,
        KNOWN[policy],
        MACHINES[panel.model].config(cost),
        cost,
        follow_up=client.follow_up,
        chunk_cost=cost.chunk_cost(MAX_CONTEXT),
        swap_costs=cost.swap_costs(),
        until_s=options.seconds,
        progress=False,
    )
    warm_up_s = options.warm_up
    counted = [each for each in done.completions if (each.timing.finished_s or 0) >= warm_up_s]
    return {**summarise(counted, options.seconds - warm_up_s), **of_simulation(done)}


def cost_of(options: argparse.Namespace, model: str) -> RooflineCost:
    """Return the costs of a model's steps."""
    return RooflineCost(
        model=MACHINES[model].model,
        roofs=A100,
        page_tokens=PAGE_TOKENS,
        num_shards=MACHINES[model].num_gpus,
        efficiency=options.efficiency,
        hides_copies=not options.copies_before,
    )


def drawn_talks(options: argparse.Namespace, min_rounds: int) -> list[Talk]:
    """Return conversations that begin every second, with reactions of one second on average."""
    from jaxserve.models.tokenizer import Tokenizer

    return sample(
        options.num_conversations if min_rounds == 1 else options.num_conversations // 2,
        options.seed,
        tokenizer=Tokenizer.of_model(options.model),
        max_context=MAX_CONTEXT,
        min_rounds=min_rounds,
        reaction_s=1.0,
        rate=1.0,
        whole=True,
    )


def beginning(talks: Sequence[Talk], rate: float, reaction_s: float, seconds: float) -> list[Talk]:
    """Return the conversations that begin within `seconds`, at this rate and reaction time."""
    return [
        replace(
            talk,
            arrival_s=talk.arrival_s / rate,
            turns=tuple(
                replace(turn, reaction_s=reaction_s * turn.reaction_s) for turn in talk.turns
            ),
        )
        for talk in talks
        if talk.arrival_s < rate * seconds
    ]


def described(talks: Sequence[Talk]) -> dict[str, float]:
    """Return the statistics of table 3.2."""
    turns = [turn for talk in talks for turn in talk.turns]
    return {
        "num_conversations": len(talks),
        "mean_turns": len(turns) / len(talks),
        "mean_input_tokens": float(np.mean([len(turn.token_ids) for turn in turns])),
        "mean_output_tokens": float(np.mean([turn.num_output_tokens for turn in turns])),
        "mean_context": float(np.mean([talk.num_tokens for talk in talks])),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    panels = panels_of(options)
    drawn = {
        rounds: drawn_talks(options, rounds) for rounds in {each.min_rounds for each in panels}
    }
    total = sum(len(panel.policies) for panel in panels)
    with tqdm(total=total, desc="curves", leave=False) as bar:
        sets = [played(options, panel, drawn[panel.min_rounds], bar) for panel in panels]
    return {
        "conversations": {str(rounds): described(talks) for rounds, talks in sorted(drawn.items())},
        "chunk_cost_s": {
            name: {
                str(context): cost_of(options, name).chunk_cost(MAX_CONTEXT)(context)
                for context in (PAGE_TOKENS, 1024, 4096, MAX_CONTEXT)
            }
            for name in MACHINES
        },
        "sets": sets,
    }


def panels_of(options: argparse.Namespace) -> list[Panel]:
    known = sorted({panel.figure for panel in PANELS})
    wanted = some_of(options.figures, "--figures", known)
    return [panel for panel in PANELS if panel.figure in wanted]


OPTIONS = (
    option("--figures", "3.12,3.13,3.14,3.15,3.16", "which to play"),
    option("--num-conversations", 4000, "of ShareGPT; half as many with five rounds or more"),
    option("--seconds", 1200.0, "virtual seconds in which conversations begin and go on"),
    option("--warm-up", 500.0, "seconds of these that do not count"),
    option("--bound", 0.2, "throughput is compared where p90 is this many seconds a token"),
    option("--efficiency", 0.5, "share of the GPUs' rooflines that is reached"),
    option("--copies-before", False, "swap before computing instead of beside it"),
    option("--model", "smollm2-135m", "the model whose tokenizer counts"),
    option("--seed", 0, "of the draw, the arrivals and the reactions"),
)
main = Benchmark(__doc__, run, OPTIONS, "pensieve")


if __name__ == "__main__":
    sys.exit(main())
