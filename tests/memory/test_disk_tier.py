"""Files that are written later, checked when they are read, and bounded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.disk_tier import DiskTier

KEYS = [bytes([i]) * 16 for i in range(10)]


def _file(folder: Path, key: bytes) -> Path:
    return folder / f"{key.hex()}.page"


@pytest.fixture
def disk(tmp_path):
    """With room for ten small files."""
    tier = DiskTier(tmp_path / "pages", 1320)
    yield tier
    tier.close()


def test_contents_come_back_also_before_they_are_written(disk):
    """And after a restart; nothing else is found."""
    disk.put(KEYS[0], b"abc" * 33)
    assert disk.get(KEYS[0]) == b"abc" * 33 and KEYS[0] in disk
    disk.flush()
    assert disk.get(KEYS[0]) == b"abc" * 33 and disk.get(KEYS[1]) is None
    again = DiskTier(disk._folder, 1320)
    assert again.get(KEYS[0]) == b"abc" * 33 and again.num_bytes == disk.num_bytes
    again.close()


def test_the_least_recently_used_go_when_there_is_no_room(disk):
    """A file that was read is used."""
    for key in KEYS:
        disk.put(key, b"x" * 100)
    disk.flush()
    assert disk.num_bytes == 1320
    disk.get(KEYS[0])
    disk.put(b"k" * 16, b"x" * 200)
    disk.flush()
    assert [key in disk for key in KEYS[:4]] == [True, False, False, True]
    assert disk.num_bytes == sum(path.stat().st_size for path in disk._folder.iterdir()) <= 1320
    disk.put(b"l" * 16, b"x" * 2000)
    disk.flush()
    assert b"l" * 16 not in disk and not list(disk._folder.glob("*.part"))


def test_a_smaller_bound_after_a_restart_is_kept(disk):
    """The oldest files go."""
    for key in KEYS:
        disk.put(key, b"x" * 100)
    disk.flush()
    again = DiskTier(disk._folder, 500)
    assert again.num_bytes == 396 and sum(key in again for key in KEYS) == 3
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
    path = _file(disk._folder, KEYS[0])
    path.write_bytes(spoil(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert disk.get(KEYS[0]) is None
    assert "not what was written" in caplog.text and disk.num_corrupt == 1
    assert KEYS[0] not in disk and not path.exists() and disk.num_bytes == 0
    disk.put(KEYS[0], b"x" * 100)
    assert disk.get(KEYS[0]) == b"x" * 100


def test_contents_under_the_key_of_others_are_refused(disk):
    """The digest is of both."""
    disk.put(KEYS[0], b"x" * 100)
    disk.flush()
    _file(disk._folder, KEYS[0]).rename(_file(disk._folder, KEYS[1]))
    again = DiskTier(disk._folder, 1320)
    assert KEYS[1] in again and again.get(KEYS[1]) is None
    again.close()


def test_a_disk_that_fails_keeps_nothing_and_says_so_once(disk, caplog):
    """Its folder is gone, as good as a disk that is full."""
    disk._folder.rmdir()
    with caplog.at_level(logging.ERROR):
        for key in KEYS:
            disk.put(key, b"x" * 100)
        disk.flush()
    assert not any(key in disk for key in KEYS) and disk.num_bytes == 0
    assert len(caplog.records) == 1 and "could not be written" in caplog.text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    """Before anything runs."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidConfigError, match="disk_folder"):
        DiskTier(tmp_path / "file", 1000)
