"""Page files: written and read by a thread, checked when they are read, and bounded in size."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.cached_page import state_key, tail_length
from jaxserve.memory.disk_tier import DiskTier, PageFiles
from tests.common.processes import heeding_interrupts, interrupt
from tests.common.waiting import until
from tests.memory.gate import GatedFiles

pytestmark = pytest.mark.fast

KEYS = [bytes([i]) * 16 for i in range(10)]


def _file(folder: Path, key: bytes) -> Path:
    return folder / f"{key.hex()}.page"


def _get(disk: DiskTier, key: bytes) -> bytes | None:
    """Read the contents, and wait for them."""
    assert disk.read(key)
    disk.flush()
    ((arrived, contents),) = disk.arrived()
    assert arrived == key
    return contents


@pytest.fixture
def disk(tmp_path):
    """A disk tier that holds ten small files."""
    tier = DiskTier(GatedFiles(tmp_path / "pages", 1320))
    yield tier
    tier.close()


def test_contents_come_back_also_before_they_are_written(disk):
    """They also come back after a restart; no other key is found."""
    disk.put(KEYS[0], b"abc" * 33)
    assert _get(disk, KEYS[0]) == b"abc" * 33 and KEYS[0] in disk
    disk.flush()
    assert _get(disk, KEYS[0]) == b"abc" * 33 and _get(disk, KEYS[1]) is None
    disk.close()
    again = DiskTier(PageFiles(disk.files.folder, 1320))
    assert _get(again, KEYS[0]) == b"abc" * 33 and again.files.num_bytes == disk.files.num_bytes
    again.close()


def test_the_least_recently_used_go_when_there_is_no_room(disk):
    """Reading a file counts as a use."""
    for key in KEYS:
        disk.put(key, b"x" * 100)
    disk.flush()
    assert disk.files.num_bytes == 1320
    _get(disk, KEYS[0])
    disk.put(b"k" * 16, b"x" * 200)
    disk.flush()
    assert [key in disk for key in KEYS[:4]] == [True, False, False, True]
    assert (
        disk.files.num_bytes
        == sum(path.stat().st_size for path in disk.files.folder.iterdir())
        <= 1320
    )
    disk.put(b"l" * 16, b"x" * 2000)
    disk.flush()
    assert b"l" * 16 not in disk and not list(disk.files.folder.glob("*.part"))


def test_what_leaves_the_host_again_counts_as_used(disk):
    """Its file, and after a restart too: otherwise the head of a long conversation goes first."""
    for key in KEYS:
        disk.put(key, b"x" * 100)
    disk.flush()
    assert disk.use(KEYS[2]) and not disk.use(b"k" * 16)
    disk.flush()
    for i, key in enumerate((KEYS[0], *KEYS[3:], KEYS[1])):
        os.utime(_file(disk.files.folder, key), (i, i))  # files of one moment have no order
    assert disk.use(KEYS[0]) and disk.use(KEYS[1])
    disk.put(b"k" * 16, b"x" * 600)
    disk.flush()
    assert [key in disk for key in KEYS] == [True] * 3 + [False] * 5 + [True] * 2
    disk.close()
    again = DiskTier(PageFiles(disk.files.folder, 1100))
    assert [key in again for key in KEYS] == [True] * 3 + [False] * 7
    again.close()


def test_states_are_found_by_the_pages_before_them(disk):
    """While they wait to be written, once they are, and after a restart; not once they are gone."""
    states = [state_key(KEYS[0], tail) for tail in ((), (1,), (1, 2))]
    other = state_key(KEYS[1], (1,))
    assert [tail_length(key) for key in states] == [0, 1, 2]
    disk.files.writing.shut()
    for key in (KEYS[0], other, *states):
        disk.put(key, b"x" * 100)
    assert sorted(disk.states_after(KEYS[0])) == sorted(states)
    disk.files.writing.open()
    disk.flush()
    assert sorted(disk.states_after(KEYS[0])) == sorted(states)
    disk.close()
    again = DiskTier(PageFiles(disk.files.folder, 1320))
    _file(disk.files.folder, states[0]).unlink()
    assert _get(again, states[0]) is None and _get(again, states[1]) == b"x" * 100
    assert sorted(again.states_after(KEYS[0])) == sorted(states[1:])
    again.put(KEYS[2], b"x" * 1100)  # there is room for one more file
    again.flush()
    assert again.states_after(KEYS[0]) == [states[1]] and not again.states_after(KEYS[1])
    again.close()


def test_a_smaller_bound_after_a_restart_is_kept(disk):
    for key in KEYS:
        disk.put(key, b"x" * 100)
    disk.flush()
    disk.close()
    again = DiskTier(PageFiles(disk.files.folder, 500))
    assert again.files.num_bytes == 396 and sum(key in again for key in KEYS) == 3
    again.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda contents: contents[:-1],
        lambda contents: contents[:5],
        lambda contents: b"",
        lambda contents: contents[:-1] + b"!",
        lambda contents: b"!" + contents[1:],
    ],
)
def test_what_is_not_what_was_written_is_not_there(disk, spoil, caplog):
    """The file is deleted, and can be written again."""
    disk.put(KEYS[0], b"x" * 100)
    disk.flush()
    path = _file(disk.files.folder, KEYS[0])
    path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert _get(disk, KEYS[0]) is None
    assert "not what was written" in caplog.text and disk.files.num_corrupt == 1
    assert KEYS[0] not in disk and not path.exists() and disk.files.num_bytes == 0
    disk.put(KEYS[0], b"x" * 100)
    assert _get(disk, KEYS[0]) == b"x" * 100


def test_contents_under_the_key_of_others_are_refused(disk):
    """The digest covers key and contents."""
    disk.put(KEYS[0], b"x" * 100)
    disk.flush()
    _file(disk.files.folder, KEYS[0]).rename(_file(disk.files.folder, KEYS[1]))
    disk.close()
    again = DiskTier(PageFiles(disk.files.folder, 1320))
    assert KEYS[1] in again and _get(again, KEYS[1]) is None
    again.close()


def test_a_disk_that_fails_keeps_nothing_and_says_so_once(disk, caplog):
    """Its folder is deleted, which has the same effect as a full disk."""
    disk.files.folder.rmdir()
    with caplog.at_level(logging.ERROR):
        for key in KEYS:
            disk.put(key, b"x" * 100)
        disk.flush()
    assert not any(key in disk for key in KEYS) and disk.files.num_bytes == 0
    assert len(caplog.records) == 1 and "could not be written" in caplog.text


def test_a_folder_is_used_by_one_at_a_time(disk):
    """The second user gets an error; after the first has closed the folder, it is free."""
    with pytest.raises(InvalidConfigError, match="in use by another runtime"):
        DiskTier(PageFiles(disk.files.folder, 1000))
    disk.close()
    again = DiskTier(PageFiles(disk.files.folder, 1000))
    again.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    """The error comes before anything runs."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidConfigError, match="disk_folder"):
        PageFiles(tmp_path / "file", 1000)


def test_no_call_waits_for_a_slow_disk(disk):
    """All calls return at once; contents that arrive are announced in order."""
    for key in KEYS[:3]:
        disk.put(key, b"x" * 100)
    disk.flush()
    told = threading.Semaphore(0)
    disk.files.reading.shut()
    assert all(disk.read(key, told.release) for key in KEYS[:4])
    disk.put(KEYS[5], b"y")
    assert KEYS[5] in disk and not disk.has_arrived and disk.arrived() == []
    disk.files.reading.open()
    for _ in range(4):
        assert told.acquire(timeout=10)
    assert disk.has_arrived
    assert disk.arrived() == [*((key, b"x" * 100) for key in KEYS[:3]), (KEYS[3], None)]
    assert not disk.has_arrived


def test_reading_goes_before_writing(disk):
    """A read, for which a sequence waits, runs before all queued writes."""
    disk.put(KEYS[0], b"x")
    disk.flush()
    writing = disk.files.writing
    writing.shut()
    for key in KEYS[1:4]:
        disk.put(key, b"x")
    writing.wait_for_calls(1)
    disk.read(KEYS[0])
    writing.open()
    disk.flush()
    assert disk.files.keys[1:] == [KEYS[1], KEYS[0], KEYS[2], KEYS[3]]


def test_both_queues_are_bounded(tmp_path):
    """A write beyond the bound is dropped; a read can be requested again."""
    files = GatedFiles(tmp_path)
    disk = DiskTier(files)
    keys = [i.to_bytes(16, "big") for i in range(200)]
    files.writing.shut()
    for key in keys:
        disk.put(key, b"x")
    num_kept = sum(key in disk for key in keys)
    assert 0 < num_kept < 100
    files.writing.open()
    disk.flush()
    assert files.num_written == num_kept
    files.reading.shut()
    num_asked = sum(disk.read(key) for key in keys)
    assert 0 < num_asked < 100
    files.reading.open()
    disk.flush()
    assert len(disk.arrived()) == num_asked and disk.read(keys[-1])
    disk.close()


def _has_ended() -> bool:
    """Return whether no thread of a disk tier is left."""
    return all(thread.name != "jaxserve-disk" for thread in threading.enumerate())


def test_closing_writes_what_waits_and_drops_what_is_asked_for(tmp_path):
    """The thread has ended afterwards."""
    files = GatedFiles(tmp_path)
    disk = DiskTier(files)
    disk.put(KEYS[0], b"x")
    disk.flush()
    files.reading.shut()
    for key in KEYS:
        disk.read(key)
    disk.put(KEYS[1], b"y")
    files.reading.wait_for_calls(1)
    threading.Timer(0.05, files.reading.open).start()
    disk.close()
    assert _has_ended() and len(files.reading.calls) == 1
    again = DiskTier(PageFiles(tmp_path, 1_000_000))
    assert _get(again, KEYS[1]) == b"y"
    again.close()


def test_a_disk_that_hangs_is_left(tmp_path, caplog):
    """Closing does not wait forever, and neither does the interpreter's exit."""
    files = GatedFiles(tmp_path)
    disk = DiskTier(files, patience_s=0.05)
    files.writing.shut()
    for key in KEYS:
        disk.put(key, b"x", waits=True)
    with caplog.at_level(logging.ERROR):
        disk.close()
    assert "has not answered for 0 s" in caplog.text and len(caplog.records) == 1
    files.writing.open()
    until(_has_ended)
    assert files.writing.calls == [KEYS[0]]


def test_ctrl_c_while_closing_leaves_nothing_half_written(tmp_path):
    """The file that is being written is finished; queued files are not begun."""
    files = GatedFiles(tmp_path)
    disk = DiskTier(files)
    files.writing.shut()
    for key in KEYS:
        disk.put(key, b"x")
    files.writing.wait_for_calls(1)
    threading.Timer(0.05, interrupt).start()
    threading.Timer(0.5, files.writing.open).start()
    with heeding_interrupts(), pytest.raises(KeyboardInterrupt):
        disk.close()
    until(_has_ended)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEYS[0].hex()}.page"]
