"""WAA's schedule follows lengths that drift (figure 11), in the discrete simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.planning.schedules import LatencyBounds, SchedulePlan, lengths_of
from jaxserve.planning.schedules.adaptation import Adaptation, AdaptingPilot
from jaxserve.planning.schedules.measured_waa import WAAPlanner
from jaxserve.planning.schedules.observed import AnswerLength
from jaxserve.workload.tasks import Lengths
from tests.common.tiers import some
from tests.planning.schedules.step_times import CONFIG, GROUPS, served, spent_s

PLANNER = WAAPlanner(times=GROUPS, config=lambda: CONFIG)
INPUTS, OUTPUTS = Lengths(mean=50, std=15, most=90), Lengths(mean=40, std=15, most=90)
NUM_BEFORE, NUM_AFTER = 300, 1000
# A long answer before the drift takes 1.7 s under the schedule that serves the most.
BOUND = LatencyBounds(latency_s=1.75)


def _drawn(outputs: Lengths, num: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    lengths = [
        rng.choice(np.arange(1, each.most + 1), num, p=each.probabilities()).tolist()
        for each in (INPUTS, outputs)
    ]
    return list(zip(*lengths, strict=True))


def _served(
    lengths: Sequence[tuple[int, int]], plan: SchedulePlan, pilot: AdaptingPilot | None = None
) -> list[tuple[float, float]]:
    """Return answers/s and the share in the bound, from the drift on and from its second half on.

    The last eighth is left out, beside which no new answers are admitted.
    """
    timings = served(lengths, plan.iteration(), GROUPS.costs(), pilot=pilot)
    admitted = np.array([timing.admitted_s for timing in timings])
    spent = spent_s(timings)
    last = len(lengths) - NUM_AFTER // 8
    return [
        (
            (last - first) / (admitted[last] - admitted[first]),
            np.mean(spent[first:last] <= BOUND.latency_s),
        )
        for first in (NUM_BEFORE, NUM_BEFORE + NUM_AFTER // 2)
    ]


@pytest.mark.release
@pytest.mark.parametrize("changed", some(["mean", "std"]))
def test_the_bound_is_kept_again_when_lengths_grow(changed: str):
    """Left alone, over 1 % of answers miss it; adapted, it serves as much as if planned anew."""
    rng = np.random.default_rng(0)
    known = _drawn(OUTPUTS, 2 * NUM_BEFORE, rng)
    after = _drawn(replace(OUTPUTS, **{changed: 1.3 * getattr(OUTPUTS, changed)}), NUM_AFTER, rng)
    lengths = [*_drawn(OUTPUTS, NUM_BEFORE, rng), *after]
    plan = PLANNER.plan(lengths_of(known), BOUND, num_lengths=len(known))
    answers = [
        AnswerLength(admitted_s=-math.inf, num_prompt=prompt, num_output=output)
        for prompt, output in known
    ]
    pilot = AdaptingPilot(Adaptation(PLANNER, BOUND, plan=plan, answers=answers))
    _, (_, alone) = _served(lengths, plan)
    (_, at_first), (rate, settled) = _served(lengths, plan, pilot)
    anew = PLANNER.plan(lengths_of(after), BOUND, num_lengths=len(after))
    _, (anew_rate, _) = _served(lengths, anew)
    assert alone < 0.99 and at_first >= 0.98 and settled >= 0.99
    assert pilot.adopted and rate >= 0.97 * anew_rate
