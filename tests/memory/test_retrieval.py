"""Pages on disk go to the host, and only sequences that need them wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.memory.cached_page import Branch
from jaxserve.memory.disk_tier import PATIENCE_S, DiskTier
from jaxserve.memory.eviction import CostOverTime, PageValues, RecomputeCost
from jaxserve.memory.page_cache import PageCache
from jaxserve.memory.page_pool import HostPool
from jaxserve.memory.retrieval import Retrieval
from tests.memory.gate import GatedFiles

pytestmark = pytest.mark.fast

NUM_HOST_PAGES = 6
COST = RecomputeCost.analytic(attention=1.0, other=100.0, longest=1024)


class Host:
    """Host pages as bytes."""

    def __init__(self):
        self.pages: dict[int, bytes] = {}
        self.arriving: set[int] = set()

    entry_bytes = 1

    def has_arrived(self, entry: int) -> bool:
        return entry not in self.arriving

    def read(self, entry: int) -> bytes:
        return self.pages[entry]

    def write(self, entry: int, contents: bytes) -> None:
        self.pages[entry] = contents

    def fingerprint(self) -> bytes:
        return b""


class Bench:
    """A cache whose disk has six pages each of `a`, `b` and `c`, and a clock that a test sets."""

    def __init__(self, folder: Path):
        self.now_s = 0.0
        self.host = Host()
        self.files = GatedFiles(folder, 100_000)
        self.disk = DiskTier(self.files)
        self.host_pool = HostPool(NUM_HOST_PAGES)
        self.cache = PageCache(
            9,
            self.host_pool,
            PageValues(4, CostOverTime(), COST, lambda: self.now_s, 0.0),
            disk=self.disk,
            host_memory=self.host,
        )
        self.retrieval = Retrieval(self.cache, lambda: self.now_s, lambda: None)
        for name in "abc":
            for key in self.keys(name, 6):
                self.disk.put(key, b"of " + key)
        self.disk.flush()

    def keys(self, name: str, count: int) -> list[bytes]:
        return [f"{name} {index}".encode() for index in range(count)]

    def wheres(self, name: str, count: int = 6) -> set[str]:
        return {self.cache.tier_of(key) for key in self.keys(name, count)}

    def take_in(self) -> None:
        """Process what has been read from the disk."""
        self.disk.flush()
        self.retrieval.take_in()
        self.cache.check_integrity()


@pytest.fixture
def bench(tmp_path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.disk.close()


def test_a_sequence_waits_until_all_has_come(bench):
    """The pages are then on the host, byte for byte, and the sequence does not wait again."""
    keys = [*bench.keys("a", 3), b"unknown"]
    assert bench.retrieval.awaits(1, keys) and bench.retrieval.awaits(1, keys)
    assert bench.retrieval.gives_up_s == PATIENCE_S
    bench.take_in()
    assert not bench.retrieval.awaits(1, keys) and bench.retrieval.gives_up_s is None
    pages = bench.cache.find(keys)
    assert [bench.host.pages[page.host_page] for page in pages] == [
        b"of " + key for key in keys[:3]
    ]
    assert bench.retrieval.release(1) == {0, 1, 2} and bench.retrieval.release(1) == set()
    assert not bench.retrieval.awaits(2, keys)


def test_two_that_begin_alike_read_once(bench):
    """Both sequences have the pages."""
    assert bench.retrieval.awaits(1, bench.keys("a", 2))
    assert bench.retrieval.awaits(2, bench.keys("a", 3))
    bench.take_in()
    assert sorted(bench.files.reading.calls) == bench.keys("a", 3)
    assert (bench.retrieval.release(1), bench.retrieval.release(2)) == ({0, 1}, {0, 1, 2})


def test_what_does_not_come_is_not_waited_for(bench):
    """One file is damaged, and one is missing."""
    first, second, _ = bench.keys("a", 3)
    (bench.files.folder / f"{first.hex()}.page").write_bytes(b"rotten")
    (bench.files.folder / f"{second.hex()}.page").unlink()
    assert bench.retrieval.awaits(1, bench.keys("a", 3))
    bench.take_in()
    assert not bench.retrieval.awaits(1, bench.keys("a", 3))
    assert bench.retrieval.release(1) == {2}
    assert not bench.retrieval.awaits(1, [first, second])


def test_what_is_evicted_while_it_is_asked_for_is_not_waited_for(bench):
    """The disk's thread evicts files between two looks; nothing would come, nor anybody wake."""
    keys = bench.keys("a", 2)
    bench.files.vanishing.update(keys)
    assert not bench.retrieval.awaits(1, keys) and bench.retrieval.gives_up_s is None
    assert not bench.files.vanishing and bench.retrieval.release(1) == set()


def test_orders_that_the_host_has_no_room_for_come_later(bench):
    """Otherwise they would replace each other; a single order may use the whole host."""
    for sequence, name in enumerate("abc"):
        assert bench.retrieval.awaits(sequence, bench.keys(name, 6))
    bench.take_in()
    assert bench.wheres("a") == {"host"} and bench.wheres("b") | bench.wheres("c") == {"disk"}
    assert not bench.retrieval.awaits(0, bench.keys("a", 6))
    assert bench.retrieval.awaits(1, bench.keys("b", 6))
    bench.retrieval.release(0)
    assert bench.retrieval.awaits(2, bench.keys("c", 6))
    bench.take_in()
    assert bench.wheres("c") == {"host"} and bench.wheres("a") == {"disk"}


def test_none_waits_for_room_of_one_that_waits_for_its_own(bench):
    """Pages that the disk got after the first order are not worth a wait without end."""
    wanted = [bench.keys("a", 3), bench.keys("b", 3)]
    assert all(bench.retrieval.awaits(sequence, keys) for sequence, keys in enumerate(wanted))
    bench.take_in()
    wanted = [keys + bench.keys("c", 4) for keys in wanted]
    assert not any(bench.retrieval.awaits(sequence, keys) for sequence, keys in enumerate(wanted))


def test_those_without_room_may_pass_until_one_begins(bench):
    """What holds the room may wait for the very sequence that needs it."""
    assert not bench.retrieval.stop_waiting_for_host(), "nothing holds the room"
    assert bench.retrieval.awaits(0, bench.keys("a", 6))
    bench.take_in()
    assert bench.retrieval.awaits(1, bench.keys("b", 6)) and bench.retrieval.stop_waiting_for_host()
    assert not bench.retrieval.awaits(1, bench.keys("b", 6))
    bench.retrieval.release(1)
    assert bench.retrieval.awaits(2, bench.keys("c", 6))


def test_those_without_room_look_at_their_pages_once(bench):
    """Until another one gives its room back: a step that plans does not look at all pages again."""

    class Keys(list[bytes]):
        num_looks = 0

        def __iter__(self) -> Iterator[bytes]:
            self.num_looks += 1
            return super().__iter__()

    assert bench.retrieval.awaits(0, bench.keys("a", 6))
    keys = Keys(bench.keys("b", 6))
    assert all(bench.retrieval.awaits(1, keys) for _ in range(5)) and keys.num_looks == 1
    bench.retrieval.release(0)
    assert bench.retrieval.awaits(1, keys) and keys.num_looks == 2
    bench.take_in()
    assert not bench.retrieval.awaits(1, keys) and bench.wheres("b") == {"host"}


def test_what_was_computed_meanwhile_stays_where_it_is(bench):
    """Pages on the device stay there, and those on the disk are not used."""
    gate = bench.files.reading
    gate.shut()
    keys = bench.keys("a", 6)
    assert bench.retrieval.awaits(1, keys)
    gate.wait_for_calls(1)
    assert bench.cache.pool.reserve(1)
    (page,) = bench.cache.pool.allocate(1)
    bench.cache.add(page, 5, keys[5], Branch(0.0))
    gate.open()
    bench.take_in()
    assert not bench.retrieval.awaits(1, keys)
    assert bench.cache.tier_of(keys[5]) == "device" and bench.cache.incoming.num_taken == 0


def test_pages_for_ended_sequences_are_dropped(bench):
    """If a sequence ended or the weights changed, pages that arrive are dropped."""
    for forget in (lambda: bench.retrieval.release(1), bench.retrieval.clear):
        assert bench.retrieval.awaits(1, bench.keys("a", 3))
        forget()
        assert bench.retrieval.gives_up_s is None
        bench.take_in()
        assert bench.wheres("a", 3) == {"disk"} and bench.host_pool.num_free == NUM_HOST_PAGES


def test_a_disk_that_hangs_is_not_waited_for(bench):
    """After the timeout all pages are computed, until the disk answers again."""
    gate = bench.files.reading
    gate.shut()
    assert bench.retrieval.awaits(1, bench.keys("a", 3))
    bench.now_s = PATIENCE_S - 1
    bench.retrieval.take_in()
    assert bench.retrieval.awaits(1, bench.keys("a", 3))
    bench.now_s = PATIENCE_S
    bench.retrieval.take_in()
    assert not bench.retrieval.awaits(1, bench.keys("a", 3))
    assert not bench.retrieval.awaits(2, bench.keys("b", 3))
    gate.open()
    bench.take_in()
    assert bench.retrieval.awaits(2, bench.keys("b", 3))
    bench.take_in()
    assert bench.retrieval.release(2) == {0, 1, 2}


def test_what_has_not_arrived_on_the_host_does_not_leave_it_for_the_disk(bench):
    """Its copy is on its way or has failed; later ones leave, and where there are none, none."""
    keys = bench.keys("x", NUM_HOST_PAGES)
    for index, key in enumerate(keys):
        assert bench.cache.load(index, key, b"of " + key, Branch(0.0))
    pages = bench.cache.find(keys)
    bench.host.arriving = {page.host_page for page in pages[:3] + pages[4:]}
    assert bench.cache.load(8, b"x 8", b"8", Branch(0.0))
    assert [page.index for page in pages if page.host_page is None] == [3]
    bench.host.arriving = set(range(NUM_HOST_PAGES))
    assert not bench.cache.load(9, b"x 9", b"9", Branch(0.0))
    bench.disk.flush()
    assert [key in bench.disk for key in keys] == [False] * 3 + [True] + [False] * 2
    bench.cache.check_integrity()
