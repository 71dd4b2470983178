"""Costs of a step on a simulated device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from jaxserve.scheduling.plan import StepPlan


@final
@dataclass(frozen=True)
class StepWork:
    """The work of carrying out a plan, without rows that have already ended on the device.

    A token attends to every position up to its own. Rows of one token are counted separately from
    longer rows, because kernels read the keys of a row once for many of its queries.

    Attributes:
      prefilled: sum of the positions that the tokens of rows with several tokens attend to, without
        the prompts that an encoder computes.
      decoded: the same sum for rows with one token, for each iteration that ran. A mixed step has
        one iteration; a decode loop ends early when every row has ended.
    """

    plan: StepPlan
    prefilled: int
    decoded: tuple[int, ...]


class StepCost(Protocol):
    """A cost of a step, or of a handover between device groups, in seconds.

    The host works on a step while the device runs earlier ones.
    """

    def host_s(self, plan: StepPlan) -> float:
        """Return the seconds that the host needs to plan, submit and read a step."""
        ...

    def device_s(self, work: StepWork) -> float:
        """Return the seconds that the device needs to run a step."""
        ...


@final
@dataclass(frozen=True)
class FlatCost:
    """A cost of constant seconds per iteration, token and copied page, and 0 for the host."""

    per_iteration_s: float = 1e-3
    per_token_s: float = 1e-5
    per_page_s: float = 1e-5

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        num_tokens = sum(row.num_tokens for row in work.plan.rows)
        num_pages = len(work.plan.swaps_out) + len(work.plan.swaps_in)
        num_pages += work.plan.num_pages_handed_over
        iteration_s = self.per_iteration_s + self.per_token_s * num_tokens
        return len(work.decoded) * iteration_s + self.per_page_s * num_pages
