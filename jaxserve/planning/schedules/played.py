"""Figures of an engine under full load, by short simulations that drive the real scheduler."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.planning.simulator import simulated_engine
from jaxserve.planning.step_times import StepTimes
from jaxserve.scheduling.policy import IterationShape, Policy
from jaxserve.scheduling.retention import Stateless
from jaxserve.scheduling.scheduler import Progress
from jaxserve.scheduling.sequence import Sequence as Scheduled
from jaxserve.workload import WorkloadItem

# Requests of a block, with one length from each of this many equal shares of a distribution.
_BLOCK = 32


@final
class DrawnRequests:
    """An endless stream of requests with lengths of a task, the same at every start.

    Lengths are drawn in blocks, one from each of 32 equal shares of a distribution, in random
    order. So the mean over a few blocks is close to that of the distribution. Prompts and answers
    are independent. Lengths that exceed the engine are cut.
    """

    def __init__(self, lengths: TaskLengths, config: EngineConfig, *, seed: int = 0):
        self._num_tokens = 0
        self._num_uncut = 0
        self._config = config
        self._longest = lengths.outputs.max_length
        rng = np.random.default_rng(seed)
        self._inputs = _drawn(lengths.inputs, rng)
        self._outputs = _drawn(lengths.outputs, rng)

    @property
    def uncut_share(self) -> float:
        """Tokens of the answers so far, over those that were drawn."""
        return self._num_tokens / self._num_uncut

    def next(self) -> WorkloadItem:
        config = self._config
        num_prompt = min(max(1, next(self._inputs)), config.max_prompt_tokens)
        uncut = max(1, next(self._outputs))
        num_output = min(uncut, config.max_length - _context(num_prompt, config))
        self._num_uncut += uncut
        self._num_tokens += num_output
        return WorkloadItem(
            prompt_token_ids=(1,) * num_prompt,
            num_output_tokens=num_output,
            max_tokens=max(1, self._longest),
        )


def _context(num_prompt: int, config: EngineConfig) -> int:
    if not config.has_encoder:
        return num_prompt
    return -(-num_prompt // config.page_size) * config.page_size + 1


def _drawn(distribution: LengthDistribution, rng: np.random.Generator) -> Iterator[int]:
    reached = np.cumsum(distribution.probabilities)
    while True:
        quantiles = (rng.permutation(_BLOCK) + rng.random(_BLOCK)) / _BLOCK
        found = np.searchsorted(reached, quantiles * reached[-1], side="right")
        yield from np.minimum(found, distribution.max_length).tolist()


# Fewest starts of an answer of the 99th-percentile length that are measured to its end.
_LEAST_STARTS = 24
# Fewest answers that end in the measured time, and how many more per running sequence.
_LEAST_ENDED = 64
_ENDED_EACH = 1.5
# Fewest answers measured from admission to end whose own times determine the latency.
_FEWEST_WHOLE = 48
# Steps after which a few of either suffice.
_MANY_STEPS = 2000
_FEW = 4
# Steps after which a simulation ends in any case.
_MOST_STEPS = 20_000
# Shares of the answers within the returned latencies. The slowest first token may be any answer's,
# but only one answer in a hundred is long.
_WITHIN = 0.95
_FIRST_WITHIN = 0.99
# Returned latencies over simulated ones. Callers and other work on the machine slow steps down: of
# 144 runs of other schedules on two cores, a fifth had a p99 over 1.13 times the simulated one, and
# half of them over 1.05 times (`benchmarks.exegpt.bounds`).
LONGER = 1.13
# Simulations to keep.
_MOST_KEPT = 512


@final
@dataclass(frozen=True, kw_only=True)
class Played:
    """Figures of a schedule in a simulation with a queue that never empties.

    The latencies of tokens are those of a shape that computes prompts and answers in the same step,
    as `Unified` does. All latencies are the simulated ones times `LONGER`.

    Attributes:
      latency_s: seconds from admission to end within which the share of answers ends that is no
        longer than the percentile length. If few answers were measured whole, the seconds of an
        answer of that length, which 95 % of such answers do not exceed.
      first_token_s: seconds from admission to the first token, which 99 % of all answers do not
        exceed.
      token_s: seconds per token after the first of an answer of the percentile length, as
        `latency_s`.
      step_s: mean seconds of a step, times `LONGER`.
      mean_running: running sequences, averaged over steps.
      preempted_share: share of the answers that were preempted.
      advances: times in seconds at which running answers advanced, and the tokens that each has got
        until then, float [2, steps].
    """

    answers_per_s: float
    latency_s: float
    first_token_s: float
    token_s: float
    step_s: float
    mean_running: float
    preempted_share: float
    advances: np.ndarray = field(compare=False, repr=False)

    def span_s(self, num_tokens: int) -> float:
        """Return the seconds in which 99 % of running answers get `num_tokens` tokens.

        If the simulation was too short, it scales the seconds of an answer of the percentile
        length, or of steps if all answers have one token.
        """
        at_s, gained = self.advances
        reached = np.searchsorted(gained, gained + num_tokens)
        starts = np.flatnonzero(reached < len(gained))
        if not len(starts):
            return num_tokens * (self.token_s or self.step_s)
        return LONGER * _quantile(at_s[reached[starts]] - at_s[starts], _FIRST_WITHIN)

    def or_worse(self, other: Played) -> Played:
        """Return the worse figure of each of two simulations; the spans are those of `other`."""
        longest = (
            "latency_s",
            "first_token_s",
            "token_s",
            "step_s",
            "mean_running",
            "preempted_share",
        )
        return replace(
            other,
            answers_per_s=min(self.answers_per_s, other.answers_per_s),
            **{name: max(getattr(self, name), getattr(other, name)) for name in longest},
        )


@final
class Player:
    """A thread-safe cache of simulations of one engine's schedules under full load.

    A simulation has the engine's policy with another iteration shape, its page accounting, and its
    step times. It has no prefix cache, because plans assume that prompts are computed, and no
    length predictions. It takes tenths of a second and is deterministic.

    Attributes:
      num_played: simulations so far.
      num_steps: steps in them, which take most of a plan's time.
    """

    def __init__(self, times: StepTimes, policy: Policy, config: Callable[[], EngineConfig]):
        self.num_played = 0
        self.num_steps = 0
        self.times = times
        self._policy = replace(policy, retention=Stateless())
        self._config = config
        self._known: dict[Any, Played] = {}

    @property
    def config(self) -> EngineConfig:
        """The engine's present configuration without speculation, on which plans do not count."""
        return self._config().without_proposals()

    @property
    def room(self) -> int:
        return self.config.pool_tokens

    def play(
        self,
        iteration: IterationShape[Any],
        lengths: TaskLengths,
        num_running: float,
        *,
        warm_up: float = 1.5,
        seed: int = 0,
    ) -> Played:
        """Return the figures of an iteration shape for requests of these lengths.

        Args:
          iteration: a hashable shape for one device group.
          num_running: expected running sequences, which determine the measured time.
          warm_up: answers that end before the measured time, per running sequence.
          seed: of the drawn lengths.
        """
        config = self.config
        parts = lengths.inputs.probabilities, lengths.outputs.probabilities
        known = (
            iteration,
            config,
            lengths.level,
            warm_up,
            seed,
            *(part.tobytes() for part in parts),
        )
        played = self._known.get(known)
        if played is None:
            trace = _Trace(lengths.outputs.percentile(lengths.level), lengths.level)
            played = self._simulated(iteration, config, lengths, num_running, warm_up, seed, trace)
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[known] = played
        return played

    def _simulated(
        self,
        iteration: IterationShape[Any],
        config: EngineConfig,
        lengths: TaskLengths,
        num_running: float,
        warm_up: float,
        seed: int,
        trace: _Trace,
    ) -> Played:
        self.num_played += 1
        policy = replace(self._policy, iteration=iteration)
        engine, clock, builder = simulated_engine(policy, config, self.times)
        requests = DrawnRequests(lengths, config, seed=seed)
        while not trace.is_enough(num_running):
            while engine.scheduler.num_waiting < config.max_slots:
                engine.add(builder.build_item(requests.next(), clock.now()))
            news = engine.step()
            self.num_steps += 1
            trace.add(news, clock.now(), len(engine.scheduler.running))
            if trace.num_ended >= warm_up * num_running:
                trace.begin(clock.now())
        # Cut answers are shorter than the distribution's.
        return trace.played(lengths.outputs.mean * requests.uncut_share)


@final
class _Trace:
    """The events of a simulation; figures count from `begin`."""

    def __init__(self, longest: int, level: float):
        self.num_ended = 0
        self._level = level
        self._num_tokens = max(0, longest - 1)
        self._begin_s: float | None = None
        self._end_s = 0.0
        self._num_delivered = 0
        self._num_measured = 0
        # (seconds from admission to first token, its time) of each answer.
        self._firsts: list[tuple[float, float]] = []
        # (admission, end) of each answer that was admitted since `begin`.
        self._answers: list[tuple[float, float]] = []
        # (seconds, tokens) after the first token, of each answer that began since `begin`.
        self._spans: list[tuple[float, int]] = []
        # The same for each preempted answer.
        self._preempted: list[tuple[float, int]] = []
        # Times at which running answers advanced, and the tokens that each has got until then.
        self._gained_s: list[float] = []
        self._gained: list[int] = []
        self._running: list[int] = []

    def begin(self, now_s: float) -> None:
        if self._begin_s is None:
            self._begin_s = self._end_s = now_s

    def add(self, news: Sequence[Progress], now_s: float, num_running: int) -> None:
        if self._begin_s is None:
            self.num_ended += sum(each.sequence.finish_reason is not None for each in news)
            return
        self._end_s = now_s
        self._running.append(num_running)
        gained = 0
        for each in news:
            sequence, times = each.sequence, each.sequence.times
            self._num_delivered += each.num_new
            is_first = each.num_new and len(sequence.output) == each.num_new
            if is_first and times.admitted_s is not None:
                self._firsts.append((now_s - times.admitted_s, now_s))
            elif each.num_new:
                gained = max(gained, each.num_new)
            if sequence.finish_reason is not None:
                self._end(sequence)
        if gained:
            self._gained_s.append(now_s)
            self._gained.append(gained + (self._gained[-1] if self._gained else 0))

    def _end(self, sequence: Scheduled) -> None:
        self.num_ended += 1
        self._num_measured += 1
        times = sequence.times
        if times.first_token_s is None or times.finished_s is None or self._begin_s is None:
            return
        if times.admitted_s is not None and times.admitted_s >= self._begin_s:
            self._answers.append((times.admitted_s, times.finished_s))
        span = (times.finished_s - times.first_token_s, len(sequence.output) - 1)
        if span[1] and times.first_token_s >= self._begin_s:
            self._spans.append(span)
            if sequence.num_preemptions:
                self._preempted.append(span)

    def is_enough(self, num_running: float) -> bool:
        enough, starts = _LEAST_ENDED + _ENDED_EACH * num_running, _LEAST_STARTS
        if len(self._running) >= _MANY_STEPS:
            enough = starts = _FEW
            # If all answers are cut to one token, none advances.
            if not self._gained or len(self._running) >= _MOST_STEPS:
                return True
        return self._num_measured >= enough and self._num_starts >= starts

    @property
    def _num_starts(self) -> int:
        """Answers whose first token came early enough for an answer of the percentile length."""
        if not self._num_tokens:
            return len(self._firsts)
        if not self._gained or self._gained[-1] <= self._num_tokens:
            return 0
        latest = bisect.bisect_right(self._gained, self._gained[-1] - self._num_tokens) - 1
        last_s = self._gained_s[latest] if latest >= 0 else -math.inf
        return bisect.bisect_right(self._firsts, last_s, key=lambda each: each[1])

    def played(self, mean_tokens: float) -> Played:
        elapsed_s, answers_s = self._end_s - (self._begin_s or 0.0), self._answers_s()
        mean_running = float(np.mean(self._running))
        firsts_s = np.array([first_s for first_s, _ in self._firsts])
        decoding_s = self._decoding_s(mean_running)
        starts_s = firsts_s[: len(decoding_s)]
        latency_s = (
            _quantile(answers_s, self._level)
            if len(answers_s) >= _FEWEST_WHOLE
            else _quantile(starts_s + decoding_s, _WITHIN)
        )
        return Played(
            answers_per_s=self._num_delivered / elapsed_s / mean_tokens,
            latency_s=LONGER * latency_s,
            first_token_s=LONGER * _quantile(firsts_s, _FIRST_WITHIN),
            token_s=LONGER * _quantile(decoding_s, _WITHIN) / max(1, self._num_tokens),
            step_s=LONGER * elapsed_s / len(self._running),
            mean_running=mean_running,
            preempted_share=len(self._preempted) / max(1, len(self._spans)),
            advances=np.array([self._gained_s, self._gained], np.float64),
        )

    def _answers_s(self) -> np.ndarray:
        """Return the seconds of the answers admitted early enough to end at any length."""
        admitted_s, ended_s = np.array(self._answers).reshape(-1, 2).T
        seconds = ended_s - admitted_s
        is_early = admitted_s <= self._end_s - seconds.max(initial=0.0)
        return seconds[is_early]

    def _decoding_s(self, mean_running: float) -> np.ndarray:
        """Return the seconds of long answers after their first tokens [starts], at each start.

        The mean is that of answers of all lengths, per token. The deviations are those of the times
        in which running answers advance by that many tokens, less the share of the answers that
        took the long one's own place meanwhile.
        """
        if not self._num_starts or not self._num_tokens:
            seconds, tokens = np.array([*self._spans, (0.0, 1e-9)]).T
            mean_s = seconds.sum() / tokens.sum() * self._num_tokens
            return np.full(len(self._firsts), mean_s)
        gained_s, gained = np.array(self._gained_s), np.array(self._gained)
        begins_s = np.array([when_s for _, when_s in self._firsts])[: self._num_starts]
        before = np.searchsorted(gained_s, begins_s, side="right")
        reached = np.concatenate([[0], gained])[before] + self._num_tokens
        spent_s = gained_s[np.searchsorted(gained, reached)] - begins_s
        if not self._spans:  # all were preempted before, or are running
            return spent_s
        seconds, tokens = np.array(self._spans).T
        mean_s = seconds.sum() / tokens.sum() * self._num_tokens
        others = max(0.0, mean_running - 1) / max(1.0, mean_running)
        return mean_s * self._stretch() * (1 + (spent_s / spent_s.mean() - 1) * others)

    def _stretch(self) -> float:
        """Return how many times as long preempted answers take, if they are over 1 % of all."""
        if len(self._preempted) <= 0.01 * len(self._spans):
            return 1.0
        seconds, tokens = np.array(self._spans).T
        away_s, away_tokens = np.array(self._preempted).T
        longer = (away_s / away_tokens) / (seconds.sum() / tokens.sum())
        return max(1.0, _quantile(longer, _WITHIN))


def _quantile(values: np.ndarray, share: float) -> float:
    return float(np.quantile(values, share, method="higher")) if len(values) else 0.0
