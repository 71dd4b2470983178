"""A log-rank test in bands: whether newer answers have other lengths than those of a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import final

import numpy as np

# Shares of ended answers at which the test divides lengths into bands. The last band is the tail,
# which determines the 99th percentile.
_CUTS = (0.25, 0.5, 0.75, 0.9)
# Fewest ended answers of a band; a smaller band is joined with the one before it.
_LEAST_EVENTS = 8
# Probability of a false alarm of one test if many answers have ended; up to ten times this with 64.
# Tests are frequent and overlap, and a false alarm only costs a search.
FALSE_ALARM = 1e-4


@final
@dataclass(frozen=True)
class Lifetimes:
    """Output tokens of answers so far, int [answers], and which have ended, bool [answers]."""

    lengths: np.ndarray
    has_ended: np.ndarray

    @classmethod
    def whole(cls, lengths: np.ndarray) -> Lifetimes:
        return cls(lengths, np.ones(len(lengths), bool))

    def ended_at(self, size: int) -> np.ndarray:
        return np.bincount(self.lengths[self.has_ended], minlength=size)[:size]

    def at_risk(self, size: int) -> np.ndarray:
        """Return how many answers have reached each length 0 ... size - 1.

        A running answer with u tokens counts up to u, because token u + 1 has not been tried.
        """
        reached = np.bincount(self.lengths, minlength=size)[:size]
        return np.cumsum(reached[::-1])[::-1]


def drift(before: Lifetimes, newest: Lifetimes) -> float:
    """Return a measure of how two sets of lengths differ: above 1 they do, see `FALSE_ALARM`.

    At each length, the log-rank test compares the shares of the answers reaching it that end there.
    So running answers count with their length so far, and the newest answers do not look short
    because the short ones end first. A log-rank sum over all lengths would miss a change of the
    deviation, which makes both short and long answers more frequent. So the sum is taken in up to
    five bands, and the sum of its squares is compared with a quantile of chi-squared.
    """
    size = 1 + int(max(before.lengths.max(initial=0), newest.lengths.max(initial=0)))
    ended_1, ended_2 = before.ended_at(size), newest.ended_at(size)
    risk_1, risk_2 = before.at_risk(size), newest.at_risk(size)
    ended, risk = ended_1 + ended_2, np.maximum(risk_1 + risk_2, 1)
    share = risk_2 / risk
    excess = ended_2 - ended * share
    variance = ended * share * (1 - share) * (risk - ended) / np.maximum(risk - 1, 1)
    # Lengths that all answers of one set exceed, or that none reaches, do not count.
    compared = ended * (variance > 0)
    total, num_bands = 0.0, 0
    for band in _bands(compared):
        if variance[band].sum() > 0:
            total += excess[band].sum() ** 2 / variance[band].sum()
            num_bands += 1
    return total / _chi_squared(num_bands) if num_bands else 0.0


def _bands(events: np.ndarray) -> list[slice]:
    """Return bands of lengths, each with at least `_LEAST_EVENTS` events."""
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

    Running answers beyond every ended one end with the longest length so far (Efron's convention).
    """
    shares = _shares_ended(lifetimes)
    shares[-1] = 1.0
    alive = np.cumprod(np.concatenate([[1.0], 1.0 - shares[:-1]]))
    return alive * shares


def share_beyond(lifetimes: Lifetimes) -> float:
    """Return the estimated share of answers that are longer than every ended one."""
    return float(np.prod(1.0 - _shares_ended(lifetimes)))


def num_known(lifetimes: Lifetimes, share: float) -> float:
    """Return the number of whole lengths that would estimate a tail of this share equally well.

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
    if not variance:  # no answer ended before the last length
        return float(len(lifetimes.lengths))
    beyond = float(longer[num_reached - 1])
    return min((1 - beyond) / (beyond * variance), len(lifetimes.lengths))


def _shares_ended(lifetimes: Lifetimes) -> np.ndarray:
    """Return, at each length, the share of the answers reaching it that end there."""
    size = 1 + int(lifetimes.lengths.max())
    return lifetimes.ended_at(size) / np.maximum(lifetimes.at_risk(size), 1)
