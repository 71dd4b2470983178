"""Decode phases of every length: how many sequences they compute, and how many tokens they hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.lengths import LengthDistribution

# Parts of a decode phase, each with its mean batch.
NUM_PARTS = 4
# Longest phases whose peaks of memory are all computed, and the steps between longer ones.
_EXACT, _LONGER = 512, 1.01


@final
class RangeLeast:
    """The smallest values over ranges of an array's first index, in constant time each.

    Level k of its table has the smallest of 2^k values from each index on; two of them, which may
    overlap, cover a range.
    """

    def __init__(self, values: np.ndarray):
        levels = [values]
        for level in range(len(values).bit_length() - 1):
            before, step = levels[-1], 1 << level
            least = before.copy()
            least[:-step] = np.minimum(before[:-step], before[step:])
            levels.append(least)
        self._levels = np.stack(levels)

    def __call__(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the smallest values at the indices from `first` to `last`, both included."""
        level = np.frexp(last - first + 1)[1] - 1
        later = last + 1 - (1 << level)
        return np.minimum(self._levels[level, first], self._levels[level, later])


@final
@dataclass(frozen=True, kw_only=True)
class DecodePhases:
    """Steady states of RRA for N_D = 0, 1, ..., per sequence that is encoded a round.

    Arrays are indexed by N_D; index 0 is unused. `least_*` gives the smallest value of a range of
    N_D.

    Attributes:
      batch: mean number of sequences in each part of the phase [num_decodes, NUM_PARTS].
      length: positions that a token of that part attends to [num_decodes, NUM_PARTS].
      first_batch: sequences in the first iteration, expected [num_decodes].
      peak_tokens: most tokens in memory at a time, expected [num_decodes].
      peak_sequences: most sequences at a time, expected [num_decodes].
      least_decoded: the smallest numbers of tokens that a part of the phase decodes.
      least_negated: the smallest of `batch` times -1, for the largest batches.
    """

    batch: np.ndarray
    length: np.ndarray
    first_batch: np.ndarray
    peak_tokens: np.ndarray
    peak_sequences: np.ndarray
    least_batch: RangeLeast
    least_length: RangeLeast
    least_peak_tokens: RangeLeast
    least_peak_sequences: RangeLeast
    least_decoded: RangeLeast
    least_negated: RangeLeast

    @classmethod
    def of(cls, num_input_tokens: float, iterations: LengthDistribution) -> DecodePhases:
        """Return the phases of answers that take so many decode iterations.

        A sequence with D iterations takes part in iteration u of every phase k with k N_D + u <= D.
        In a steady state with one new sequence a phase, iteration u has sum_k P(D >= k N_D + u) of
        them, which never rises with u.

        Args:
          num_input_tokens: mean length of the inputs, whose KV is held too.
        """
        num = max(1, iterations.max_length)
        # By iteration of an answer, from 0 on; the last phase may last beyond the longest answer.
        running = np.zeros(2 * num + 1)
        running[1 : iterations.max_length + 1] = iterations.survival[1:]
        held = running * (num_input_tokens + np.arange(2 * num + 1))
        # The phases of a longest answer, for N_D = 1, 2, ... one after another.
        num_phases = -(-num // np.arange(1, num + 1))
        first = np.cumsum(num_phases) - num_phases
        num_decodes = np.repeat(np.arange(1, num + 1), num_phases)
        before = (np.arange(len(num_decodes)) - np.repeat(first, num_phases)) * num_decodes

        def by_num_decodes(values: np.ndarray) -> np.ndarray:
            return np.concatenate([np.zeros_like(values[:1]), np.add.reduceat(values, first)])

        batch = by_num_decodes(_part_means(running, before, num_decodes))
        tokens = by_num_decodes(_part_means(held, before, num_decodes))
        first_batch = by_num_decodes(running[before + 1])
        # Answers that end with their first token need no iteration, but memory.
        at_once = float(iterations.probabilities[0])
        peak_tokens = np.concatenate([[0.0], _most_held(held, num) + at_once * num_input_tokens])
        # Where nothing is expected to run, one token attends to the inputs.
        length = np.where(batch > 0, tokens / np.where(batch > 0, batch, 1.0), num_input_tokens)
        length = np.clip(length, num_input_tokens, num_input_tokens + num)
        decoded = np.arange(num + 1)[:, None] / NUM_PARTS * batch
        return cls(
            batch=batch,
            length=length,
            first_batch=first_batch,
            peak_tokens=peak_tokens,
            peak_sequences=first_batch + at_once,
            least_batch=RangeLeast(batch),
            least_length=RangeLeast(length),
            least_peak_tokens=RangeLeast(peak_tokens),
            least_peak_sequences=RangeLeast(first_batch + at_once),
            least_decoded=RangeLeast(decoded),
            least_negated=RangeLeast(-batch),
        )


def _most_held(held: np.ndarray, num: int) -> np.ndarray:
    """Return the most that is held in an iteration of a phase, for N_D = 1 ... num.

    Of long phases only some are computed, each less than a hundredth longer than the one before.
    Those between them have the larger one of their neighbours' values.

    Args:
      held: tokens of an answer in each of its iterations, from 0 on; [2 num + 1].
    """
    exact = np.arange(1, min(num, _EXACT) + 1)
    steps = math.ceil(math.log(max(1.0, num / _EXACT)) / math.log(_LONGER))
    some = np.unique(np.concatenate([exact, np.geomspace(len(exact), num, steps + 1).astype(int)]))
    most = np.array(
        [
            held[1 : -(-num // each) * each + 1].reshape(-1, each).sum(0).max()
            for each in some.tolist()
        ]
    )
    above = np.searchsorted(some, np.arange(1, num + 1))
    is_exact = some[above] == np.arange(1, num + 1)
    return np.where(is_exact, most[above], np.maximum(most[above - 1], most[above]))


def _part_means(values: np.ndarray, before: np.ndarray, num_decodes: np.ndarray) -> np.ndarray:
    """Return the means of `NUM_PARTS` equal parts of each phase, float [phases, NUM_PARTS].

    Args:
      values: of each iteration of an answer, from 0 on, as a step function.
      before: iterations of an answer before each phase [phases].
      num_decodes: N_D of each phase [phases].
    """
    parts = np.arange(NUM_PARTS + 1) / NUM_PARTS
    ends = before[:, None] + num_decodes[:, None] * parts
    whole = ends.astype(np.int64)
    sums = np.cumsum(values)[whole] + (ends - whole) * values[whole + 1]
    return np.maximum(np.diff(sums, axis=1), 0.0) * NUM_PARTS / num_decodes[:, None]
