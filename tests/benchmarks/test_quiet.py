"""Runs of the same steps, put together from their quiet moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.quiet import Recording, quiet_run
from jaxserve.core.config import EngineConfig
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import Simulation, simulate
from jaxserve.scheduling.presets import get_policy
from jaxserve.workload import WorkloadItem

CONFIG = EngineConfig(num_pages=64, max_slots=4)
ITEMS = [
    WorkloadItem(
        prompt_token_ids=(1,) * 8,
        num_output_tokens=length,
        max_tokens=length,
        sampling=SamplingParams(),
    )
    for length in (5, 30, 12, 50, 7, 21)
]


def play(per_iteration_s: float) -> Simulation:
    cost = FlatCost(per_iteration_s=per_iteration_s)
    return simulate(ITEMS, get_policy("orca"), CONFIG, cost, progress=False)


def recording(simulation: Simulation, begin_s: float = 0.0) -> Recording:
    return Recording(simulation.completions, simulation.steps, begin_s)


def test_one_run_is_itself() -> None:
    simulation = play(1e-3)
    quiet = quiet_run([recording(simulation)])
    assert quiet is not None
    done, wall_s, num_runs = quiet
    assert num_runs == 1
    assert wall_s == pytest.approx(simulation.wall_s)
    for mine, theirs in zip(done, simulation.completions, strict=True):
        assert mine.timing.latency_s == pytest.approx(theirs.timing.latency_s)
        first_s = mine.timing.time_to_first_token_s
        assert first_s == pytest.approx(theirs.timing.time_to_first_token_s)


def test_slow_runs_and_slow_steps_do_not_count() -> None:
    quick = recording(play(1e-3))
    slow = recording(play(2e-3))
    hiccup = _delayed(quick, at=3, by_s=5.0)
    quiet = quiet_run([hiccup, quick, quick, quick, slow])
    assert quiet is not None
    assert quiet[1] == pytest.approx(play(1e-3).wall_s)


def test_other_steps_are_not_compared() -> None:
    late = [replace(item, arrival_s=0.01 * i) for i, item in enumerate(ITEMS)]
    other = simulate(late, get_policy("orca"), CONFIG, FlatCost(), progress=False)
    quick = recording(play(1e-3))
    assert quiet_run([quick, recording(other)]) is None
    assert quiet_run([recording(other)], [quick, quick]) == quiet_run([recording(other)])
    alike = quiet_run([recording(play(2e-3))], [quick, quick, quick, quick, recording(other)])
    assert alike is not None and alike[1:] == (pytest.approx(play(1e-3).wall_s), 5)


def _delayed(run: Recording, *, at: int, by_s: float) -> Recording:
    """With a step that takes longer, and all after it later."""
    moment_s = run.steps[at].collected_s
    assert moment_s is not None

    def later(time_s: float | None) -> float | None:
        return time_s if time_s is None or time_s < moment_s else time_s + by_s

    steps = [replace(step, collected_s=later(step.collected_s)) for step in run.steps]
    done = [
        replace(
            completion,
            timing=replace(
                completion.timing,
                first_token_s=later(completion.timing.first_token_s),
                finished_s=later(completion.timing.finished_s),
            ),
        )
        for completion in run.completions
    ]
    return Recording(done, steps, run.begin_s)
