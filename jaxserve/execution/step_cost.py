"""What a step costs a simulated device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from jaxserve.scheduling.plan import StepPlan


@final
@dataclass(frozen=True)
class StepWork:
    """What carrying out a plan came to: rows that ended on the device no longer count.

    A token attends to every position up to its own. Rows of one token and longer ones are apart,
    because kernels read the keys of a row once for many of its queries.

    Attributes:
      prefilled: positions attended to by the tokens of rows with several tokens, summed.
      decoded: the same of rows with one token, for each iteration that ran. A mixed step has one;
        a decode loop ends early once every row has.
    """

    plan: StepPlan
    prefilled: int
    decoded: tuple[int, ...]


class StepCost(Protocol):
    """Seconds of a step. The host works on one step while the device computes those before it."""

    def host_s(self, plan: StepPlan) -> float:
        """To plan, submit and read it."""
        ...

    def device_s(self, work: StepWork) -> float:
        """To carry it out."""
        ...


@final
@dataclass(frozen=True)
class FlatCost:
    """A constant for each iteration, a share for each token and swapped page; the host is free."""

    per_iteration_s: float = 1e-3
    per_token_s: float = 1e-5
    per_page_s: float = 1e-5

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        num_tokens = sum(row.num_tokens for row in work.plan.rows)
        num_pages = len(work.plan.swaps_out) + len(work.plan.swaps_in)
        iteration_s = self.per_iteration_s + self.per_token_s * num_tokens
        return len(work.decoded) * iteration_s + self.per_page_s * num_pages
