"""A plan for one engine: an RRA schedule, and what it is expected to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.schedules.configuration import Points, Schedule
from jaxserve.planning.schedules.estimates import LatencyBounds
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.planning.schedules.measured_cost import THRESHOLD, measured_deployment
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.search import search
from jaxserve.planning.step_times import StepTimes
from jaxserve.scheduling.iteration.rra import RRA


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule of round-robin allocation for one engine, and what is expected of it.

    The figures are those of an engine that always has requests waiting. They hold for each replica.

    Attributes:
      schedule: B_E, N_D and B_D, see `Schedule`.
      latency_bound_s: the bound that was asked for; infinity for none.
      latency_s: seconds of an answer of the 99th-percentile length, from its admission to its end,
        with phases a tenth longer than their mean. Time in the queue is not included.
      answers_per_s, tokens_per_s: throughput in answers, and in their output tokens.
      max_answer_tokens: the 99th-percentile length, in output tokens.
      num_lengths: answers from whose lengths the plan was computed.
      search_s: seconds that the search took.
    """

    schedule: Schedule
    latency_bound_s: float
    latency_s: float
    answers_per_s: float
    tokens_per_s: float
    max_answer_tokens: int
    num_lengths: int
    search_s: float

    def iteration(self) -> RRA:
        """Return the iteration shape that carries out the schedule."""
        schedule = self.schedule
        return RRA(
            encode_batch=schedule.encode_batch,
            decode_iterations=schedule.num_decodes,
            encode_tokens=schedule.encode_tokens,
            # Without a decode iteration no batch is kept up.
            decode_batch=schedule.decode_batch or None,
            threshold=THRESHOLD,
        )

    def __str__(self) -> str:
        schedule = self.schedule
        return (
            f"RRA: encode {schedule.encode_batch} sequences, decode {schedule.num_decodes} "
            f"iterations, about {schedule.decode_batch:.1f} sequences at a time\n"
            f"expected: {self.answers_per_s:.4g} answers/s, {self.tokens_per_s:.4g} output "
            f"tokens/s; {self.latency_s:.3g} s for an answer of {self.max_answer_tokens} tokens "
            f"(99th percentile), bound {self.latency_bound_s:.3g} s\n"
            f"computed from the lengths of {self.num_lengths} answers in {self.search_s:.2g} s"
        )


def plan_rra(
    times: StepTimes,
    config: EngineConfig,
    lengths: Sequence[tuple[int, int]],
    latency_bound_s: float,
) -> Plan:
    """Return the plan with the highest throughput whose long answers keep the bound.

    Args:
      times: measured step times of the engine.
      config: the engine's present configuration; its slots and page pool limit the schedule.
      lengths: prompt and output tokens of each answer; the two are taken as independent.
      latency_bound_s: seconds that an answer of the 99th-percentile length may take, from its
        admission to its end.

    Raises:
      InfeasibleBoundError: no schedule keeps the bound; it says the lowest feasible one.
      DeviceMemoryError: one answer of these lengths is expected to need more than the page pool.
      InvalidConfigError: there are no lengths, or one is not allowed; or the bound is not above 0.
    """
    bounds = LatencyBounds(latency_s=latency_bound_s)
    task = _task_of(lengths)
    means = task.inputs.mean, task.outputs.less_one().mean
    choice = search(measured_deployment(times, config, *means), task, bounds)
    # The search allows every round one decode loop too many; the chosen N_D has an exact number.
    num_decodes = choice.schedule.num_decodes
    timeline = RRATimeline(
        measured_deployment(times, config, *means, num_decodes=num_decodes), task
    )
    estimates = timeline.estimate(Points.one(0, choice.schedule.encode_batch, num_decodes))[0]
    return Plan(
        schedule=choice.schedule,
        latency_bound_s=latency_bound_s,
        latency_s=float(estimates.latency_s),
        answers_per_s=float(estimates.throughput),
        tokens_per_s=float(estimates.throughput) * task.outputs.mean,
        max_answer_tokens=task.outputs.percentile(task.level),
        num_lengths=len(lengths),
        search_s=choice.elapsed_s,
    )


def _task_of(lengths: Sequence[tuple[int, int]]) -> TaskLengths:
    """Return the distributions of prompt and output lengths.

    Raises:
      InvalidConfigError: there are none, or one is below 1.
    """
    if not lengths or min(map(min, lengths)) < 1:
        raise InvalidConfigError(
            f"lengths of {len(lengths)} answers are not allowed; pass (prompt tokens, output "
            "tokens) of at least one answer, each at least 1"
        )
    inputs, outputs = zip(*lengths, strict=True)
    return TaskLengths(
        LengthDistribution.of_samples(inputs), LengthDistribution.of_samples(outputs)
    )
