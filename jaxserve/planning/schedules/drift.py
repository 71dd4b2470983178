"""Whether newer answers have other lengths than those of a plan: a log-rank test in bands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

import numpy as np

# Shares of the ended answers at which the test cuts the lengths into bands. The last band is the
# tail, which decides the 99th percentile.
_CUTS = (0.25, 0.5, 0.75, 0.9)
# Ended answers that a band needs at least; a band with fewer is joined with the one before it.
_LEAST_EVENTS = 8
# Probability of a false alarm of one test, where many answers have ended; with 64 it is up to ten
# times this. Tests are many and overlap, and a false alarm costs a search only.
FALSE_ALARM = 1e-4


@final
@dataclass(frozen=True)
class Lifetimes:
    """Lengths of answers, of which some have not ended.

    Attributes:
      lengths: output tokens so far, int [answers].
      has_ended: False for an answer that goes on, bool [answers].
    """

    lengths: np.ndarray
    has_ended: np.ndarray

    @classmethod
    def whole(cls, lengths: np.ndarray) -> Lifetimes:
        """Return lengths of which all have ended."""
        return cls(lengths, np.ones(len(lengths), bool))

    def ended_at(self, size: int) -> np.ndarray:
        """Return how many answers ended with each length 0 ... size - 1."""
        return np.bincount(self.lengths[self.has_ended], minlength=size)[:size]

    def at_risk(self, size: int) -> np.ndarray:
        """Return how many answers have reached each length 0 ... size - 1.

        One that goes on with u tokens is counted to u, since token u + 1 has not been tried.
        """
        reached = np.bincount(self.lengths, minlength=size)[:size]
        return np.cumsum(reached[::-1])[::-1]


def drift(before: Lifetimes, newest: Lifetimes) -> float:
    """Return how unlike two sets of lengths are: above 1 they differ, see `FALSE_ALARM`.

    The log-rank test compares, at each length, the shares that end there of the answers that reach
    it. So answers that still run count with what they have so far, and the newest answers are not
    taken for short ones because the short ones end first. A log-rank sum over all lengths would
    miss a change of the deviation, where short answers and long ones become more. So it is taken in
    up to five bands, and the sum of its squares is compared with the quantile of chi-squared.
    """
    size = 1 + int(max(before.lengths.max(initial=0), newest.lengths.max(initial=0)))
    ended_1, ended_2 = before.ended_at(size), newest.ended_at(size)
    risk_1, risk_2 = before.at_risk(size), newest.at_risk(size)
    ended, risk = ended_1 + ended_2, np.maximum(risk_1 + risk_2, 1)
    share = risk_2 / risk
    excess = ended_2 - ended * share
    variance = ended * share * (1 - share) * (risk - ended) / np.maximum(risk - 1, 1)
    # Lengths that all answers of one set are past, or short of, say nothing of the other's.
    compared = ended * (variance > 0)
    total, num_bands = 0.0, 0
    for band in _bands(compared):
        if variance[band].sum() > 0:
            total += excess[band].sum() ** 2 / variance[band].sum()
            num_bands += 1
    return total / _chi_squared(num_bands) if num_bands else 0.0


def _bands(events: np.ndarray) -> list[slice]:
    """Return bands of lengths, each with at least `_LEAST_EVENTS` of the events at each length."""
    reached = np.cumsum(events)
    total = int(reached[-1])
    if total < _LEAST_EVENTS:
        return []
    edges, num_before = [0], 0
    for cut in _CUTS:
        end = int(np.searchsorted(reached, cut * total)) + 1
        num = int(reached[end - 1])
        if min(num - num_before, total - num) >= _LEAST_EVENTS:
            edges.append(end)
            num_before = num
    return [slice(*edge) for edge in zip(edges, [*edges[1:], len(events)], strict=True)]


def _chi_squared(degrees: int) -> float:
    """Return the quantile that `FALSE_ALARM` exceeds (Wilson and Hilferty, within 2 %)."""
    z = NormalDist().inv_cdf(1 - FALSE_ALARM)
    part = 2 / (9 * degrees)
    return degrees * (1 - part + z * math.sqrt(part)) ** 3


def kaplan_meier(lifetimes: Lifetimes) -> np.ndarray:
    """Return the estimated probabilities of the lengths 0, 1, 2, ..., float [longest + 1].

    Answers that go on beyond every ended one are taken to end with the longest length so far
    (Efron's convention), because nothing is known of what is beyond.
    """
    shares = _shares_ended(lifetimes)
    shares[-1] = 1.0
    alive = np.cumprod(np.concatenate([[1.0], 1.0 - shares[:-1]]))
    return alive * shares


def share_beyond(lifetimes: Lifetimes) -> float:
    """Return the estimated share of answers that are longer than every ended one."""
    return float(np.prod(1.0 - _shares_ended(lifetimes)))


def num_known(lifetimes: Lifetimes, share: float) -> float:
    """Return how many whole lengths would tell as much of the lengths that a share of all exceeds.

    Greenwood's formula gives the relative variance of the estimated share s that is longer than a
    length: the sum, up to that length, of d / (n (n - d)), where d of the n that reach a length end
    there. With N whole lengths it is (1 - s) / (s N).
    """
    size = 1 + int(lifetimes.lengths.max())
    ended, reached = lifetimes.ended_at(size), lifetimes.at_risk(size)
    longer = np.cumprod(1.0 - ended / np.maximum(reached, 1))
    num_reached = int((longer >= share).sum())
    parts = ended / np.maximum(reached * (reached - ended), 1)
    variance = float(parts[:num_reached].sum())
    if not variance:  # none has ended before all did
        return float(len(lifetimes.lengths))
    beyond = float(longer[num_reached - 1])
    return min((1 - beyond) / (beyond * variance), len(lifetimes.lengths))


def _shares_ended(lifetimes: Lifetimes) -> np.ndarray:
    """Return, at each length, the share of the answers reaching it that end there."""
    size = 1 + int(lifetimes.lengths.max())
    return lifetimes.ended_at(size) / np.maximum(lifetimes.at_risk(size), 1)
