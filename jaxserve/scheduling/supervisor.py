"""What becomes of the KV of preempted sequences (the supervisor of S3, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.memory.host_pool import HostPool
from jaxserve.scheduling.plan import PageCopies
from jaxserve.scheduling.policy import Preemption
from jaxserve.scheduling.sequence import Sequence


@final
@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """Measured on the device.

    Attributes:
      page_s: seconds to bring a page to the host, and again to bring it back.
      token_s: seconds to compute the KV of a prompt's token.
      position_s: seconds on top of that for each position that the token attends to.
    """

    page_s: float
    token_s: float
    position_s: float = 0.0


@final
class Supervisor:
    """Decides between swapping and computing anew, and keeps the books of the host's pages.

    Args:
      num_host_pages: for their KV.
      costs: None where they were not measured: then swapping is taken to be cheaper, as it is by
        orders of magnitude on what was measured so far.

    Attributes:
      num_outgrown: reservations that were used up.
      num_pages_out, num_pages_in: pages copied.
      num_recomputed: tokens whose KV was dropped, and computed again.
    """

    def __init__(
        self,
        num_host_pages: int,
        page_size: int,
        preemption: Preemption,
        costs: SwapCosts | None,
    ):
        self.host = HostPool(num_host_pages)
        self.num_outgrown = 0
        self.num_pages_out = 0
        self.num_pages_in = 0
        self.num_recomputed = 0
        self._page_size = page_size
        self._keeps_state = preemption.keeps_state
        self._costs = costs
        self._saved: list[tuple[Sequence, PageCopies]] = []

    @property
    def penalty_s(self) -> float:
        """Seconds of the device that preemptions took, by the measured costs; 0 without them."""
        if self._costs is None:
            return 0.0
        num_pages = self.num_pages_out + self.num_pages_in
        return num_pages * self._costs.page_s + self.num_recomputed * self._costs.token_s

    def save(self, sequence: Sequence) -> None:
        """Before its pages go: have the next plan copy them to the host, or give its KV up."""
        if sequence.host_pages:  # it was admitted in this very step, and is there still
            return
        count = sequence.table.pages_for(sequence.num_computed)
        if not self._should_swap(sequence, count):
            sequence.num_dropped = sequence.num_computed
            sequence.num_computed = 0
            return
        sequence.host_pages = self.host.take(count)
        copies = tuple(zip(sequence.table.pages, sequence.host_pages, strict=False))
        self._saved.append((sequence, copies))

    def admitted(self, sequence: Sequence) -> None:
        """Count what it lost when it was preempted, and has not found again."""
        num_found = sequence.planned_length - sequence.num_uncomputed
        self.num_recomputed += max(0, sequence.num_dropped - num_found)
        sequence.num_dropped = 0

    def forget(self, sequence: Sequence) -> None:
        """Give its host pages back; what is not in a slot then is computed anew."""
        if sequence.host_pages:
            self.host.release(sequence.host_pages)
            sequence.host_pages = ()
            sequence.num_computed = 0

    def forget_unsaved(self) -> None:
        """Before device pages move: those that no plan has saved yet are computed anew."""
        for sequence, _ in self._saved:
            if sequence.host_pages:
                sequence.num_dropped = sequence.num_computed
                self.forget(sequence)
        self._saved.clear()

    def copies_out(self) -> PageCopies:
        """(device page, host page), once, in the order in which they have to be made."""
        copies = tuple(copy for _, each in self._saved for copy in each)
        self._saved.clear()
        self.num_pages_out += len(copies)
        return copies

    def copies_in(self, admitted: list[Sequence]) -> PageCopies:
        """(host page, device page) of sequences that run again; their host pages are free then.

        To be called when nobody is preempted any more in the step.
        """
        copies: list[tuple[int, int]] = []
        for sequence in admitted:
            copies += zip(sequence.host_pages, sequence.table.pages, strict=False)
            self.host.release(sequence.host_pages)
            sequence.host_pages = ()
        self.num_pages_in += len(copies)
        return tuple(copies)

    def _should_swap(self, sequence: Sequence, num_pages: int) -> bool:
        if not self._keeps_state or not 0 < num_pages <= self.host.num_free:
            return False
        if self._costs is None:
            return True
        return 2 * num_pages * self._costs.page_s <= sequence.num_computed * self._costs.token_s
