"""A recorded trace replays to the same schedule under every policy."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Request
from jaxserve.engine.answers import Answer
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import Trace
from jaxserve.workload.recorded import RecordedRequest, TraceWriter, read
from tests.common.tiers import some

pytestmark = pytest.mark.fast

ORACLES = ("oracle", "s3_oracle")
LONGER_THAN_ANY = 10_000


class Plans:
    """A simulated executor that stores its plans and their times."""

    def __init__(self, simulated: SimulatedExecutor, clock: VirtualClock):
        self.config, self.swap_costs = simulated.config, simulated.swap_costs
        self.refinement, self.host_memory = simulated.refinement, simulated.host_memory
        self.host_states = simulated.host_states
        self.num_device_groups = simulated.num_device_groups
        self.seen: list[tuple[object, ...]] = []
        self._simulated, self._clock = simulated, clock

    def submit(self, plan: StepPlan):
        """Store the plan as plain values, and submit it."""
        admissions = [(a.slot, a.sample_index, a.tokens.tolist()) for a in plan.admissions]
        self.seen.append(
            (
                self._clock.now(),
                (plan.index, plan.group, plan.num_iterations, plan.handovers),
                (plan.window_start, plan.window_size),
                (plan.releases, plan.moves, plan.rows, plan.page_updates, admissions),
            )
        )
        return self._simulated.submit(plan)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Run:
    """Requests and cancellations, each at a time of the virtual clock."""

    config: EngineConfig
    answer_length: object
    policy: str
    arrivals: list[Request]
    cancelled_s: dict[str, float]
    answers: list[Answer] = field(default_factory=list)

    def play(self, trace: TraceWriter | None = None) -> list[tuple[object, ...]]:
        """Return the schedule: every plan, and the time of its submission."""
        clock = VirtualClock()
        simulated = SimulatedExecutor(self.config, clock, answer_length=self.answer_length)
        executor = Plans(simulated, clock)
        engine = Engine(executor, PRESETS[self.policy], clock)
        arriving = sorted(self.arrivals, key=lambda request: request.arrival_s)
        open_answers: list[Answer] = []
        while arriving or engine.has_work:
            while arriving and arriving[0].arrival_s <= clock.now():
                answer = Answer(arriving.pop(0))
                answer.begin(engine.add(answer.request), engine.weights)
                open_answers.append(answer)
            for answer in open_answers:
                if self.cancelled_s.get(answer.request.id, float("inf")) <= clock.now():
                    for sequence in answer.sequences:
                        engine.scheduler.end(sequence, "cancelled")
            engine.step()
            for answer in list(open_answers):
                if answer.settle(lambda r, done: trace.append(r, done) if trace else None):
                    open_answers.remove(answer)
                    self.answers.append(answer)
            wakes = [] if engine.idle_until_s is None else [engine.idle_until_s]
            if wakes or not engine.has_work:
                clock.advance_to(min([*wakes, *(r.arrival_s for r in arriving[:1])], default=0.0))
        return executor.seen

    def tokens(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the tokens of every sample of every request."""
        return {
            answer.request.id: [tuple(sequence.output) for sequence in answer.sequences]
            for answer in self.answers
        }


def _recorded_run(seed: int, policy: str) -> Run:
    rng = random.Random(f"recorded {seed}")
    trace = Trace(seed)
    arrivals, now_s = [], 0.0
    for request in trace.requests:
        now_s += rng.expovariate(1 / rng.choice([0.001, 0.01]))
        params = request.params
        if policy in ORACLES:  # it plans by forced lengths, so the recorded run must have them too
            request = replace(request, stop_token_ids=())
            lengths = [rng.randint(1, params.max_tokens or 20) for _ in range(params.n)]
            params = replace(params, forced_length=tuple(lengths))
        arrivals.append(replace(request, params=params, arrival_s=now_s))
    patience = {
        request.id: request.arrival_s + rng.expovariate(50)
        for request in arrivals
        if policy not in ORACLES and rng.random() < 0.2
    }
    return Run(trace.config, trace.answer_length, policy, arrivals, patience)


def _again(recorded: RecordedRequest, prediction: LengthPrediction | None) -> Request:
    """Return the replay's request; one that was cancelled ends at its recorded length."""
    item = recorded.item()
    params = item.params()
    if "cancelled" in recorded.finish_reasons:
        lengths = [
            recorded.params.max_tokens or LONGER_THAN_ANY if reason == "cancelled" else length
            for reason, length in zip(
                recorded.finish_reasons, recorded.num_output_tokens, strict=True
            )
        ]
        params = replace(params, forced_length=tuple(lengths))
    assert params.seed is not None
    return Request(
        id=recorded.id,
        prompt=item.prompt_token_ids,
        params=params,
        arrival_s=item.arrival_s,
        seed=params.seed,
        priority=item.priority,
        deadline_s=recorded.deadline_s,
        prediction=prediction,
    )


@pytest.mark.parametrize("policy", some(PRESETS, *map([*PRESETS].index, ("pensieve",))))
def test_a_recorded_trace_replays_to_the_same_schedule(policy: str, tmp_path: Path):
    """Steps, rows, slots, pages, tokens and times are equal, although lengths are forced now."""
    reasons = set()
    for seed in range(12):
        path = tmp_path / f"{seed}.jsonl"
        run = _recorded_run(seed, policy)
        writer = TraceWriter(path, origin_s=0.0)
        schedule = run.play(writer)
        writer.close()
        recorded = read(path)
        reasons |= {reason for request in recorded for reason in request.finish_reasons}
        cancelled_s = {r.id: r.finished_s for r in recorded if "cancelled" in r.finish_reasons}
        predictions = {request.id: request.prediction for request in run.arrivals}
        requests = [_again(r, predictions[r.id]) for r in recorded]
        again = Run(run.config, run.answer_length, policy, requests, cancelled_s)
        assert again.play() == schedule, f"seed {seed}"
        assert again.tokens() == run.tokens(), f"seed {seed}"
    expected = {"length"} if policy in ORACLES else {"stop", "length", "cancelled"}
    assert reasons == expected


def test_another_length_is_another_schedule(tmp_path: Path):
    """The comparison works: a replay with another length has another schedule."""
    run = _recorded_run(1, "orca")
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path, origin_s=0.0)
    schedule = run.play(writer)
    writer.close()
    recorded = [replace(r, num_output_tokens=(1,) * r.params.n) for r in read(path)]
    again = Run(run.config, run.answer_length, "orca", [_again(r, None) for r in recorded], {})
    assert again.play() != schedule
