"""Step costs of several device groups, and of the link between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.execution.step_cost import StepCost, StepWork
from jaxserve.scheduling.plan import StepPlan


@final
@dataclass(frozen=True)
class GroupCosts:
    """The costs of each group's steps, and of the KV that is handed from one to another.

    The link carries one handover at a time, while the groups compute.

    Attributes:
      groups: of each device group, by its number in `StepPlan.group`.
      page_bytes: bytes of a page, in all layers.
      link_bytes_per_s: bandwidth of all links between two groups together. Over the host's memory,
        as in ExeGPT's runner (section 3), a page passes two links in turn, at half the bandwidth.
      handover_s: seconds of a handover besides its bytes.
      beside: how many times as long a step of each group takes while the other one computes; see
        `GroupTimes`.
      copies_follow_steps: whether a handover begins when its source has run the steps that were
        submitted before it, as on devices.
    """

    groups: tuple[StepCost, ...]
    page_bytes: float
    link_bytes_per_s: float
    handover_s: float = 0.0
    beside: tuple[float, ...] = (1.0, 1.0)
    copies_follow_steps: bool = False

    def host_s(self, plan: StepPlan) -> float:
        return self.groups[0 if plan.handovers else plan.group].host_s(plan)

    def device_s(self, work: StepWork) -> float:
        plan = work.plan
        if not plan.handovers:
            slower = self.beside[plan.group] if work.is_beside else 1.0
            return slower * self.groups[plan.group].device_s(work)
        num_bytes = plan.num_pages_handed_over * self.page_bytes
        before_s = work.source_s if self.copies_follow_steps else 0.0
        return before_s + self.handover_s + num_bytes / self.link_bytes_per_s
