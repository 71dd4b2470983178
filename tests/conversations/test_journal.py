"""The journal: what it returns, drops and erases, and which errors stop it."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.conversations import History, Journal, Turn
from jaxserve.conversations.journal import SCHEMA_VERSION, open_journal
from jaxserve.core.errors import (
    InvalidConfigError,
    JournalError,
    JournalLockedError,
    JournalVersionError,
    RuntimeClosedError,
    UnknownConversationError,
)
from jaxserve.core.options import JournalLimits
from tests.common.tiers import some
from tests.conversations.fakes import Connections

pytestmark = pytest.mark.fast

TURN = Turn(
    num_kept=0,
    prompt=(1, 2**32 - 1, 3),
    answer=(4, 5),
    messages=({"role": "user", "content": "naïve 好"},),
    text="an answer",
    finish_reason="stop",
    finished_s=1e9 + 0.25,
)


def _say(journal: Journal, id: str, text: str = "", turn: Turn = TURN) -> History:
    """Write one more turn, with `text` as its answer."""
    entry = journal.find(id)
    before = History() if entry is None else journal.history(entry)
    turn = replace(turn, num_kept=len(before.token_ids), text=text)
    history = before.extended(turn)
    journal.append(id, entry, "words", history, [turn])
    return history


def _all_bytes(path: Path) -> bytes:
    """Return the bytes of all files of the journal."""
    return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))


def test_turns_come_back_as_they_were(tmp_path):
    """All written data is there after closing and opening, and only the owner can read the file."""
    path = tmp_path / "journal"
    journal = Journal(path)
    _say(journal, "a", "first")
    history = _say(journal, "a", "second")
    _say(journal, "b", turn=replace(TURN, messages=None))
    entries = journal.list()
    journal.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = Journal(path)
    assert again.list() == entries and [entry.id for entry in entries] == ["b", "a"]
    assert again.history(entries[1]) == history
    assert (entries[1].num_turns, entries[1].num_tokens) == (2, 10)
    assert not again.history(entries[0]).is_chat
    assert again.find("c") is None
    again.close()
    with pytest.raises(RuntimeClosedError):
        again.list()


def test_a_commit_waits_for_the_disk(tmp_path):
    """The journal has a write-ahead log, synchronous commits, and overwrites deleted content."""
    db = open_journal(tmp_path / "journal")
    settings = [
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous", "secure_delete", "foreign_keys")
    ]
    assert settings == ["wal", 2, 1, 1]
    db.close()


@pytest.mark.parametrize("seed", some(range(4)))
def test_nothing_of_a_deleted_conversation_stays(tmp_path, seed):
    """No words and no ids remain in any file, wherever SQLite had moved them."""
    rng = random.Random(seed)
    path = tmp_path / "journal"
    journal = Journal(path)
    kept: set[str] = set()
    for _ in range(120):
        if rng.random() < 0.8 or not kept:
            id = rng.choice(sorted(kept)) if kept and rng.random() < 0.6 else f"id{rng.random()}"
            kept.add(id)
            said = ({"role": "user", "content": f"<{id}> " * rng.randrange(60)},)
            text = f"<{id}> " * rng.randrange(300)
            _say(journal, id, text, replace(TURN, messages=said))
        else:
            gone = rng.choice(sorted(kept))
            kept.remove(gone)
            assert gone.encode() in _all_bytes(path)
            journal.delete(gone)
            assert gone.encode() not in _all_bytes(path), f"seed {seed}"
            assert (tmp_path / "journal-wal").stat().st_size == 0
    assert {entry.id for entry in journal.list()} == kept
    journal.close()


def test_deleting_is_all_or_nothing(tmp_path):
    """An unknown id prevents the deletion of the others."""
    journal = Journal(tmp_path / "journal")
    _say(journal, "a")
    with pytest.raises(UnknownConversationError, match="'b'"):
        journal.delete("a", "b")
    assert [entry.id for entry in journal.list()] == ["a"]
    journal.close()


def test_a_reader_may_delay_the_wiping(tmp_path):
    """The error says that traces remain in the log; they are gone when the reader has finished."""
    path = tmp_path / "journal"
    journal = Journal(path, connect=Connections(timeout=0.05))
    _say(journal, "a", "my secret")
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM turn").fetchone()
    with pytest.raises(JournalLockedError, match="traces"):
        journal.delete("a")
    assert journal.list() == []
    reader.execute("COMMIT")
    reader.close()
    journal.close()
    assert b"my secret" not in _all_bytes(path)


@pytest.mark.parametrize("path", [None, "journal"])
def test_too_many_conversations(tmp_path, path, caplog):
    """The least recently used ones are dropped, an eighth of the limit at once; busy ones stay."""
    journal = Journal(path and tmp_path / path, JournalLimits(max_conversations=16))
    for i in range(16):
        _say(journal, f"c{i}")
    _say(journal, "c0")
    with journal.using("c1"):
        _say(journal, "c16")
    left = {entry.id for entry in journal.list()}
    assert left == {f"c{i}" for i in range(17)} - {"c2", "c3", "c4"}
    assert "dropped 3 conversation(s)" in caplog.text
    journal.close()


def test_too_large_a_journal(tmp_path):
    """The file stays under the limit and dropped data is erased; a single one may exceed it."""
    path = tmp_path / "journal"
    journal = Journal(path, JournalLimits(max_bytes="200KiB"))
    for i in range(40):
        _say(journal, f"c{i}", f"<c{i}> " * 3000)
        assert path.stat().st_size <= 200 * 1024
    left = [entry.id for entry in journal.list()]
    assert left[0] == "c39" and 5 < len(left) < 12
    assert b"<c3> " not in _all_bytes(path)
    _say(journal, "big", "x" * 300_000)
    assert [entry.id for entry in journal.list()] == ["big"]
    journal.close()


def test_too_old_conversations(tmp_path):
    """They are dropped when the journal is opened, and while it is open."""
    now_s = time.time()
    path, limits = tmp_path / "journal", JournalLimits(max_age_s=100)
    journal = Journal(path, limits, now=lambda: now_s)
    _say(journal, "a")
    now_s += 60
    _say(journal, "b")
    now_s += 60
    _say(journal, "c")
    assert [entry.id for entry in journal.list()] == ["c", "b"]
    journal.close()
    now_s += 90
    opened = Journal(path, now=lambda: now_s)
    assert len(opened.list()) == 2, "without limits nothing is dropped"
    opened.close()
    opened = Journal(path, limits, now=lambda: now_s)
    assert [entry.id for entry in opened.list()] == ["c"]
    opened.close()


def test_a_journal_of_version_1_goes_on(tmp_path):
    """Its turns are read without thinking, and later ones are kept with theirs."""
    path = tmp_path / "journal"
    journal = Journal(path)
    history = _say(journal, "a", "kept")
    journal.close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE turn DROP COLUMN reasoning")
        db.execute("PRAGMA user_version = 1")
    db.close()
    journal = Journal(path)
    entry = journal.find("a")
    assert entry is not None and journal.history(entry) == history
    turn = replace(history.turns[0], reasoning="hm", num_kept=0)
    journal.append("b", None, "v", History.of([turn]), [turn])
    journal.close()
    journal = Journal(path)
    entry = journal.find("b")
    assert entry is not None
    assert journal.history(entry).messages[-1] == {
        "role": "assistant",
        "content": turn.text,
        "reasoning_content": "hm",
    }
    journal.close()


def test_a_full_disk_loses_no_turn(tmp_path, caplog):
    """The turn that does not fit raises a typed error; earlier turns are there and continue."""
    path, opened = tmp_path / "journal", Connections()
    journal = Journal(path, JournalLimits(), connect=opened)
    history = _say(journal, "a", "kept")
    (pages,) = opened.last.execute("PRAGMA page_count").fetchone()
    opened.last.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(JournalError, match="disk is full; make room"):
        _say(journal, "a", "x" * 100_000)
    with pytest.raises(JournalError, match="disk is full"):
        _say(journal, "b", "x" * 100_000)
    entry = journal.find("a")
    assert entry is not None and journal.history(entry) == history and journal.find("b") is None
    opened.last.execute("PRAGMA max_page_count = 100000")
    _say(journal, "a", "x" * 100_000)
    journal.close()


def test_a_locked_journal(tmp_path):
    """Another process may lock it for a while; after the timeout the turn fails."""
    path, brief = tmp_path / "journal", Connections(timeout=0.05)
    journal = Journal(path, connect=brief)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalLockedError, match="another process holds it"):
        _say(journal, "a")
    with pytest.raises(JournalLockedError):
        Journal(path, connect=brief)
    holder.execute("ROLLBACK")
    _say(journal, "a")
    holder.close()
    journal.close()


def test_files_that_are_no_journals(tmp_path):
    """Each is refused with a reason, and is not changed."""
    text = tmp_path / "text"
    text.write_bytes(b"just some words, and many of them" * 100)
    other = tmp_path / "other"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    newer = tmp_path / "newer"
    Journal(newer).close()
    with sqlite3.connect(newer) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    before = [path.read_bytes() for path in (text, other, newer)]
    for path, kind, said in (
        (text, JournalError, "not a journal"),
        (other, JournalError, "another program"),
        (newer, JournalVersionError, "newer jaxserve"),
        (tmp_path, JournalError, "cannot be opened"),
        (tmp_path / "no" / "folder", JournalError, "cannot be opened"),
    ):
        with pytest.raises(kind, match=said):
            Journal(path)
    assert [path.read_bytes() for path in (text, other, newer)] == before
    with pytest.raises(JournalError, match="there is no journal"):
        Journal(tmp_path / "none", must_exist=True)
    assert not (tmp_path / "none").exists()


OTHER_USER = 65534


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder of an unprivileged user; the superuser becomes that user."""
    is_superuser = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        if is_superuser:
            os.chown(folder, OTHER_USER, OTHER_USER)
            os.seteuid(OTHER_USER)
        try:
            yield Path(folder)
        finally:
            if is_superuser:
                os.seteuid(0)


@pytest.mark.parametrize(
    "damage",
    [
        "prompt = x'0102030405'",
        "answer = 7",
        "messages = '[{'",
        "messages = '7'",
        "messages = '[7]'",
        f"messages = '{'[' * 100_000}'",
        "num_kept = 'x'",
    ],
    ids=lambda damage: damage[:20],
)
def test_a_damaged_turn_is_an_error_of_its_conversation(tmp_path, damage):
    """It is typed and names the conversation; others are read, and the damaged one is deleted."""
    path = tmp_path / "journal"
    _say(Journal(path), "sound")
    journal = Journal(path)
    _say(journal, "damaged")
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE turn SET {damage} WHERE conversation = 2")
    sound, damaged = journal.find("sound"), journal.find("damaged")
    assert sound is not None and damaged is not None
    with pytest.raises(JournalError, match="damaged turn of conversation 'damaged'"):
        journal.history(damaged)
    assert len(journal.history(sound).turns) == 1
    journal.delete("damaged")
    assert journal.find("damaged") is None


def test_a_read_only_journal(as_nobody):
    path = as_nobody / "journal"
    Journal(path).close()
    path.chmod(0o400)
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(path)


def test_a_journal_that_turns_read_only(tmp_path):
    """The turn raises a typed error, and earlier turns remain."""
    opened = Connections()
    journal = Journal(tmp_path / "journal", connect=opened)
    history = _say(journal, "a")
    opened.last.execute("PRAGMA query_only = ON")
    with pytest.raises(JournalError, match="read-only; name a file"):
        _say(journal, "a")
    entry = journal.find("a")
    assert entry is not None and journal.history(entry) == history
    journal.close()


def test_a_journal_that_was_taken_away(tmp_path):
    """A turn that would go to a deleted file is refused until the file is back."""
    path, elsewhere = tmp_path / "journal", tmp_path / "elsewhere"
    journal = Journal(path)
    _say(journal, "a")
    path.rename(elsewhere)
    with pytest.raises(JournalError, match="removed or replaced"):
        _say(journal, "a")
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="removed or replaced"):
        _say(journal, "a")
    elsewhere.rename(path)
    _say(journal, "a")
    journal.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_conversations": 0},
        {"max_conversations": "many"},
        {"max_bytes": "much"},
        {"max_age_s": 0},
        {"max_age_s": float("nan")},
    ],
)
def test_limits_are_checked(bad):
    with pytest.raises(InvalidConfigError, match=str(next(iter(bad.values())))):
        JournalLimits(**bad)
