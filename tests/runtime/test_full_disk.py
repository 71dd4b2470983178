"""A disk that is really full: a small file system that only the child process sees."""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler
from pathlib import Path

import pytest

from jaxserve.core.errors import JournalError
from jaxserve.memory.disk_tier import DiskTier, PageFiles
from tests.common.tiers import some
from tests.conversations.fakes import conversations

ROOT = Path(__file__).parents[2]
# In its own namespaces only this process sees the mount, which ends with it.
OWN_DISK = 'mount -t tmpfs -o size=1M none "$0" && exec "$@"'


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the disk within the block, so that not one more byte fits."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while file.write(bytes(4096)) == 4096:
            pass
        file.write(b"x")
    yield
    filler.unlink()


def journal(folder: Path) -> None:
    """A turn that does not fit is not acknowledged; earlier turns remain and continue later."""
    path = str(folder / "kept.sqlite")
    home = conversations(path)
    chat, other = home.open("a"), home.open("b")
    chat.send([1, 2])
    other.send([3])
    before = chat.token_ids
    large = [5] * 5000
    with full(folder):
        for turn in (lambda: chat.send(large), lambda: list(chat.stream(large))):
            with pytest.raises(JournalError, match="disk is full; make room"):
                turn()
        with pytest.raises(JournalError, match="disk is full"):
            home.open("new").send(large)
        assert chat.token_ids == before and len(home.list()) == 2
    whole = (*chat.send(large).prompt_token_ids, *chat.turns[-1].answer)
    assert whole[: len(before)] == before
    home.journal.close()
    again = conversations(path)
    assert again.open("a").token_ids == whole
    assert {entry.id: entry.num_turns for entry in again.list()} == {"a": 2, "b": 1}
    again.journal.close()
    with full(folder), pytest.raises(JournalError):
        conversations(str(folder / "another.sqlite"))


def disk_tier(folder: Path) -> None:
    """Pages that do not fit are dropped, which is logged once; stored pages stay right."""
    said: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(said)
    handler.setLevel(logging.ERROR)
    logging.getLogger("jaxserve").addHandler(handler)
    disk = DiskTier(PageFiles(folder / "pages", 1 << 30))
    keys = [bytes([i]) * 16 for i in range(6)]
    disk.put(keys[0], b"x" * 10_000)
    disk.flush()
    with full(folder):
        for key in keys[1:]:
            disk.put(key, key * 1000)
        disk.flush()
        assert [key in disk for key in keys] == [True] + [False] * 5
        assert [path.suffix for path in (folder / "pages").iterdir()] == [".page"]
        disk.read(keys[0])
        disk.flush()
        assert disk.arrived() == [(keys[0], b"x" * 10_000)]
    disk.put(keys[1], b"y" * 10_000)
    disk.close()
    again = DiskTier(PageFiles(folder / "pages", 1 << 30))
    assert keys[1] in again
    again.close()
    assert said.qsize() == 1 and "No space left" in said.get().getMessage()


@pytest.mark.parametrize(
    "scenario", some([journal, disk_tier]), ids=lambda scenario: scenario.__name__
)
def test_a_full_disk(tmp_path, scenario):
    _skip_without_namespaces(tmp_path)
    program = (
        sys.executable,
        "-m",
        "tests.runtime.test_full_disk",
        scenario.__name__,
        str(tmp_path),
    )
    done = _on_own_disk(tmp_path, *program)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def _skip_without_namespaces(folder: Path) -> None:
    try:
        done = _on_own_disk(folder, "true")
    except FileNotFoundError:
        pytest.skip("there is no unshare to make a file system with")
    if done.returncode:
        pytest.skip(f"a private file system is not permitted here: {done.stderr}")


def _on_own_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", OWN_DISK, str(folder), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


if __name__ == "__main__":
    {"journal": journal, "disk_tier": disk_tier}[sys.argv[1]](Path(sys.argv[2]))
