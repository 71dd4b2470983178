"""The page pool counts references and reservations."""

import random
from array import array

import pytest

from jaxserve.memory.page_pool import NULL_PAGE, PagePool, PageTable

pytestmark = pytest.mark.fast


def test_reserved_pages_are_not_available():
    """A reservation reduces the number of available pages without allocating pages."""
    pool = PagePool(6)
    assert pool.reserve(4)
    assert (pool.num_free, pool.num_available) == (5, 1)
    assert not pool.reserve(2)
    pages = pool.allocate(3)
    assert NULL_PAGE not in pages and len(set(pages)) == 3
    pool.unreserve(1)
    assert pool.num_available == 2
    pool.check_integrity()


def test_shared_page_is_free_only_after_its_last_reference():
    """Sharing adds a reference; the page is free when all references are dropped."""
    pool = PagePool(3)
    pool.reserve(1)
    pages = pool.allocate(1)
    pool.lock(pages)
    pool.free(pages)
    assert pool.num_owned == 1
    pool.free(pages)
    assert pool.num_owned == 0
    with pytest.raises(ValueError, match="not owned"):
        pool.free(pages)
    with pytest.raises(ValueError, match="is free"):
        pool.lock(pages)


def test_random_use_keeps_every_page_in_one_state():
    """After random reserving, growing, sharing and closing no page is lost or counted twice."""
    rng = random.Random(0)
    for _ in range(200):
        pool, page_size = PagePool(rng.randint(2, 20)), rng.randint(1, 4)
        tables = [PageTable(pool, page_size) for _ in range(4)]
        for _ in range(40):
            table, other = rng.sample(tables, 2)
            action = rng.randrange(4)
            tokens = rng.randint(1, 40)
            if action == 0 and table.reserve(tokens):
                assert table.num_missing(tokens) == 0
            elif action == 1 and not table.num_missing(tokens):
                table.allocate(tokens)
                assert table.num_pages * page_size >= tokens
            elif action == 2 and not table.reservation:
                shared = dict(enumerate(other.pages[: rng.randint(0, other.num_pages)]))
                table.begin(max(tokens, len(shared) * page_size), shared, len(shared))
            elif action == 3:
                table.close()
            pool.check_integrity()
            assert pool.num_reserved == sum(t.reservation - t.num_pages for t in tables)
            assert {p for t in tables for p in t.pages} == {
                p for p in range(1, pool.num_usable + 1) if pool.refcount(p)
            }


def test_growing_past_the_reservation_is_refused():
    """A table owns only pages that it reserved."""
    table = PageTable(PagePool(4), 2)
    table.reserve(2)
    with pytest.raises(ValueError, match="reserve first"):
        table.allocate(4)


def test_freeing_a_long_table_is_freeing_each_of_its_pages():
    """Pages in one pass count as one by one: shared, retained, and copied to the host."""
    rng = random.Random(1)
    pools = [PagePool(400), PagePool(400)]
    tables = []
    for pool in pools:
        assert pool.reserve(300)
        tables.append(pool.allocate(300))
    for page in tables[0]:
        kind = rng.choice(["shared", "retained", "copied", "dropped"])
        for pool in pools:
            if kind == "shared":
                pool.lock([page])
            elif kind != "dropped":
                pool.retain(page, is_copied=kind == "copied")
    pools[0].free(tables[0])
    pools[1].free_all(array("i", tables[1]))
    for pool in pools:
        pool.check_integrity()
        assert pool.num_copied > 0 and pool.num_owned > 0
    assert pools[0].num_copied == pools[1].num_copied
    assert pools[0].num_free == pools[1].num_free
