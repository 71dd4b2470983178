"""A plan for one engine: an RRA schedule, and what it is expected to do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import DeviceMemoryError, InfeasibleBoundError, InvalidConfigError
from jaxserve.planning.schedules.configuration import Layout, Points, Schedule
from jaxserve.planning.schedules.estimates import LatencyBounds
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.planning.schedules.measured_cost import THRESHOLD, measured_deployment
from jaxserve.planning.schedules.rra import RRATimeline
from jaxserve.planning.schedules.search import nearest_among, search_among
from jaxserve.planning.schedules.timeline import Deployment
from jaxserve.planning.step_times import StepTimes
from jaxserve.scheduling.iteration.rra import RRA


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """A schedule of round-robin allocation for one engine, and what is expected of it.

    The figures are those of an engine that always has requests waiting. They hold for each replica.
    Latencies count from the admission of an answer; time in the queue is not included. They are
    those of an answer of the 99th-percentile length, with phases a tenth longer than their mean.

    Attributes:
      schedule: B_E, N_D and B_D, see `Schedule`.
      bounds: the bounds that were asked for.
      latency_s: seconds to the answer's end.
      first_token_s: seconds to its first token.
      token_s: its mean seconds per token after the first, encode phases between them included.
      answers_per_s, tokens_per_s: throughput in answers, and in their output tokens.
      max_answer_tokens: the 99th-percentile length, in output tokens.
      num_lengths: answers from whose lengths the plan was computed.
      search_s: seconds that the search took.
      lowest: the lowest seconds that some schedule reaches, by name of the bound, if no schedule
        keeps the bounds; empty if this one does.
    """

    schedule: Schedule
    bounds: LatencyBounds
    latency_s: float
    first_token_s: float
    token_s: float
    answers_per_s: float
    tokens_per_s: float
    max_answer_tokens: int
    num_lengths: int
    search_s: float
    lowest: dict[str, float] = field(default_factory=dict)

    @property
    def latency_bound_s(self) -> float:
        """The bound on a whole answer; infinity for none."""
        return self.bounds.latency_s

    @property
    def keeps_bounds(self) -> bool:
        """Whether every latency is expected to be within its bound."""
        return self.worst_share <= 1

    @property
    def worst_share(self) -> float:
        """The largest quotient of a latency and its bound; 0 without bounds."""
        bounds = self.bounds.finite().items()
        return max((getattr(self, name) / s for name, s in bounds), default=0.0)

    @property
    def missed(self) -> str:
        """Which bounds would be feasible, if no schedule keeps these; empty if this one does."""
        if self.keeps_bounds:
            return ""
        reached = ", ".join(f"{name}={s:.4g}" for name, s in self.lowest.items())
        return f"no schedule keeps the bounds; the lowest, each for itself: {reached}"

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

    def figures(self) -> dict[str, Any]:
        """Return the schedule, its bounds and what is expected, as values of JSON."""
        schedule = self.schedule
        return {
            "schedule": f"RRA {schedule.encode_batch}x{schedule.num_decodes}",
            "encode_batch": schedule.encode_batch,
            "num_decodes": schedule.num_decodes,
            "decode_batch": schedule.decode_batch,
            "bounds": self.bounds.finite(),
            "keeps_bounds": self.keeps_bounds,
            "lowest": self.lowest,
            "latency_s": self.latency_s,
            "first_token_s": self.first_token_s,
            "token_s": self.token_s,
            "answers_per_s": self.answers_per_s,
            "tokens_per_s": self.tokens_per_s,
            "max_answer_tokens": self.max_answer_tokens,
            "num_lengths": self.num_lengths,
        }

    def summary(self) -> str:
        """Return the schedule and its bounds in a line."""
        given = ", ".join(f"{name} {s:.3g} s" for name, s in self.bounds.finite().items())
        schedule = self.schedule
        return (
            f"RRA: encode {schedule.encode_batch} sequences, decode {schedule.num_decodes} "
            f"iterations; bounds: {given or 'none'}"
            f"{'' if self.keeps_bounds else ', which no schedule keeps'}"
        )

    def __str__(self) -> str:
        schedule, bounds = self.schedule, self.bounds
        missed = f"{self.missed}\n" if self.missed else ""
        return (
            f"RRA: encode {schedule.encode_batch} sequences, decode {schedule.num_decodes} "
            f"iterations, about {schedule.decode_batch:.1f} sequences at a time\n"
            f"expected: {self.answers_per_s:.4g} answers/s, {self.tokens_per_s:.4g} output "
            f"tokens/s; for an answer of {self.max_answer_tokens} tokens (99th percentile) "
            f"{self.latency_s:.3g} s{_bound(bounds.latency_s)}, first token after "
            f"{self.first_token_s:.3g} s{_bound(bounds.first_token_s)}, then "
            f"{self.token_s:.3g} s a token{_bound(bounds.token_s)}\n"
            f"{missed}"
            f"computed from the lengths of {self.num_lengths} answers in {self.search_s:.2g} s"
        )


@final
@dataclass(frozen=True, kw_only=True)
class RRAPlanner:
    """A planner of one engine's RRA schedules, for any lengths.

    Attributes:
      deploy: returns the engine's costs for (lengths, N_D); N_D is None for a search over all.
      layouts: the layouts that the engine can run.
    """

    deploy: Callable[[TaskLengths, int | None], Deployment]
    layouts: tuple[Layout, ...] | None = None

    @classmethod
    def measured(cls, times: StepTimes, config: Callable[[], EngineConfig]) -> RRAPlanner:
        """Return the planner of an engine with measured step times.

        Args:
          config: returns the engine's present configuration, whose slots and page pool limit the
            schedule.
        """

        def deploy(lengths: TaskLengths, num_decodes: int | None) -> Deployment:
            means = lengths.inputs.mean, lengths.outputs.less_one().mean
            return measured_deployment(times, config(), *means, num_decodes=num_decodes)

        return cls(deploy=deploy)

    def plan(self, lengths: TaskLengths, bounds: LatencyBounds, *, num_lengths: int) -> Plan:
        """Return the plan with the highest throughput whose long answers keep the bounds.

        Args:
          num_lengths: answers that the lengths are of, for the record.

        Raises:
          InfeasibleBoundError: no schedule keeps the bounds; it says the lowest feasible ones.
          DeviceMemoryError: one answer of these lengths is expected to need more than the memory.
        """
        began_s = time.perf_counter()
        try:
            choice = search_among([self._timeline(lengths, None)], bounds)
        except DeviceMemoryError:
            raise _too_long(lengths) from None
        return self._of(choice.schedule, lengths, bounds, num_lengths, began_s)

    def nearest(self, lengths: TaskLengths, bounds: LatencyBounds, *, num_lengths: int) -> Plan:
        """Return `plan`; or if no schedule keeps the bounds, the schedule that misses them least.

        Raises:
          DeviceMemoryError: see `plan`.
        """
        began_s = time.perf_counter()
        try:
            return self.plan(lengths, bounds, num_lengths=num_lengths)
        except InfeasibleBoundError as error:
            choice = nearest_among([self._timeline(lengths, None)], bounds)
            plan = self._of(choice.schedule, lengths, bounds, num_lengths, began_s)
            return replace(plan, lowest=error.lowest)

    def expected(self, plan: Plan, lengths: TaskLengths, *, num_lengths: int) -> Plan:
        """Return what a plan's B_E and N_D are expected to do with other lengths."""
        return self._of(plan.schedule, lengths, plan.bounds, num_lengths, time.perf_counter())

    def _of(
        self,
        schedule: Schedule,
        lengths: TaskLengths,
        bounds: LatencyBounds,
        num_lengths: int,
        began_s: float,
    ) -> Plan:
        # The search allows every round one decode loop too many; this N_D has an exact number.
        timeline = self._timeline(lengths, schedule.num_decodes)
        # No phase lasts longer than the longest answer.
        num_decodes = min(schedule.num_decodes, timeline.max_control)
        layout = timeline.layouts.index(schedule.layout)
        point = Points.one(layout, schedule.encode_batch, num_decodes)
        estimates = timeline.estimate(point)[0]
        return Plan(
            schedule=timeline.schedule(point),
            bounds=bounds,
            latency_s=float(estimates.latency_s),
            first_token_s=float(estimates.first_token_s),
            token_s=float(estimates.token_s),
            answers_per_s=float(estimates.throughput),
            tokens_per_s=float(estimates.throughput) * lengths.outputs.mean,
            max_answer_tokens=lengths.outputs.percentile(lengths.level),
            num_lengths=num_lengths,
            search_s=time.perf_counter() - began_s,
        )

    def _timeline(self, lengths: TaskLengths, num_decodes: int | None) -> RRATimeline:
        return RRATimeline(self.deploy(lengths, num_decodes), lengths, self.layouts)


def plan_rra(
    times: StepTimes,
    config: EngineConfig,
    lengths: Sequence[tuple[int, int]],
    latency_bound_s: float,
    *,
    first_token_bound_s: float = math.inf,
    token_bound_s: float = math.inf,
) -> Plan:
    """Return the plan with the highest throughput whose long answers keep the bounds.

    Args:
      times: measured step times of the engine.
      config: the engine's present configuration; its slots and page pool limit the schedule.
      lengths: prompt and output tokens of each answer; the two are taken as independent.
      latency_bound_s: seconds that an answer of the 99th-percentile length may take, from its
        admission to its end; infinity for no bound, as of the other two.
      first_token_bound_s: seconds to its first token.
      token_bound_s: mean seconds per token after the first.

    Raises:
      InfeasibleBoundError: no schedule keeps the bounds; it says the lowest feasible ones.
      DeviceMemoryError: one answer of these lengths is expected to need more than the page pool.
      InvalidConfigError: there are no lengths, or one is not allowed; or a bound is not above 0.
    """
    bounds = LatencyBounds(
        latency_s=latency_bound_s, first_token_s=first_token_bound_s, token_s=token_bound_s
    )
    planner = RRAPlanner.measured(times, lambda: config)
    return planner.plan(lengths_of(lengths), bounds, num_lengths=len(lengths))


def lengths_of(lengths: Sequence[tuple[int, int]]) -> TaskLengths:
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


def _bound(seconds: float) -> str:
    return "" if seconds == math.inf else f" (bound {seconds:.3g} s)"


def _too_long(lengths: TaskLengths) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"an answer with a prompt of {lengths.inputs.mean:.0f} tokens on average and up to "
        f"{lengths.outputs.max_length} output tokens is expected to need more pages than the page "
        "pool has; pass more kv_memory (Runtime.resize_kv), or requests with a lower max_tokens"
    )
