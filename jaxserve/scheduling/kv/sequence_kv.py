"""The KV state of one sequence."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import final

from jaxserve.memory.cached_page import Branch, CachedPage, PageKeys
from jaxserve.memory.page_table import PageTable

# Pages of a waiting sequence that one step considers for prefetching.
MAX_LOOKED_AT = 512


@final
@dataclass(frozen=True, slots=True)
class SharedPages:
    """The last lookup of a sequence's pages: of `num_keys`, other sequences owned `num_pages`.

    `num_gained` is that of `PagePool` at the time.
    """

    num_keys: int
    num_pages: int
    num_gained: int


@final
@dataclass(eq=False, slots=True)
class Window:
    """The pages of a long prompt, at most `MAX_LOOKED_AT`, that one step considers for prefetching.

    The next step considers the same ones, or the next ones if none of these has to come.
    """

    start: int = 0
    branch: Branch | None = None
    # Of each window by its start: pages that were cached and copied at the last look.
    _num_copied: dict[int, int] = field(default_factory=dict)

    @property
    def num_copied_elsewhere(self) -> int:
        return sum(self._num_copied.values()) - self._num_copied.get(self.start, 0)

    def belong_to(self, branch: Branch) -> None:
        self.branch = branch

    def move(self, num_copied: int, num_pages: int) -> None:
        """Move to the next pages, wrapping around; `num_copied` of these are cached and copied."""
        self._num_copied[self.start] = num_copied
        self.start += MAX_LOOKED_AT
        if self.start >= num_pages:
            self.start = 0


@final
@dataclass(eq=False, slots=True)
class SequenceKV:
    """The KV state of a sequence. Only the KV manager writes it.

    Attributes:
      group: the device group in whose memory the pages are filled.
      num_computed: leading tokens whose KV is written by the steps planned so far, or was cached.
      ahead: [start, end) of later tokens whose KV was cached, in order.
      host_pages: pages of the host that hold its KV while it waits; empty without any.
      num_dropped: tokens whose KV was dropped at the last preemption.
      num_outgrown: how often the sequence used up its reservation.
      num_cached: leading pages that are in the prefix cache.
      unnamed: pages in the prefix cache whose last tokens have not been read yet.
      prefetched: indices of pages that came to the device while the sequence waited.
      awaits: the last of its pages that is still to come from the host, or None. Until then the
        sequence runs and computes nothing.
      is_mixed: whether former weights computed some of its KV, so that no other sequence may reuse
        it.
    """

    table: PageTable
    group: int = 0
    num_computed: int = 0
    ahead: list[tuple[int, int]] = field(default_factory=list)
    host_pages: tuple[int, ...] = ()
    num_dropped: int = 0
    num_outgrown: int = 0
    keys: PageKeys = field(default_factory=PageKeys)
    branch: Branch | None = None
    num_cached: int = 0
    unnamed: list[CachedPage] = field(default_factory=list)
    prefetched: set[int] = field(default_factory=set)
    window: Window | None = None
    shared: SharedPages | None = None
    awaits: CachedPage | None = None
    is_mixed: bool = False

    def weights_changed(self) -> None:
        self.is_mixed = bool(self.table.num_pages or self.host_pages)

    @property
    def num_reserved_left(self) -> int:
        return self.table.num_reserved_tokens - self.num_computed

    def begin_with(self, cached: Collection[int], page_size: int) -> None:
        """Set exactly these pages, by their index in the table, as computed."""
        self.num_computed = 0
        self.ahead = []
        for index in sorted(cached):
            start, end = index * page_size, (index + 1) * page_size
            if self.ahead and self.ahead[-1][1] == start:
                self.ahead[-1] = (self.ahead[-1][0], end)
            else:
                self.ahead.append((start, end))
        self._pass_what_is_ahead()

    def next_spans(self, num_tokens: int, max_spans: int) -> list[tuple[int, int]]:
        """Return [start, end) of the next tokens to compute, between cached ones."""
        if not self.ahead and num_tokens and max_spans:
            return [(self.num_computed, self.num_computed + num_tokens)]
        spans: list[tuple[int, int]] = []
        starts = [self.num_computed, *(end for _, end in self.ahead)]
        ends = [*(start for start, _ in self.ahead), sys.maxsize]
        for start, end in zip(starts, ends, strict=True):
            if not num_tokens or len(spans) == max_spans:
                break
            spans.append((start, min(end, start + num_tokens)))
            num_tokens -= spans[-1][1] - start
        return spans

    def advance_to(self, end: int) -> None:
        """Record that everything before `end` is computed, or was cached."""
        self.num_computed = end
        if self.ahead:
            self.ahead = [span for span in self.ahead if span[0] >= end]
            self._pass_what_is_ahead()

    def forget_tokens(self) -> None:
        """Keep the prompt alone; other tokens may follow it."""
        self.keys = self.keys.anew()
        self.shared = None

    def close(self) -> None:
        self.table.close()
        self.ahead.clear()
        self.awaits = None

    def _pass_what_is_ahead(self) -> None:
        while self.ahead and self.ahead[0][0] == self.num_computed:
            self.num_computed = self.ahead.pop(0)[1]
