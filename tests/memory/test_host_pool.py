"""Host pages are taken by one sequence at a time, and given back once."""

import pytest

from jaxserve.memory.host_pool import HostPool


def test_pages_are_taken_once_and_can_be_taken_again():
    """Two takers never share a page, and what was released is free."""
    pool = HostPool(5)
    first, second = pool.take(2), pool.take(3)
    assert not set(first) & set(second) and pool.num_free == 0
    pool.release(first)
    assert set(pool.take(2)) == set(first)


def test_more_than_there_are_free_is_refused():
    """And takes nothing."""
    pool = HostPool(3)
    pool.take(2)
    with pytest.raises(ValueError, match="2 host pages wanted, 1 free"):
        pool.take(2)
    assert pool.num_free == 1


def test_a_free_page_cannot_be_released():
    """That would be somebody else's next."""
    pool = HostPool(3)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="not taken"):
        pool.release(pages)
