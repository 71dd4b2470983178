"""What continuous batching cannot beat, from step times alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig, bucket
from jaxserve.planning.schedules.estimates import Best
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.played import LONGER
from jaxserve.planning.step_times import Curve, StepTimes

# How many times the share of the answers beyond the percentile may be left out by a simulation of
# few answers.
_FEW_ANSWERS = 4
# By how much a simulation's throughput may be above that of the mean lengths.
_DEVIATION = 1.05
# How many times the expected mixed steps there may be.
_MORE_MIXED = 1.5
# Seconds, where nothing is known.
_NO_TIME_S = 1e-9


@final
@dataclass(frozen=True)
class ContinuousLimits:
    """Figures that no simulation of continuous batching has, for any number of sequences.

    While N sequences run, an iteration takes at least as long as a decode iteration of the compiled
    size for N, or, as often as prompts come, as a mixed step of N tokens. Each iteration gives a
    sequence one token at most. So does the step that ends its prompt. Where an iteration may give
    a sequence several tokens, nothing is known. Where memory may be short, fewer may run.
    """

    times: StepTimes
    config: EngineConfig
    lengths: TaskLengths

    def of(self, sizes: np.ndarray) -> Best:
        """Return the limits with at most so many sequences, [sizes] each."""
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
        room = (self.config.num_pages - 1) * self.config.page_size
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
        """Tokens of an answer that the context has room for, at least; others are cut."""
        config = self.config
        prompt = min(self.lengths.inputs.max_length, config.max_prompt_tokens)
        encoded = config.page_size + 1 if config.has_encoder else 0
        return max(1, config.max_length - prompt - encoded)

    def _iteration_s(self, num_running: int, mean: float) -> float:
        """Return the seconds of an iteration on average; `mean` are the tokens of an answer."""
        config, inputs = self.config, self.lengths.inputs
        prompt = inputs.max_length + config.page_size + 1
        longest = min(config.max_length, prompt + self.lengths.outputs.max_length)
        room = (config.num_pages - 1) // -(-longest // config.page_size)
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
