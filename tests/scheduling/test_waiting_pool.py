"""The waiting pool gives what a plain list gives, without looking at every sequence."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.order import OrderKeys
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.queues import WaitingPool
from jaxserve.scheduling.sequence import Sequence
from jaxserve.testing import Trace
from tests.scheduling.simulated import request_of

CONFIG = EngineConfig(num_pages=40, max_slots=4, max_context=64, max_step_tokens=16, page_size=4)


@dataclass(frozen=True)
class _ByRank:
    """An order by numbers that a test sets; several sequences may have the same."""

    heeds_bounds: ClassVar[bool] = False
    heeds_priority: ClassVar[bool] = False
    max_passes: int
    ranks: dict[int, int] = field(default_factory=dict)

    def key(self, sequence: Sequence, lengths: Any) -> int:
        return self.ranks.get(sequence.key, 0)


def _sequences(count: int, latency_bound: float | None = None) -> list[Sequence]:
    """Return sequences of no engine any more."""
    engine = Trace(0).engine(PRESETS["vllm_like"], CONFIG)
    params = dict(max_tokens=4, latency_bound=latency_bound)
    requests = (request_of(str(i), (1, 2), **params) for i in range(count))
    return [each for request in requests for each in engine.add(request)]


@dataclass
class _List:
    """The pool as a sorted list, of which a search reads all."""

    max_passes: int
    waiting: list[Sequence] = field(default_factory=list)
    num_passed: dict[int, int] = field(default_factory=dict)

    def first_that(self, pages: dict[int, int], num_available: int) -> Sequence | None:
        for sequence in self.waiting:
            if not sequence.num_in_flight and pages[sequence.key] <= num_available:
                return sequence
            if self.num_passed.get(sequence.key, 0) >= self.max_passes:
                return None
        return None

    def admit(self, sequence: Sequence) -> None:
        at = self.waiting.index(sequence)
        for passed in self.waiting[:at]:
            self.num_passed[passed.key] = self.num_passed.get(passed.key, 0) + 1
        del self.waiting[at]
        self.num_passed.pop(sequence.key, None)


@pytest.mark.parametrize("max_passes", [0, 3, 40])
def test_it_is_a_sorted_list(max_passes: int):
    """Additions, removals, admissions and new keys, in random turns; the seed is printed."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    order = _ByRank(max_passes)
    keys = OrderKeys(order, LengthTracker())
    pages: dict[int, int] = {}
    pool = WaitingPool(keys, max_passes, CONFIG.page_size, lambda each: pages[each.key])
    plain = _List(max_passes)
    absent, num_admitted, num_refused = _sequences(700), 0, 0

    def sort() -> None:
        plain.waiting.sort(key=lambda each: (keys.of(each), each.key))

    for turn in range(3000):
        action = rng.random()
        if absent and action < 0.5:
            sequence = absent.pop(rng.randrange(len(absent)))
            order.ranks[sequence.key], pages[sequence.key] = rng.randrange(50), rng.randint(1, 30)
            sequence.num_in_flight = int(rng.random() < 0.1)
            pool.add(sequence)
            plain.waiting.append(sequence)
            sort()
        elif plain.waiting and action < 0.65:
            sequence = rng.choice(plain.waiting)
            if action < 0.6:
                pool.remove(sequence)
                plain.waiting.remove(sequence)
                plain.num_passed.pop(sequence.key, None)
                absent.append(sequence)
            else:
                order.ranks[sequence.key], pages[sequence.key] = (
                    rng.randrange(50),
                    rng.randint(1, 30),
                )
                sequence.num_in_flight = 0
                pool.replace(sequence)
                sort()
        elif action < 0.66:
            order.ranks.update((key, rng.randrange(50)) for key in order.ranks)
            pool.sort()
            sort()
        elif action < 0.7:
            for sequence in plain.waiting:  # what was in flight has been read
                if sequence.num_in_flight:
                    sequence.num_in_flight, pages[sequence.key] = 0, rng.randint(1, 30)
        else:
            num_available = rng.randint(0, 30)
            found = pool.first_that(
                lambda each, most=num_available: pages[each.key] <= most,
                lambda each: False,
                num_available,
            )
            assert found is plain.first_that(pages, num_available), f"turn {turn}"
            num_admitted, num_refused = num_admitted + bool(found), num_refused + (not found)
            if found is not None:
                pool.admit(found)
                plain.admit(found)
                absent.append(found)
        assert len(pool) == len(plain.waiting)
        if turn % 50 == 0:
            assert list(pool) == plain.waiting
    assert num_admitted > 100 and num_refused > 100


@pytest.mark.release
def test_a_search_asks_few_of_ten_thousand():
    """Where none fits none is asked; where one does, at most those of its block are."""
    sequences = _sequences(10_000)
    pages = {each.key: 5 for each in sequences}
    pages[sequences[7_000].key] = 4
    pool = WaitingPool(
        OrderKeys(_ByRank(1), LengthTracker()), 1, CONFIG.page_size, lambda each: pages[each.key]
    )
    for sequence in sequences:
        pool.add(sequence)
    asked: list[Sequence] = []

    def fits(sequence: Sequence) -> bool:
        asked.append(sequence)
        return True

    assert pool.first_that(fits, lambda _: False, 3) is None and not asked
    assert pool.first_that(fits, lambda _: False, 4) is sequences[7_000] and len(asked) == 1
    pool.admit(sequences[7_000])
    # Those before it have been passed as often as they may: the first one ends the search.
    assert pool.first_that(fits, lambda _: False, 4) is None
    assert pool.first_that(fits, lambda _: False, 5) is sequences[0]


@pytest.mark.release
def test_a_search_for_those_with_a_bound_asks_one_of_ten_thousand_without():
    """That one fits and waits for something else; if it did not fit, none could pass it."""
    order = _ByRank(0)
    keys = OrderKeys(order, LengthTracker())
    bounded = _sequences(9_000, latency_bound=9.0)[-2:]
    pool = WaitingPool(keys, 0, CONFIG.page_size, lambda _: 1)
    others = _sequences(8_000)
    for sequence in (*others, *bounded):
        pool.add(sequence)
    asked: list[Sequence] = []

    def search(num_fit: int) -> Sequence | None:
        asked.clear()
        return pool.first_that(
            lambda each: asked.append(each) or each in bounded or each in others[:num_fit],
            lambda each: each is bounded[0],
            1,
            only_bounded=True,
        )

    assert search(1) is bounded[1] and asked == [others[0], *bounded]
    assert search(0) is None and asked == [others[0]]
    pool.remove(bounded[0])
    pool.remove(others[0])
    assert search(2) is bounded[1] and asked == [others[1], bounded[1]]
    pool.remove(bounded[1])
    assert search(2) is None and asked == [others[1]]
