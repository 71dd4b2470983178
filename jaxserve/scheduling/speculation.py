"""How many tokens decode loops propose: as many as lately paid, or none."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from statistics import median
from typing import final

from jaxserve.scheduling.plan import ProposalCount, StepPlan, StepResult
from jaxserve.scheduling.sequence import Sequence

# What a loop must gain by speculating, as an estimate, before it does.
_LEAST_GAIN = 1.05
# Weight of what is known of a sequence after one more loop.
_MEMORY = 0.8
# Sequences that are remembered; those whose loops are longest ago go first.
_MAX_REMEMBERED = 4096
# Newest loops of a size whose times are remembered.
_NUM_TIMES = 5
# Loops after which one speculates although it did not pay before, if it would pay at no cost.
_LOOPS_BETWEEN_TRIALS = 256


@final
class Speculation:
    """Compares what proposals are worth with what computing them costs.

    A proposal is right with a probability that is estimated for each sequence, from loops that
    speculate and from those that only count what would have been right. An iteration that computes
    k proposals is expected to deliver 1 + p + ... + p^k tokens. It takes longer by a factor that is
    measured.

    Args:
      most: tokens to propose at most; 0 to never speculate.
    """

    def __init__(self, most: int):
        self._most = most
        # Sequence key -> (hits, misses), weighted by age.
        self._found: OrderedDict[int, tuple[float, float]] = OrderedDict()
        # (size of a loop, tokens proposed) -> seconds of an iteration.
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._num_until_trial = 0
        self._num_drafted = self._num_accepted = 0

    def counters(self) -> dict[str, float]:
        """Return the counters of `EngineStats` that are kept here, by name."""
        return {"num_draft_tokens": self._num_drafted, "num_accepted_tokens": self._num_accepted}

    def num_proposed(self, sequences: Iterable[Sequence]) -> int:
        """Return how many tokens the next loop over these sequences proposes for each of them."""
        if not self._most:
            return 0
        keys = [sequence.key for sequence in sequences]
        gain = sum(self._expected_tokens(key) for key in keys) / len(keys)
        plain = self._seconds.get((_size(len(keys)), 0))
        if gain < _LEAST_GAIN or not plain:
            return 0
        self._num_until_trial -= 1
        speculating = self._seconds.get((_size(len(keys)), self._most))
        if speculating and gain < _LEAST_GAIN * median(speculating) / median(plain):
            if self._num_until_trial > 0:
                return 0
            self._num_until_trial = _LOOPS_BETWEEN_TRIALS
        return self._most

    def take_in(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from a step that was collected.

        Args:
          seconds: that the device took for it.
        """
        if result.proposals is None:
            return
        for row, counts in zip(plan.rows, result.proposals.tolist(), strict=True):
            known = self._found.pop(row.sequence_key, (0.0, 1.0))
            hits, misses = counts[ProposalCount.HITS], counts[ProposalCount.MISSES]
            self._found[row.sequence_key] = known[0] * _MEMORY + hits, known[1] * _MEMORY + misses
        while len(self._found) > _MAX_REMEMBERED:
            self._found.popitem(last=False)
        if plan.num_proposed:
            self._num_drafted += int(result.proposals[:, ProposalCount.COMPUTED].sum())
            self._num_accepted += int(result.proposals[:, ProposalCount.ACCEPTED].sum())
        if num_iterations := int(result.proposals[:, ProposalCount.ITERATIONS].max(initial=0)):
            key = _size(len(plan.rows)), plan.num_proposed
            times = self._seconds.setdefault(key, deque(maxlen=_NUM_TIMES))
            times.append(seconds / num_iterations)

    def _expected_tokens(self, key: int) -> float:
        """Return the expected tokens of an iteration with all proposals."""
        hits, misses = self._found.get(key, (0.0, 1.0))
        rate = hits / (hits + misses)
        return sum(rate**i for i in range(self._most + 1))


def _size(num_rows: int) -> int:
    """Return the power of two to which loops of this many rows belong."""
    return 1 << (num_rows - 1).bit_length()
