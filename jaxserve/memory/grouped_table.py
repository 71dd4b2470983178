"""Page tables of a sequence whose layers are in several groups, some with sliding windows."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.page_layout import PageLayout, first_in_window, pages_in_window
from jaxserve.memory.page_pool import NULL_PAGE, PagePool


@final
@dataclass(frozen=True)
class _Windowed:
    """A group with a window: its tables, and the most pages of one of them.

    `most` is while a prompt is computed, and then while an answer is.
    """

    window: int
    tables: range
    most: tuple[int, int]


@final
class TableSizes:
    """What the grouped tables of one engine have in common.

    Args:
      prompt_stride, answer_stride: the most positions that have pages after the first one from
        which a query can still come, while a prompt is computed, and then while an answer is.
    """

    def __init__(
        self, layout: PageLayout, page_size: int, *, prompt_stride: int, answer_stride: int
    ):
        self.page_size = page_size
        self.num_tables = layout.num_tables
        self.strides = prompt_stride, answer_stride
        self.windowed = tuple(
            _Windowed(
                group.window,
                layout.tables(group),
                (
                    pages_in_window(group.window, page_size, prompt_stride),
                    pages_in_window(group.window, page_size, answer_stride),
                ),
            )
            for group in layout.groups
            if group.window is not None
        )
        in_windows = [table for each in self.windowed for table in each.tables]
        self.whole = tuple(table for table in range(self.num_tables) if table not in in_windows)
        # Groups are in order of their windows.
        self.widest_first = (*self.whole, *reversed(in_windows))

    # ---- what the query after the first `num_pages` indices sees of these ----

    def first(self, num_pages: int) -> list[int]:
        """Return the first index that it sees in each group with a window."""
        position = num_pages * self.page_size
        return [first_in_window(position, each.window, self.page_size) for each in self.windowed]

    def first_seen(self, num_pages: int) -> int:
        """Return the first index that it sees in any group with a window."""
        return min(self.first(num_pages), default=num_pages)

    def tables_seen(self, index: int, num_pages: int) -> tuple[int, ...]:
        """Return the tables in which it sees an index: the first few of `widest_first`."""
        first = zip(self.windowed, self.first(num_pages), strict=True)
        num = sum(len(each.tables) for each, start in first if index >= start)
        return self.widest_first[: len(self.whole) + num]

    def numbers_seen(self, num_pages: int) -> list[int]:
        """Return the numbers of all pages that it sees, in order."""
        is_seen = np.zeros((num_pages, self.num_tables), np.bool_)
        is_seen[:, self.whole] = True
        for each, start in zip(self.windowed, self.first(num_pages), strict=True):
            is_seen[start:, each.tables] = True
        return np.flatnonzero(is_seen).tolist()

    def num_seen(self, num_pages: int) -> int:
        first = zip(self.windowed, self.first(num_pages), strict=True)
        num = sum(len(each.tables) * (num_pages - start) for each, start in first)
        return num + len(self.whole) * num_pages


@final
class GroupedPageTable:
    """Maps a sequence's positions to a page in each of several tables, numbered by `PageLayout`.

    It has the methods of `PageTable`, and counts the pages of all tables. `pass_by` frees pages
    behind the windows; the reservation counts only what a sequence can hold at once.

    Attributes:
      max_end: no plan may compute a position from here on before the next `pass_by`.
    """

    def __init__(self, pool: PagePool, sizes: TableSizes):
        self._pool = pool
        self._sizes = sizes
        self._reset()

    def _reset(self) -> None:
        # By number; the null page where none is owned.
        self._pages = array("i")
        # The index of the first page of each group with a window.
        self._first = [0] * len(self._sizes.windowed)
        self._num_owned = self._num_unallocated = 0
        # Indices below it are reserved.
        self._reserved_end = 0
        self._is_answer = False
        self.max_end = self._sizes.strides[0]

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(page for page in self._pages if page != NULL_PAGE)

    def page(self, number: int) -> int:
        """Return the page of a number; the null page if it was freed."""
        return self._pages[number]

    def entries(self, num_tokens: int = sys.maxsize) -> list[tuple[int, int]]:
        """Return (number, page) of the owned pages of the first `num_tokens` tokens, or of all."""
        pages = self._pages[: self._end_of(num_tokens) * self._sizes.num_tables]
        return [entry for entry in enumerate(pages) if entry[1] != NULL_PAGE]

    @property
    def num_pages(self) -> int:
        return self._num_owned

    @property
    def num_tokens(self) -> int:
        return len(self._pages) // self._sizes.num_tables * self._sizes.page_size

    @property
    def reservation(self) -> int:
        return self._num_owned + self._num_unallocated

    @property
    def num_reserved_tokens(self) -> int:
        return self._reserved_end * self._sizes.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return the most pages that it holds at once until it has `num_tokens` tokens."""
        return self._most(self._end_of(num_tokens))

    def num_missing(self, num_tokens: int) -> int:
        """Return how many pages beyond the reservation `num_tokens` would take."""
        end = max(self._end_of(num_tokens), self._reserved_end)
        return max(0, self._most(end) - self.reservation)

    def reserve(self, num_tokens: int) -> bool:
        """Raise the reservation to `num_tokens` tokens; False, unchanged, if the pool cannot."""
        missing = self.num_missing(num_tokens)
        if not self._pool.reserve(missing):
            return False
        self._num_unallocated += missing
        self._reserved_end = max(self._reserved_end, self._end_of(num_tokens))
        return True

    def allocate(self, num_tokens: int) -> list[tuple[int, int]]:
        """Own pages for `num_tokens` tokens, all reserved before; return the new (number, page)."""
        first = len(self._pages)
        count = self._end_of(num_tokens) * self._sizes.num_tables - first
        if count <= 0:
            return []
        if count > self._num_unallocated:
            raise ValueError(
                f"{count} pages wanted, {self._num_unallocated} reserved; reserve first"
            )
        self._num_unallocated -= count
        self._num_owned += count
        self._pages.extend(self._pool.allocate(count))
        return list(enumerate(self._pages[first:], first))

    def trim(self, num_tokens: int) -> None:
        """Free the pages beyond those for `num_tokens` tokens; the reservation stays."""
        start = self._end_of(num_tokens) * self._sizes.num_tables
        freed = [page for page in self._pages[start:] if page != NULL_PAGE]
        del self._pages[start:]
        self._pool.free(freed)
        self._num_owned -= len(freed)
        self._reserve_again(len(freed))

    def begin(self, num_tokens: int, shared: Mapping[int, int], num_pages: int) -> bool:
        """Reserve `num_tokens` tokens for this empty table; own what follows `num_pages` indices.

        It owns the pages of these indices that the next query sees. `shared` maps numbers of some
        of them to pages, owned or cached, with the contents that belong there. No sequence may
        write to a shared page. Return False, unchanged, if the pool has too few pages.
        """
        if self.reservation:
            raise ValueError("only an empty page table can begin with shared pages")
        sizes, pool = self._sizes, self._pool
        first = sizes.first(num_pages)
        end = self._end_of(num_tokens)
        missing = self._most(end, first) - len(shared)
        num_cached = sum(pool.is_cached(page) for page in shared.values())
        if missing + num_cached > pool.num_available:
            return False
        pool.lock(shared.values())
        pool.reserve(missing)
        self._first = first
        numbers = sizes.numbers_seen(num_pages)
        allocated = iter(pool.allocate(len(numbers) - len(shared)))
        self._pages = array("i", [NULL_PAGE]) * (num_pages * sizes.num_tables)
        for number in numbers:
            self._pages[number] = shared[number] if number in shared else next(allocated)
        self._num_owned = len(numbers)
        self._num_unallocated = missing - (len(numbers) - len(shared))
        self._reserved_end = end
        self.max_end = num_pages * sizes.page_size + sizes.strides[0]
        return True

    def pass_by(self, position: int, *, is_answer: bool) -> list[int]:
        """Free the pages that no query sees from `position` on; return them.

        No query of any later plan may come from before it. The reservation shrinks to what the
        sequence can still hold at once; `is_answer` says that its prompt is computed.
        """
        sizes, passed = self._sizes, []
        first = [first_in_window(position, each.window, sizes.page_size) for each in sizes.windowed]
        has_changed = first != self._first or is_answer > self._is_answer
        self._is_answer = self._is_answer or is_answer
        self.max_end = position + sizes.strides[self._is_answer]
        if not has_changed:
            return passed
        for each, old, new in zip(sizes.windowed, self._first, first, strict=True):
            for index in range(old, new):
                number = index * sizes.num_tables
                for place in range(number + each.tables.start, number + each.tables.stop):
                    passed.append(self._pages[place])
                    self._pages[place] = NULL_PAGE
        self._first = first
        self._pool.free(passed)
        self._num_owned -= len(passed)
        excess = self.reservation - self._most(self._reserved_end)
        if excess > 0:
            self._pool.unreserve(excess)
            self._num_unallocated -= excess
        else:
            self._reserve_again(-excess)
        return passed

    def relocate(self, targets: Mapping[int, int]) -> None:
        """Follow the moves of `PagePool.resize`; pages that are not in `targets` stayed."""
        self._pages = array("i", [targets.get(page, page) for page in self._pages])

    def close(self) -> None:
        """Free every page and the reservation; the empty table can be used again."""
        pages = np.frombuffer(self._pages, np.int32) if self._pages else np.zeros(0, np.int32)
        self._pool.free_all(array("i", pages[pages != NULL_PAGE].tobytes()))
        self._pool.unreserve(self._num_unallocated)
        self._reset()

    def check_integrity(self) -> None:
        """Raise AssertionError unless it owns all pages in the windows, and no page before them."""
        sizes = self._sizes
        first = [0] * sizes.num_tables
        for each, start in zip(sizes.windowed, self._first, strict=True):
            for table in each.tables:
                first[table] = start
        for number, page in enumerate(self._pages):
            index, table = divmod(number, sizes.num_tables)
            assert (page != NULL_PAGE) == (index >= first[table]), f"page {number} of the table"
        assert self._num_owned == len(self.pages), "owned pages do not add up"
        end = len(self._pages) // sizes.num_tables
        assert self._num_owned <= self._most(end), "more pages than a sequence may hold at once"

    def _end_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._sizes.page_size)

    def _most(self, end: int, first: Iterable[int] = ()) -> int:
        """Return the most pages of indices below `end`, from the `first` of each group on."""
        num = len(self._sizes.whole) * end
        for each, start in zip(self._sizes.windowed, first or self._first, strict=True):
            num += len(each.tables) * min(end - start, each.most[self._is_answer])
        return num

    def _reserve_again(self, count: int) -> None:
        """Reserve pages that were freed; fewer if other sequences share these and none are left.

        Then the sequence has to `reserve` again.
        """
        count = min(count, self._pool.num_available)
        self._pool.reserve(count)
        self._num_unallocated += count
