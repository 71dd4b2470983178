"""How long steps take, and the slack of running sequences with a latency bound."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.order import OrderKeys
from jaxserve.scheduling.sequence import Sequence

# Share by which the expected seconds of an answer may be wrong, in both directions.
_MARGIN = 0.2


@final
@dataclass(frozen=True, kw_only=True)
class Pace:
    """Median seconds of the newest steps of an engine.

    Attributes:
      iteration_s: an iteration of any step; a mixed step is one iteration.
      decode_s: an iteration of a decode loop; `iteration_s` if there was none.
      prefill_s: a mixed step; `iteration_s` if there was none.
    """

    iteration_s: float
    decode_s: float
    prefill_s: float

    @property
    def fastest_s(self) -> float:
        return min(self.iteration_s, self.decode_s)


@final
class Slack:
    """The time that running sequences with a bound (`bounded`) have left, in one step."""

    def __init__(
        self,
        bounded: Seq[Sequence],
        keys: OrderKeys,
        lengths: LengthTracker,
        config: EngineConfig,
        pace: Pace,
        now_s: float,
    ):
        self._keys = keys
        self._config = config
        self._prompt_s = max(0.0, pace.prefill_s - pace.decode_s)
        # Of each bound: its sequence, the seconds that it leaves, and the seconds needed.
        self._left: list[tuple[Sequence, float, float]] = []
        for sequence, tokens in zip(bounded, lengths.expected_tokens(bounded), strict=True):
            for due_s, needed_s in _needs(sequence, tokens, config, pace):
                self._left.append((sequence, due_s - now_s, needed_s))

    def is_too_small_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence has to wait so that sequences before it in order are in time.

        It has to if the steps that compute its prompt would make one of them late that would be in
        time without them.
        """
        num_steps = -(-sequence.num_uncomputed // self._config.max_step_tokens)
        for each, left_s, alone in self._left:
            if each.kv.group != sequence.kv.group:  # prompts are computed elsewhere
                continue
            if self._keys.of(each) < self._keys.of(sequence):
                # Its steps in flight may compute prompts, too.
                num_mixed = num_steps + each.num_in_flight
                needed_s = (1 + _MARGIN) * alone + num_mixed * self._prompt_s
                if (1 - _MARGIN) * alone <= left_s < needed_s:
                    return True
        return False


def _needs(
    sequence: Sequence, tokens: float, config: EngineConfig, pace: Pace
) -> Iterator[tuple[float, float]]:
    """Yield when each bound ends, and the seconds that are needed until then."""
    request, first_s = sequence.request, sequence.times.first_token_s
    params = request.params
    if params.first_token_bound is not None and first_s is None and sequence.num_uncomputed:
        yield request.arrival_s + params.first_token_bound, prompt_s(sequence, config, pace)
    whole_s = alone_s(sequence, tokens, config, pace)
    if params.latency_bound is not None:
        yield request.arrival_s + params.latency_bound, whole_s
    if params.token_bound is not None and first_s is not None:
        num_tokens = len(sequence.output) + tokens - 1  # after the first
        yield first_s + num_tokens * params.token_bound, whole_s


def prompt_s(sequence: Sequence, config: EngineConfig, pace: Pace) -> float:
    """Return the seconds of the steps that compute the rest of a sequence's prompt."""
    return -(-sequence.num_uncomputed // config.max_step_tokens) * pace.prefill_s


def alone_s(sequence: Sequence, tokens: float, config: EngineConfig, pace: Pace) -> float:
    """Return the seconds of a running sequence from now on if no other prompt is computed."""
    iteration_s = pace.fastest_s
    tokens += sequence.num_planned_outputs - len(sequence.output)  # those in flight
    return (sequence.num_uncomputed / config.max_step_tokens + tokens) * iteration_s
