"""Costs of a step on a simulated device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self, final

from jaxserve.scheduling.plan import LINK, StepPlan


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
      is_beside: whether another device group computes when the step is submitted.
      source_s: seconds from the time at which the link is free until the source of a handover has
        computed the steps that were submitted before.
    """

    plan: StepPlan
    prefilled: int
    decoded: tuple[int, ...]
    is_beside: bool = False
    source_s: float = 0.0

    def beside(self, free_at_s: Mapping[int, float], now_s: float, begin_s: float) -> Self:
        """Return the work with `is_beside` and `source_s`, given when groups become free."""
        others = {
            group: s for group, s in free_at_s.items() if group not in (self.plan.group, LINK)
        }
        if not others:
            return self
        sources = [others.get(each.source, 0.0) - begin_s for each in self.plan.handovers]
        return replace(
            self,
            is_beside=any(s > now_s for s in others.values()),
            source_s=max(0.0, *sources) if sources else 0.0,
        )


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
    """A cost of constant seconds per iteration, token, copied page and copied state.

    The host takes no time.
    """

    per_iteration_s: float = 1e-3
    per_token_s: float = 1e-5
    per_page_s: float = 1e-5
    per_state_s: float = 1e-4

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        num_tokens = sum(row.num_tokens for row in work.plan.rows)
        num_pages = len(work.plan.swaps_out) + len(work.plan.swaps_in)
        num_pages += work.plan.num_pages_handed_over
        iteration_s = self.per_iteration_s + self.per_token_s * num_tokens
        copies_s = self.per_page_s * num_pages + self.per_state_s * work.plan.num_states_swapped
        return len(work.decoded) * iteration_s + copies_s
