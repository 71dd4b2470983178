"""The search for the best number of running sequences in continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.observed import RequestClass, spans_of
from jaxserve.planning.schedules.plan import SIMULATED
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.played import LONGER, Played, Player
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Best,
    Estimates,
    LatencyBounds,
    ParallelLayout,
    Schedule,
)
from jaxserve.planning.schedules.search import Score, throughput_under
from jaxserve.planning.step_times import Curve, StepTimes
from jaxserve.scheduling.iteration.continuous import Unified

# Factor by which a simulation of few answers may leave out more answers than the percentile.
_FEW_ANSWERS = 4
# Factor by which a simulation's throughput may exceed that of the mean lengths.
_DEVIATION = 1.05
# Factor by which mixed steps may exceed their expected number.
_MORE_MIXED = 1.5
# Seconds if nothing is known.
_NO_TIME_S = 1e-9


@final
@dataclass(frozen=True)
class ContinuousLimits:
    """Figures that no simulation of continuous batching can beat, for any number of sequences.

    While N sequences run, an iteration takes at least as long as a decode iteration of the compiled
    size for N, or, as often as prompts arrive, as a mixed step of N tokens. An iteration, or the
    step that ends a prompt, yields at most one token of a sequence. With speculation, which may
    yield several, no limit is known. With short memory, fewer sequences may run.
    """

    times: StepTimes
    config: EngineConfig
    lengths: TaskLengths

    def of(self, sizes: np.ndarray) -> Best:
        """Return the limits for each maximum number of sequences, [sizes] each."""
        outputs, level = self.lengths.outputs, self.lengths.level
        most = self._least_room
        mean = float(np.minimum(np.arange(outputs.max_length + 1), most) @ outputs.probabilities)
        longest = min(most, outputs.percentile(max(0.0, 1 - _FEW_ANSWERS * (1 - level))))
        prompt_s, iteration_s = 0.0, np.zeros(len(sizes))
        if not self.config.num_proposed:
            prompt_s = min(map(_least_s, (self.times.encode_s or self.times.prefill_s).values()))
            iteration_s = np.array([self._iteration_s(size, mean) for size in sizes.tolist()])
        answer_s = np.maximum(_NO_TIME_S, prompt_s + max(0.0, mean - 1) * iteration_s)
        latency_s = prompt_s + max(0, longest - 1) * iteration_s
        token_s = iteration_s * (longest > 1)
        room = self.config.pool_tokens
        return Best(
            fits=np.full(len(sizes), self.lengths.inputs.mean + outputs.mean <= room),
            throughput=_DEVIATION * sizes / answer_s,
            latency_s=np.maximum(_NO_TIME_S, LONGER * latency_s),
            first_token_s=np.full(len(sizes), max(_NO_TIME_S, LONGER * prompt_s)),
            token_s=np.maximum(_NO_TIME_S, LONGER * token_s),
            own_share=np.zeros(len(sizes)),
        )

    def prompt_s(self) -> float:
        """Return the seconds of a prompt of mean length in full steps, for a first guess."""
        curves = self.times.encode_s or self.times.prefill_s
        return self.lengths.inputs.mean * min(_least_s(c) / size for size, c in curves.items())

    @property
    def _least_room(self) -> int:
        """The fewest tokens of an answer that fit in the context; longer answers are cut."""
        config = self.config
        prompt = min(self.lengths.inputs.max_length, config.max_prompt_tokens)
        encoded = config.page_size + 1 if config.has_encoder else 0
        return max(1, config.max_length - prompt - encoded)

    def _iteration_s(self, num_running: int, mean: float) -> float:
        """Return the least mean seconds of an iteration; `mean` is the tokens of an answer."""
        config, inputs = self.config, self.lengths.inputs
        prompt = inputs.max_length + config.page_size + 1
        longest = min(config.max_length, prompt + self.lengths.outputs.max_length)
        room = config.pool_tokens // config.page_size // -(-longest // config.page_size)
        certain = max(1, min(num_running, room))
        size = bucket(certain, config.slot_buckets)
        loop_s = self.times.loop_s[size] / config.max_decode_iterations
        decode_s = _least_s(self.times.decode_s[size]) + max(0.0, loop_s)
        mixed_s = _least_s(self.times.prefill_s[bucket(certain, config.token_buckets)])
        num_steps = 1 + inputs.mean / max(1, config.max_step_tokens - num_running)
        num_mixed = _MORE_MIXED * num_steps * num_running / max(1.0, mean)
        mixed_share = min(1.0, num_mixed) if certain == num_running else 1.0
        return decode_s - mixed_share * max(0.0, decode_s - mixed_s)


def _least_s(curve: Curve) -> float:
    return max(0.0, min(curve(0.0), *(seconds for _, seconds in curve.points)))


# Share by which expected latencies may be too long; close to simulated sizes it is less.
_SLACK = 0.01
# Share by which an expected score must exceed the best for another simulation.
_GAIN = 0.01
# The delay of tokens by other sequences' prompts grows with this power of the sequences.
_GROWTH = 0.75
_LATENCIES = ("latency_s", "first_token_s", "token_s")


@final
class SizeSearch:
    """A search over numbers of sequences that simulates those with the highest expected score.

    Expectations are the limits plus the costs of prompts: per answer for the engine's time, and per
    running sequence for latencies, because prompts of other sequences delay its tokens. Both costs
    come from simulated sizes and are interpolated between them. `scores` has the simulated sizes.
    """

    def __init__(
        self,
        simulated: Callable[[int], Estimates],
        limits: ContinuousLimits,
        score: Score,
        sizes: range,
    ):
        self.scores: dict[int, float] = {}
        self._simulated = simulated
        self._score = score
        self._sizes = np.array(sizes)
        self._limits = limits.of(self._sizes)
        self._prompt_s = limits.prompt_s()

    @property
    def best(self) -> int | None:
        """The number of sequences with the highest score, if that is above 0."""
        best = max(self.scores, key=lambda size: self.scores[size], default=None)
        return best if best is not None and self.scores[best] > 0 else None

    def score_of(self, size: int) -> float:
        if size not in self.scores:
            self.scores[size] = float(self._score(self._simulated(size)))
        return self.scores[size]

    def run(self) -> None:
        """Simulate sizes until none is expected to have a higher score."""
        while (size := self._next()) is not None:
            self.score_of(size)

    def _next(self) -> int | None:
        most = max(self.scores.values(), default=0.0)
        may_gain = (self._score(self._limits) > most) & ~np.isin(self._sizes, list(self.scores))
        if not may_gain.any():
            return None
        expected = self._expected()
        scores = np.where(may_gain, self._score(expected), 0.0)
        first = int(np.argmax(scores))
        if scores[first] > most * (1 + _GAIN):
            return int(self._sizes[first])
        if self.scores:
            return None
        # Simulate at least one size: a first guess alone rules none out.
        return int(self._sizes[np.argmin(np.where(may_gain, expected.latency_s, np.inf))])

    def _expected(self) -> Best:
        sizes, limits = self._sizes, self._limits
        known = sorted(self.scores)
        figures = [self._simulated(size) for size in known]

        def beside(values: np.ndarray) -> list[tuple[Estimates, float]]:
            return list(zip(figures, values[np.searchsorted(sizes, known)], strict=True))

        def between(values: list[float], otherwise: float) -> np.ndarray:
            return np.interp(sizes, known, values) if known else np.full(len(sizes), otherwise)

        periods_s = [float(1 / f.throughput - p) for f, p in beside(1 / limits.throughput)]
        longer = {}
        for name in _LATENCIES:
            least, times = getattr(limits, name), sizes**_GROWTH
            each_s = [float(getattr(f, name) - s) for f, s in beside(least)]
            each_s = [s / n**_GROWTH for s, n in zip(each_s, known, strict=True)]
            longer[name] = (1 - _SLACK) * np.maximum(least, least + between(each_s, 0.0) * times)
        shares = [float(f.own_share / s) for f, s in beside(longer["token_s"])]
        own_share = (1 - _SLACK) * between(shares, 0.0) * longer["token_s"]
        periods_s = 1 / limits.throughput + between(periods_s, self._prompt_s)
        return replace(
            limits, throughput=1 / np.maximum(periods_s, 1e-12), own_share=own_share, **longer
        )


# Share of preempted answers above which memory counts as short.
_PREEMPTED = 0.01
# Share of the highest score that simulations cannot distinguish from it.
_AS_GOOD = 0.99


@final
@dataclass(frozen=True)
class ContinuousPlanner(SchedulePlanner):
    """A planner of continuous batching on one engine; `player` simulates the engine."""

    player: Player

    @property
    def max_slots(self) -> int:
        return self.player.config.max_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> ContinuousSpace:
        return ContinuousSpace(self.player, lengths, tuple(classes))

    def _chosen(self, space: ContinuousSpace, bounds: LatencyBounds) -> Schedule | None:
        # Simulated throughputs do not tie.
        return space.best(throughput_under(bounds))


@final
@dataclass(frozen=True)
class ContinuousSpace:
    """Continuous batching of 1, 2, ... sequences at once, up to the number of slots.

    Figures come from simulations (`Player`). Step times alone rule out some sizes
    (`ContinuousLimits`). Of the others, those with the highest expected score are simulated
    (`SizeSearch`). If answers are preempted because memory is short, fewer sequences may serve
    more: smaller compiled sizes are simulated, too, and a bisection finds the smallest size that is
    as good.

    Slots are reserved for `classes`, requests with bounds of their own, in addition to the limit.
    Each limit is simulated with the reserved slots empty and in use; every figure is the worse of
    both.
    """

    player: Player
    lengths: TaskLengths
    classes: tuple[RequestClass, ...] = ()

    def estimate(self, schedule: Schedule) -> str:
        return SIMULATED

    def best(self, score: Score, *, least: int = 1) -> Schedule | None:
        """Return the schedule with the highest score, of at least `least` sequences."""
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
        """Search for fewer sequences that serve more where memory is short."""
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
        played = self._played(max_running)
        schedule = Schedule(
            layout=ParallelLayout(policy=AllocationPolicy.CONTINUOUS),
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

        A request waits for two steps in flight and for its prompt's, each with a token of every
        answer.
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
