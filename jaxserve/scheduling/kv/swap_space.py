"""The KV of preempted sequences on the host (the supervisor of S3, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.memory.page_pool import HostPool
from jaxserve.scheduling.plan import PageCopies
from jaxserve.scheduling.sequence import Sequence

# Without measurements: attending to this many positions is as much work as the rest of a token.
_POSITIONS_A_TOKEN = 4096


@final
@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """Times measured on the device.

    Attributes:
      page_s: seconds to copy a page to the host, and again to copy it back.
      token_s: seconds to compute the KV of one prompt token.
      position_s: additional seconds for each position that the token attends to.
    """

    page_s: float
    token_s: float
    position_s: float = 0.0


def page_cost(config: EngineConfig, costs: SwapCosts | None) -> RecomputeCost:
    """Return the recompute cost of a page after a context; unmeasured, in units of one token."""
    token_s = 1.0 if costs is None else costs.token_s
    position_s = token_s / _POSITIONS_A_TOKEN if costs is None else costs.position_s
    return RecomputeCost.analytic(
        attention=config.page_size * position_s,
        other=config.page_size * token_s,
        longest=config.max_context,
    )


def preempt_all_s(config: EngineConfig, costs: SwapCosts | None) -> float | None:
    """Return the seconds to preempt a full pool and to bring it back; None without costs."""
    if costs is None:
        return None
    token_s = costs.token_s
    if config.num_host_pages:
        token_s = min(token_s, 2 * costs.page_s / config.page_size)
    return (config.num_pages - 1) * config.page_size * token_s


def copy_s(costs: SwapCosts | None) -> float:
    return 0.0 if costs is None else costs.page_s


@final
class SwapSpace:
    """Chooses between swapping and recomputing, and allocates host pages for swapped sequences.

    Args:
      host: pages of the host; None to always recompute preempted sequences.
      costs: None if they were not measured. Swapping then counts as cheaper; it was, by orders of
        magnitude, on every device measured so far.
      max_pages: the most pages that one plan copies; a sequence with more than are left is
        recomputed.
    """

    def __init__(self, host: HostPool | None, costs: SwapCosts | None, max_pages: int):
        self._costs = costs
        self._max_pages = max_pages
        self.num_pages_out = 0
        self.num_pages_in = 0
        self.num_recomputed = 0
        self._host = host
        self._saved: list[tuple[Sequence, PageCopies]] = []

    @property
    def penalty_s(self) -> float:
        """Seconds of the device that preemptions took, by the measured costs; 0 without them."""
        if self._costs is None:
            return 0.0
        num_pages = self.num_pages_out + self.num_pages_in
        return num_pages * self._costs.page_s + self.num_recomputed * self._costs.token_s

    def decide_by(self, costs: SwapCosts | None) -> None:
        self._costs = costs

    def save(self, sequence: Sequence) -> None:
        """Swap out a sequence's pages with the next plan, or drop its KV; then they are freed."""
        kv = sequence.kv
        if kv.host_pages:  # it was admitted in this very step, and is still on the host
            return
        count = kv.table.pages_for(kv.num_computed)
        host = self._host_for(kv.num_computed, count)
        if host is None:
            kv.num_dropped = kv.num_computed
            kv.num_computed = 0
            return
        kv.host_pages = host.allocate(count)
        copies = tuple(zip(kv.table.pages, kv.host_pages, strict=False))
        self._saved.append((sequence, copies))

    def admitted(self, sequence: Sequence) -> None:
        """Count what a sequence lost at its preemption and did not find cached."""
        kv = sequence.kv
        num_found = sequence.planned_length - sequence.num_uncomputed
        self.num_recomputed += max(0, kv.num_dropped - num_found)
        kv.num_dropped = 0

    def drop(self, sequence: Sequence) -> None:
        """Free a sequence's host pages; if it has no slot, it is recomputed."""
        kv = sequence.kv
        if kv.host_pages and self._host is not None:
            self._host.free(kv.host_pages)
            kv.host_pages = ()
            kv.num_computed = 0

    def drop_unsaved(self) -> None:
        """Drop what no plan has copied yet, before device pages move."""
        for sequence, _ in self._saved:
            if sequence.kv.host_pages:
                sequence.kv.num_dropped = sequence.kv.num_computed
                self.drop(sequence)
        self._saved.clear()

    def copies_out(self) -> PageCopies:
        """Return (device page, host page) of the next plan, in the order of the copies."""
        copies = tuple(copy for _, each in self._saved for copy in each)
        self._saved.clear()
        self.num_pages_out += len(copies)
        return copies

    def copies_in(self, admitted: Iterable[Sequence]) -> PageCopies:
        """Return (host page, device page) of readmitted sequences, and free their host pages.

        Call it when the step preempts no more sequences.
        """
        copies: list[tuple[int, int]] = []
        for sequence in admitted:
            kv = sequence.kv
            if kv.host_pages and self._host is not None:
                copies += zip(kv.host_pages, kv.table.pages, strict=False)
                self._host.free(kv.host_pages)
                kv.host_pages = ()
        self.num_pages_in += len(copies)
        return tuple(copies)

    def _host_for(self, num_tokens: int, num_pages: int) -> HostPool | None:
        """Return the host's pool if it has room for these pages and copying pays, else None."""
        host = self._host
        num_leaving = sum(len(copies) for _, copies in self._saved)
        most = 0 if host is None else min(host.num_free, self._max_pages - num_leaving)
        if not 0 < num_pages <= most:
            return None
        if self._costs is None:
            return host
        pays = 2 * num_pages * self._costs.page_s <= num_tokens * self._costs.token_s
        return host if pays else None
