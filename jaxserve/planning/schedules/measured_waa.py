"""WAA schedules of two existing device groups, from their measured step times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.layer_cost import LayerPhase
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.measured_cost import MeasuredCost, num_tokens_held
from jaxserve.planning.schedules.observed import OwnSpan, RequestClass, spans_of
from jaxserve.planning.schedules.plan import CLOSED_FORM, THRESHOLD
from jaxserve.planning.schedules.planner import SchedulePlanner
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Estimates,
    ParallelLayout,
    Schedule,
)
from jaxserve.planning.schedules.search import Score
from jaxserve.planning.step_times import GroupTimes

# Steps or handovers (two are in flight) that a sequence waits for before its own: at most, and on
# average.
_STEPS_BEFORE = 2
_MEAN_STEPS_BEFORE = 1.5


@final
@dataclass(frozen=True, kw_only=True)
class WAAPlanner(SchedulePlanner):
    """A planner of the WAA schedules of two device groups, for any lengths.

    The groups' devices are given; it chooses B_E, the iterations N of a decode step and the number
    of decoding sequences. It computes every combination that fits the slots, in tenths of a second.

    The slowest of encoding, handing over, decoding and the host, which plans for both groups, sets
    the rate (section 4.1 of ExeGPT). From its admission, an answer of the percentile length takes:
    the encode step in flight, as far as the group is busy, and its own; the handover, which waits
    for another encode step in flight; two decode steps; and its iterations, in whole steps. Both
    groups are assumed to compute all the time.

    Slots are reserved for requests with bounds of their own, in addition to those that run on
    average. Latencies assume them in use, as far as memory allows, and throughput assumes them
    empty. Such a request joins the next encode batch, behind all encode steps in flight.

    Attributes:
      config: returns the present configuration, whose slots and page pool limit the schedule.
      allowed: whether a B_E of 1, 2, ... is allowed, bool [slots]; None for all.
    """

    times: GroupTimes
    config: Callable[[], EngineConfig]
    policy: AllocationPolicy = AllocationPolicy.WAA_C
    allowed: np.ndarray | None = None

    @property
    def max_slots(self) -> int:
        return self.config().max_slots

    def space(self, lengths: TaskLengths, classes: Sequence[RequestClass]) -> WAASpace:
        config, spans = self.config(), spans_of(classes)
        allowed = np.ones(config.max_slots, bool) if self.allowed is None else self.allowed
        return WAASpace.of(
            self.times,
            config,
            lengths,
            spans,
            num_reserved=_reserved(classes),
            policy=self.policy,
            allowed=allowed,
        )


@final
@dataclass(frozen=True, kw_only=True)
class WAASpace:
    """The estimates of all schedules, in arrays over B_E, N and decoding sequences, flattened.

    `num_running` is the mean after an encode batch: up to a batch fewer decode, and more by the
    threshold. `own_s` is the seconds of each span of the classes, [spans, schedules].
    """

    policy: AllocationPolicy
    lengths: TaskLengths
    encode_batch: np.ndarray
    num_iterations: np.ndarray
    num_running: np.ndarray
    estimates: Estimates
    own_s: np.ndarray

    @classmethod
    def of(
        cls,
        times: GroupTimes,
        config: EngineConfig,
        lengths: TaskLengths,
        spans: Sequence[OwnSpan],
        num_reserved: int,
        policy: AllocationPolicy,
        allowed: np.ndarray,
    ) -> WAASpace:
        iterations = lengths.outputs.less_one()
        mean_iterations = max(iterations.mean, 1e-9)
        longest = iterations.percentile(lengths.level)
        steps = _powers_of_two(config.max_decode_iterations)
        batch = np.arange(1, config.max_slots + 1, dtype=np.float64)[:, None, None]
        step = np.array(steps, np.float64)[None, :, None]
        most = max(1, int((config.max_slots - num_reserved) / (1 + THRESHOLD)))
        level = np.arange(1, most + 1, dtype=np.float64)[None, None, :]
        host_s = _host_s(times)

        prompts_s = times.beside[0] * encode_s(times, lengths, batch)
        pages = batch * np.ceil(lengths.inputs.mean / config.page_size)
        link_s = times.handover_s + pages * times.page_s
        decoding_s = times.beside[1] * iteration_s(times, lengths, steps, config.max_slots)
        step_s = np.maximum(np.array(steps)[:, None] * decoding_s, host_s)
        low, high = level * (1 - THRESHOLD), level * (1 + THRESHOLD)
        _, mean_s, running = _between(step_s, low, high)
        length = lengths.inputs.mean + iterations.mean_position
        held = num_tokens_held(config)
        # More sequences would cause preemptions.
        most_running = np.maximum(high, np.minimum(high + num_reserved, held / length))
        longest_s, _, _ = _between(step_s, low, most_running)
        # Answers take whole steps; on average half of the last one is idle.
        num_steps = mean_iterations / step + (step - 1) / (2 * step)

        by_encode = batch / np.maximum(prompts_s, host_s)
        by_link = batch / np.maximum(link_s, host_s)
        # At the limit of running sequences, one is encoded whenever another ends.
        before_s = prompts_s[:1] + link_s[:1] + _MEAN_STEPS_BEFORE * mean_s
        by_level = running / (before_s + num_steps * mean_s)
        rate = np.minimum(np.minimum(by_encode, by_link), by_level)
        # A period has an encode step, a handover, and the decode steps during these.
        host_share = host_s * (2 / batch + 1 / (rate * mean_s))
        rate = rate / np.maximum(1.0, rate * host_share)

        busy = rate * prompts_s / batch
        first_s = (1 + THRESHOLD) * prompts_s * (1 + busy)
        handed_s = link_s + busy * prompts_s
        latency_s = first_s + handed_s + (_STEPS_BEFORE + np.ceil(longest / step)) * longest_s
        fits = (level * length <= held) & (batch <= level) & allowed[:, None, None]
        shape = np.broadcast_shapes(rate.shape, latency_s.shape)

        def flat(values: np.ndarray) -> np.ndarray:
            return np.broadcast_to(values, shape).reshape(-1)

        # The worst case: a long prompt, and all possible steps in flight before it.
        long_s = prompts_s[:1] * lengths.inputs.percentile(lengths.level) / lengths.inputs.mean
        own_first_s = (1 + THRESHOLD) * prompts_s * (1 + _STEPS_BEFORE) + long_s

        def own_s(span: OwnSpan) -> np.ndarray:
            num_later = span.num_tokens - span.is_whole
            handed_s = (1 + _STEPS_BEFORE) * link_s + _STEPS_BEFORE * prompts_s
            later_s = handed_s + (_STEPS_BEFORE + np.ceil(num_later / step)) * longest_s
            return own_first_s * span.is_whole + (later_s if num_later else 0.0)

        own = np.array([flat(own_s(span)) for span in spans]).reshape(len(spans), math.prod(shape))
        bounds_s = np.array([span.bound_s for span in spans]).reshape(-1, 1)
        return cls(
            policy=policy,
            lengths=lengths,
            encode_batch=flat(batch),
            num_iterations=flat(step),
            num_running=flat(level),
            estimates=Estimates(
                fits=flat(fits),
                throughput=flat(rate),
                latency_s=flat(latency_s),
                first_token_s=flat(first_s),
                token_s=flat((latency_s - first_s) / max(longest, 1)),
                period_s=flat(batch / rate),
                encode_s=flat(prompts_s),
                decode_batch=flat(running),
                memory_bytes=flat(level * length),
                own_share=np.max(own / bounds_s, axis=0, initial=0.0),
            ),
            own_s=own,
        )

    def estimate(self, schedule: Schedule) -> str:
        return CLOSED_FORM

    def best(self, score: Score) -> Schedule | None:
        scores = score(self.estimates)
        index = int(np.argmax(scores))
        return self._schedule(index) if scores[index] > 0 else None

    def nearest(self, schedule: Schedule) -> Schedule:
        return self._schedule(self._index(schedule))

    def estimated(self, schedule: Schedule) -> Estimates:
        return self.estimates[self._index(schedule)]

    def own_latencies_s(self, schedule: Schedule) -> tuple[float, ...]:
        index = self._index(schedule)
        return tuple(float(each[index]) for each in self.own_s)

    def find(self, encode_batch: int, num_iterations: int, num_running: int) -> Schedule | None:
        """Return the schedule with this B_E, N and number of sequences; None if there is none."""
        same = (self.encode_batch == encode_batch) & (self.num_iterations == num_iterations)
        found = np.flatnonzero(same & (self.num_running == num_running))
        return self._schedule(int(found[0])) if len(found) else None

    def _index(self, schedule: Schedule) -> int:
        same = (self.encode_batch == schedule.encode_batch) & (
            self.num_iterations == schedule.num_decodes
        )
        away = np.abs(self.num_running - schedule.decode_batch)
        return int(np.argmin(np.where(same, away, np.inf)))

    def _schedule(self, index: int) -> Schedule:
        batch = int(self.encode_batch[index])
        return Schedule(
            layout=ParallelLayout(policy=self.policy),
            encode_batch=batch,
            encode_tokens=batch * self.lengths.inputs.mean,
            decode_batch=float(self.num_running[index]),
            num_decodes=int(self.num_iterations[index]),
            num_micro_batches=1,
            stages=(),
        )


def _reserved(classes: Sequence[RequestClass]) -> int:
    return sum(each.num_running for each in classes)


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _host_s(times: GroupTimes) -> float:
    return max(each.plan_s + each.submit_s for each in times.groups)


def _cost(times: GroupTimes, lengths: TaskLengths, group: int, num_decodes: int) -> MeasuredCost:
    return MeasuredCost(
        times=times.groups[group],
        input_tokens=lengths.inputs.mean,
        num_iterations=lengths.outputs.less_one().mean,
        num_decodes=num_decodes,
    )


def encode_s(times: GroupTimes, lengths: TaskLengths, batch: np.ndarray) -> np.ndarray:
    cost, inputs = _cost(times, lengths, 0, 1), lengths.inputs
    rest_s = cost.rest_s(LayerPhase.ENCODE, batch * inputs.mean, 1)
    attention_s = cost.attention_s(LayerPhase.ENCODE, batch, math.sqrt(inputs.mean_square), 1)
    # Unlike RRA, the group's next batch is planned before this one is computed.
    return rest_s + attention_s - (times.groups[0].plan_s + times.groups[0].submit_s)


def iteration_s(
    times: GroupTimes, lengths: TaskLengths, steps: list[int], max_decoding: int
) -> np.ndarray:
    """Return the decode group's seconds per iteration [steps, max_decoding], by step length."""
    length = lengths.inputs.mean + lengths.outputs.less_one().mean_position
    decoding = np.arange(1, max_decoding + 1, dtype=np.float64)
    found = []
    for num in steps:
        cost = _cost(times, lengths, 1, num)
        attention_s = cost.attention_s(LayerPhase.DECODE, decoding, length, 1)
        found.append(cost.rest_s(LayerPhase.DECODE, decoding, 1) + attention_s)
    return np.stack(found)


def _between(
    step_s: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the longest and the mean step, and the mean sequences, in ranges of sequences.

    Args:
      step_s: seconds [steps, sequences] of a decode step for 1, 2, ... sequences.
      low, high: ends of the non-empty ranges, [1, 1, levels].
    """
    most = step_s.shape[1]
    last = np.clip(np.floor(high + 1e-9).astype(int), 1, most)
    first = np.clip(np.ceil(low).astype(int), 1, last)
    which = np.arange(len(step_s))[None, :, None]
    sums = np.concatenate([np.zeros((len(step_s), 1)), np.cumsum(step_s, axis=1)], axis=1)
    mean_s = (sums[which, last] - sums[which, first - 1]) / (last - first + 1)
    return step_s[which, last - 1], mean_s, (first + last) / 2
