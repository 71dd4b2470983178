"""A host page has one owner at a time, and is freed once."""

import pytest

from jaxserve.memory.page_pool import HostPool

pytestmark = pytest.mark.fast


def test_pages_are_allocated_once_and_can_be_allocated_again():
    """Two owners do not share a page, and a freed page can be allocated."""
    pool = HostPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert not set(first) & set(second) and pool.num_free == 0
    pool.free(first)
    assert set(pool.allocate(2)) == set(first)


def test_more_than_there_are_free_is_refused():
    """The refused call allocates no page."""
    pool = HostPool(3)
    pool.allocate(2)
    with pytest.raises(ValueError, match="2 host pages wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_a_free_page_cannot_be_freed():
    """Otherwise its next owner would share it."""
    pool = HostPool(3)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="not allocated"):
        pool.free(pages)
