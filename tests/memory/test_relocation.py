"""Live pages move below a new end with the fewest moves, and page tables follow."""

import random

import numpy as np
import pytest

from jaxserve.memory.page_pool import (
    NULL_PAGE,
    PagePool,
    PageTable,
    fewest_moves,
    page_sources,
    page_targets,
)

pytestmark = pytest.mark.fast


def test_only_pages_beyond_the_end_move():
    """Each such page moves once, onto a free page below the end, and not onto the null page."""
    for seed in range(500):
        rng = random.Random(seed)
        old, new = rng.randint(2, 40), rng.randint(2, 40)
        owned = rng.sample(range(1, old), rng.randint(0, min(old, new) - 1))
        moves = fewest_moves(owned, new)
        # The minimum: these pages cannot stay.
        assert [page for page, _ in moves] == sorted(p for p in owned if p >= new), seed
        targets = [target for _, target in moves]
        assert len({*targets, *(p for p in owned if p < new)}) == len(owned), seed
        assert all(NULL_PAGE < target < new for target in targets), seed


def test_too_many_pages_are_refused():
    """The null page has no owner."""
    with pytest.raises(ValueError, match="3 owned pages do not fit into 2"):
        fewest_moves([1, 2, 9], 3)


def _random_tables(rng: random.Random, pool: PagePool) -> list[PageTable]:
    """Return tables that hold pages, some of them shared, and reservations."""
    tables = [PageTable(pool, 1) for _ in range(5)]
    for _ in range(30):
        table, other = rng.sample(tables, 2)
        action = rng.randrange(3)
        if action == 0 and table.reserve(table.num_pages + rng.randint(0, 6)):
            table.allocate(rng.randint(0, table.reservation))
        elif action == 1 and not table.reservation:
            shared = dict(enumerate(other.pages[: rng.randint(0, other.num_pages)]))
            table.begin(len(shared), shared, len(shared))
        elif action == 2:
            table.reserve(table.reservation + 1)
    for table in rng.sample(tables, 2):
        table.close()
    return tables


def test_a_resized_pool_keeps_contents_references_and_reservations():
    """Every table reads the same contents, and shared pages stay shared, after both resizes."""
    num_moves = 0
    for seed in range(300):
        rng = random.Random(seed)
        num_pages = rng.randint(2, 30)
        pool = PagePool(num_pages)
        tables = _random_tables(rng, pool)
        contents = rng.sample(range(1000), num_pages)
        wanted = [[contents[page] for page in table.pages] for table in tables]
        references = sorted(pool.refcount(page) for page in pool.held)
        reserved = pool.num_reserved
        for _ in range(4):
            smallest = max(2, 1 + pool.num_owned + reserved)
            size = rng.choice([smallest, rng.randint(smallest, 40)])
            moves = fewest_moves(pool.held, size)
            num_moves += len(moves)
            contents = [contents[page] for page in page_sources(len(contents), size, moves)]
            pool.resize(size, moves)
            for table in tables:
                table.relocate(dict(moves))
            pool.check_integrity()
            assert (pool.num_usable, pool.num_reserved) == (size - 1, reserved), seed
            assert sorted(pool.refcount(page) for page in pool.held) == references, seed
            assert [[contents[page] for page in t.pages] for t in tables] == wanted, seed
        for table in tables:
            table.close()
        assert pool.num_available == pool.num_usable, seed
    assert num_moves > 50


def test_tables_and_contents_agree_on_where_pages_went():
    """`page_targets` and `page_sources` are inverse; a dropped page maps to the null page."""
    moves = fewest_moves([1, 3, 6, 7], 5)
    assert moves == [(6, 2), (7, 4)]
    np.testing.assert_array_equal(page_sources(8, 5, moves), [0, 1, 6, 3, 7])
    np.testing.assert_array_equal(page_targets(8, 5, moves), [0, 1, 2, 3, 4, 0, 2, 4])
    np.testing.assert_array_equal(page_sources(3, 5, ()), [0, 1, 2, 0, 0])


def test_a_size_that_loses_pages_is_refused():
    """Owned pages and reservations are not dropped, and the failed call changes nothing."""
    pool = PagePool(6)
    pool.reserve(3)
    (page, _) = pool.allocate(2)
    for size, moves, message in (
        (3, (), "2 owned and 1 reserved pages do not fit into 2"),
        (5, [(page, 7)], "cannot go to 7"),
        (5, [(page, NULL_PAGE)], "cannot go to 0"),
        (1, (), "the null page and at least one more"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.resize(size, moves)
        pool.check_integrity()
        assert (pool.num_usable, pool.num_owned, pool.num_reserved) == (5, 2, 1)
