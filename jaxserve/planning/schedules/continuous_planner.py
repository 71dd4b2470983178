"""The search for the number of sequences that continuous batching may run at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.candidate import Score, throughput_under
from jaxserve.planning.schedules.configuration import Layout, Policy, Schedule
from jaxserve.planning.schedules.continuous_limits import ContinuousLimits
from jaxserve.planning.schedules.continuous_search import SizeSearch
from jaxserve.planning.schedules.estimates import Estimates, LatencyBounds
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.observed import RequestClass, spans_of
from jaxserve.planning.schedules.plan import SIMULATED
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.played import Played, Player
from jaxserve.scheduling.iteration.continuous import Unified

# Share of preempted answers from which on memory is short.
_PREEMPTED = 0.01
# Share of the highest throughput that simulations do not tell from it.
_AS_GOOD = 0.99


@final
@dataclass(frozen=True)
class ContinuousPlanner(SchedulePlanner):
    """A planner of continuous batching on one engine, for any lengths.

    Attributes:
      player: simulates the engine.
    """

    player: Player

    @property
    def max_slots(self) -> int:
        return self.player.config.max_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> ContinuousSpace:
        return ContinuousSpace(self.player, lengths, tuple(classes))

    def _chosen(self, space: ContinuousSpace, bounds: LatencyBounds) -> Schedule | None:
        # Simulated throughputs are never equal.
        return space.best(throughput_under(bounds))


@final
@dataclass(frozen=True)
class ContinuousSpace:
    """Continuous batching of 1, 2, ... sequences at once, as far as there are slots.

    Figures come from simulations (`Player`). Their number is kept small:

    - Sizes that cannot be the best by step times alone are left out (`ContinuousLimits`).
    - Of the others, those are simulated that are expected to be the best, by the limits and the
      costs of prompts in the simulations so far (`SizeSearch`).
    - Where answers are preempted, since memory is short, fewer sequences may serve more. So the
      smaller compiled sizes are simulated, too, and the smallest size that is as good as the best
      is bisected downwards.

    Slots are reserved for requests with bounds of their own, beside the limit. Each limit is
    simulated with as many sequences as the limit, and with the reserved slots in use as well; the
    worse figure of both counts, for the throughput, too.

    Attributes:
      classes: requests with bounds of their own.
    """

    player: Player
    lengths: TaskLengths
    classes: tuple[RequestClass, ...] = ()

    def estimate(self, schedule: Schedule) -> str:
        return SIMULATED

    def best(self, score: Score, *, least: int = 1) -> Schedule | None:
        """See `ScheduleSpace`.

        Args:
          least: sequences, at least.
        """
        config = self.player.config
        most = max(1, config.max_slots - self.num_reserved)
        if least > most:
            return None
        limits = ContinuousLimits(self.player.times, config, self.lengths)
        sizes = range(least, most + 1)
        search = SizeSearch(lambda size: self.of(size)[1], limits, score, sizes)
        search.run()
        self._descend(search, least)
        return None if search.best is None else self.of(search.best)[0]

    def _descend(self, search: SizeSearch, least: int) -> None:
        """Look for fewer sequences that serve more where memory is short."""
        scores = search.scores
        if search.best is None or self._played(search.best).preempted_share <= _PREEMPTED:
            return
        buckets = self.player.config.slot_buckets
        sizes = [max(1, size - self.num_reserved) for size in buckets]
        for size in sizes:
            if least <= size < search.best:
                search.score_of(size)
        best = min(size for size in scores if scores[size] >= _AS_GOOD * scores[search.best])
        below = max((size for size in sizes if size < best), default=0)
        while best - below > 1 and self._played(best).preempted_share > _PREEMPTED:
            fewer = (below + best) // 2
            is_better = search.score_of(fewer) > scores[best]
            best, below = (fewer, below) if is_better else (best, fewer)

    def nearest(self, schedule: Schedule) -> Schedule:
        most = max(1, self.player.config.max_slots - self.num_reserved)
        return self.of(min(max(1, schedule.max_running), most))[0]

    def estimated(self, schedule: Schedule) -> Estimates:
        return self.of(schedule.max_running)[1]

    def own_latencies_s(self, schedule: Schedule) -> tuple[float, ...]:
        return self._own_latencies_s(schedule.max_running)

    def of(self, max_running: int) -> tuple[Schedule, Estimates]:
        """Return the schedule with at most so many sequences, and what it is expected to do."""
        played = self._played(max_running)
        schedule = Schedule(
            layout=Layout(policy=Policy.CONTINUOUS),
            encode_batch=1,
            encode_tokens=self.lengths.inputs.mean,
            decode_batch=played.mean_running,
            num_decodes=0,
            num_micro_batches=1,
            stages=(),
            max_running=max_running,
        )
        inputs, outputs = self.lengths.inputs, self.lengths.outputs
        length = inputs.mean + outputs.less_one().mean_position
        own_s = self._own_latencies_s(max_running)
        spans = spans_of(self.classes)
        shares = [s / each.bound_s for s, each in zip(own_s, spans, strict=True)]
        return schedule, Estimates(
            fits=np.asarray(inputs.mean + outputs.mean <= self.player.room),
            throughput=np.asarray(played.answers_per_s),
            latency_s=np.asarray(played.latency_s),
            first_token_s=np.asarray(played.first_token_s),
            token_s=np.asarray(played.token_s),
            period_s=np.asarray(1 / played.answers_per_s),
            encode_s=np.asarray(played.first_token_s),
            decode_batch=np.asarray(played.mean_running),
            memory_bytes=np.asarray(played.mean_running * length),
            own_share=np.asarray(max(shares, default=0.0)),
        )

    @property
    def num_reserved(self) -> int:
        """Slots that only requests with bounds of their own may take."""
        return sum(each.num_running for each in self.classes)

    def _played(self, max_running: int) -> Played:
        alone = self._play(max_running)
        if not self.classes:
            return alone
        return alone.or_worse(self._play(max_running + self.num_reserved))

    def _play(self, num_running: int) -> Played:
        shape = Unified(max_running=num_running)
        return self.player.play(shape, self.lengths, num_running)

    def _own_latencies_s(self, max_running: int) -> tuple[float, ...]:
        """Return the seconds of the spans of all classes, with all reserved slots in use.

        A request waits for two steps in flight. Then its prompt is computed beside one token of
        each other answer, in as many steps as a long prompt needs. The last of them has its first
        token.
        """
        config, num_running = self.player.config, max_running + self.num_reserved
        prompt = self.lengths.inputs.percentile(self.lengths.level)
        num_steps = -(-prompt // max(1, config.max_step_tokens - num_running))
        before = 2 * config.max_decode_iterations + num_steps - 1
        played = self._play(num_running)
        return tuple(
            played.span_s(each.num_tokens + each.is_whole * before)
            for each in spans_of(self.classes)
        )
