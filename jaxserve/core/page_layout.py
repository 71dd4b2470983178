"""Which layers share a page, and how many pages a sequence holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import final

# The largest share of pages' memory that may belong to no layer, because groups are padded.
_MOST_PADDING = 0.05


@final
@dataclass(frozen=True)
class PageGroup:
    """Layers that see the same positions; a sequence has `num_tables` page tables for them.

    `window` is the number of positions that a query sees, its own included; None for all.
    """

    window: int | None = None
    num_tables: int = 1


@final
@dataclass(frozen=True)
class PageLayout:
    """How keys and values are divided into pages of equal size.

    A page has keys and values of `page_size` positions in a few layers, which one page table
    serves. With one group, a page has those of all layers, and nothing is freed before its sequence
    ends. With several, a page of a group with a window is free once no query can see its positions.

    The pages of a sequence are numbered: the page of table t at index i has number
    i * `num_tables` + t. Tables are numbered group by group.

    Attributes:
      groups: the groups, the one without a window first.
      places: the table and the cache's buffer of each layer that has keys and values; empty with
        one group, where each layer has its own.
    """

    groups: tuple[PageGroup, ...] = (PageGroup(),)
    places: tuple[tuple[int, int], ...] = ()

    @property
    def is_grouped(self) -> bool:
        return len(self.groups) > 1

    @property
    def num_tables(self) -> int:
        return sum(group.num_tables for group in self.groups)

    @property
    def num_buffers(self) -> int:
        """The number of layers in a page; only with several groups."""
        return 1 + max(buffer for _, buffer in self.places)

    def tables(self, group: PageGroup) -> range:
        """Return the numbers of a group's tables."""
        start = sum(each.num_tables for each in self.groups[: self.groups.index(group)])
        return range(start, start + group.num_tables)

    def most_pages(self, num_tokens: int, page_size: int, stride: int) -> int:
        """Return the most pages that a sequence holds until it has `num_tokens` tokens.

        `stride` is the largest distance from the first position that a query can still come from to
        the last one that has a page.
        """
        num_indices = -(-num_tokens // page_size)
        return sum(
            group.num_tables * min(num_indices, pages_in_window(group.window, page_size, stride))
            if group.window is not None
            else group.num_tables * num_indices
            for group in self.groups
        )

    def kept_tokens(self, num_tokens: float, num_sequences: int) -> float:
        """Return the most tokens in all tables, for `num_tokens` tokens of several sequences."""
        return sum(
            group.num_tables * min(num_tokens, num_sequences * (group.window or math.inf))
            for group in self.groups
        )

    def most_tokens(self, num_pages: int, page_size: int, stride: int, max_tokens: int) -> int:
        """Return how many tokens, up to `max_tokens`, `num_pages` pages are enough for."""
        low, high = 0, -(-max_tokens // page_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_pages(middle * page_size, page_size, stride) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return min(max_tokens, low * page_size)


ONE_GROUP = PageLayout()


@cache
def page_layout(windows: tuple[int | None, ...]) -> PageLayout:
    """Return the layout for layers with these windows; one group if they are all equal.

    A page has as many layers as padding allows, so that sequences have few tables: a group is
    filled up to a multiple of that number. The group that keeps most positions is not padded.
    """
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers_of.setdefault(window, []).append(layer)
    if len(layers_of) < 2:
        return ONE_GROUP

    def num_padded(num: int) -> int:
        return sum(-(-len(layers) // num) * num for layers in layers_of.values())

    widest = layers_of[max(layers_of, key=lambda window: window or math.inf)]
    num = len(widest)
    while len(widest) % num or num_padded(num) > (1 + _MOST_PADDING) * len(windows):
        num -= 1
    groups: list[PageGroup] = []
    places: dict[int, tuple[int, int]] = {}
    num_tables = 0
    for window in sorted(layers_of, key=lambda window: window or 0):
        layers = layers_of[window]
        places |= {layer: (num_tables + i // num, i % num) for i, layer in enumerate(layers)}
        groups.append(PageGroup(window, -(-len(layers) // num)))
        num_tables += groups[-1].num_tables
    return PageLayout(tuple(groups), tuple(places[layer] for layer in range(len(windows))))


def pages_in_window(window: int, page_size: int, stride: int) -> int:
    """Return the most pages of one table from `first_in_window` to `stride` positions on."""
    return -(-(window - 1) // page_size) + (stride + 2 * page_size - 2) // page_size


def first_in_window(position: int, window: int, page_size: int) -> int:
    """Return the index of the first page that is held for queries from `position` on.

    It is the first that a query at the beginning of the position's own page sees, so that the full
    pages before `position` are a prefix that another sequence can begin with.
    """
    return max(0, position // page_size + -(window - 1) // page_size)
