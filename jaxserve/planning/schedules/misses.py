"""How often ExeGPT's Algorithm 1 misses the best schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.planning.schedules.candidate import throughput_under
from jaxserve.planning.schedules.estimates import LatencyBounds
from jaxserve.planning.schedules.monotone import TOLERANCE, monotone_search
from jaxserve.planning.schedules.search import maximise
from jaxserve.planning.schedules.timeline import Timeline

# Less than this share of the best throughput is a miss; the rest is rounding.
_MISS = 1.0 - 1e-6


@final
@dataclass(frozen=True, kw_only=True)
class Misses:
    """A comparison of Algorithm 1 with the best schedules.

    Attributes:
      num_cases: bounds that some schedule keeps.
      num_missed: cases in which Algorithm 1 finds a lower throughput, or none.
      num_beyond: of those, cases in which it is lower by more than the tolerance.
      num_not_found: of those, cases in which it finds no schedule.
      worst_share: lowest throughput found, as a share of the best.
      num_evaluated, num_evaluated_by_bounds: timelines that Algorithm 1 and `search.maximise`
        computed.
    """

    num_cases: int
    num_missed: int
    num_beyond: int
    num_not_found: int
    worst_share: float
    num_evaluated: int
    num_evaluated_by_bounds: int

    @property
    def missed_share(self) -> float:
        return self.num_missed / self.num_cases if self.num_cases else 0.0

    @property
    def beyond_share(self) -> float:
        return self.num_beyond / self.num_cases if self.num_cases else 0.0


def misses_of(
    cases: Iterable[tuple[Sequence[Timeline], LatencyBounds]], *, tolerance: float = TOLERANCE
) -> Misses:
    """Run Algorithm 1 and the search with sound bounds on every case.

    Args:
      cases: timelines and bounds; those that no schedule keeps are left out.
      tolerance: see `monotone_search`.
    """
    shares, num_evaluated, num_by_bounds = [], 0, 0
    for timelines, bounds in cases:
        best = maximise(timelines, throughput_under(bounds))
        if best.found is None:
            continue
        found = monotone_search(timelines, bounds, tolerance=tolerance)
        shares.append(found.score / best.score)
        num_evaluated += found.num_evaluated
        num_by_bounds += best.num_evaluated
    return Misses(
        num_cases=len(shares),
        num_missed=sum(share < _MISS for share in shares),
        num_beyond=sum(share < 1.0 - tolerance for share in shares),
        num_not_found=shares.count(0.0),
        worst_share=min(shares, default=1.0),
        num_evaluated=num_evaluated,
        num_evaluated_by_bounds=num_by_bounds,
    )
