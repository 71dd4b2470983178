"""Conversations in SQLite. A turn is on the disk before its answer is returned."""

from __future__ import annotations

import builtins
import json
import logging
import os
import sqlite3
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from jaxserve.conversations.turns import History, Turn
from jaxserve.core.errors import (
    ConversationConflictError,
    JournalError,
    JournalLockedError,
    JournalVersionError,
    RuntimeClosedError,
    UnknownConversationError,
)
from jaxserve.core.options import JournalLimits

_log = logging.getLogger(__name__)
SCHEMA_VERSION = 2
_APPLICATION_ID = 0x4A585356
_LOCK_TIMEOUT_S = 10.0
_SCHEMA = """
CREATE TABLE conversation (
  key INTEGER PRIMARY KEY AUTOINCREMENT,  -- unlike an id, never reused
  id TEXT NOT NULL UNIQUE,
  vocabulary TEXT NOT NULL,
  created_s REAL NOT NULL,
  used_s REAL NOT NULL,
  num_turns INTEGER NOT NULL,
  num_tokens INTEGER NOT NULL
);
CREATE INDEX conversation_by_use ON conversation (used_s);
CREATE TABLE turn (
  conversation INTEGER NOT NULL REFERENCES conversation (key) ON DELETE CASCADE,
  number INTEGER NOT NULL,
  num_kept INTEGER NOT NULL,
  prompt BLOB NOT NULL,  -- token ids, four bytes each, little-endian
  answer BLOB NOT NULL,
  messages TEXT,  -- JSON
  text TEXT NOT NULL,
  finish_reason TEXT NOT NULL,
  finished_s REAL NOT NULL,
  reasoning TEXT NOT NULL DEFAULT '',  -- since version 2
  PRIMARY KEY (conversation, number)
);
-- Deletions of which there may be traces in the files.
CREATE TABLE unwiped (since_s REAL NOT NULL);
"""


def check_journal(path: str | Path | None) -> None:
    """Raise JournalError, or a subclass, early for a journal that cannot be used."""
    if path is not None:
        Journal(path).close()


@final
@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """A conversation in the journal; `key` is unique even if a later one has the same `id`.

    `vocabulary` is a fingerprint of what its token ids mean. `created_s` and `used_s` are the times
    of its first and last turn, in seconds since 1970.
    """

    key: int
    id: str
    vocabulary: str
    created_s: float
    used_s: float
    num_turns: int
    num_tokens: int


@final
class Journal:
    """Turns of conversations, on disk or in memory. Thread-safe; several processes may share one.

    Every method raises JournalError or one of its subclasses.

    Args:
      path: file; None keeps conversations in memory.
      limits: enforced when the journal is opened and after each turn; None for no limits.
      must_exist: raise instead of creating a file.
      connect: opens the SQLite connection, which the journal sets up and closes.
      now: returns the time of a turn, in seconds since 1970.
    """

    def __init__(
        self,
        path: str | Path | None,
        limits: JournalLimits | None = None,
        *,
        must_exist: bool = False,
        connect: Connect = sqlite3.connect,
        now: Callable[[], float] = time.time,
    ):
        self.where = "in memory" if path is None else str(path)
        self._limits = limits
        self._now = now
        self._lock = threading.RLock()
        self._in_use: Counter[str] = Counter()
        self._next_look_s = 0.0
        self._db = open_journal(path, must_exist=must_exist, connect=connect)
        self._path = None if path is None else Path(path).absolute()
        self._file = None if self._path is None else self._path.stat()
        self._is_closed = False
        if limits is not None:
            self._hold_limits(limits)
            self._finish_wiping()

    @contextmanager
    def using(self, id: str) -> Iterator[None]:
        """Exempt a conversation from the limits within the block."""
        with self._lock:
            self._in_use[id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[id] -= 1
                if not self._in_use[id]:
                    del self._in_use[id]

    def find(self, id: str) -> JournalEntry | None:
        with self._reading() as db:
            row = db.execute(f"SELECT {_ENTRY} FROM conversation WHERE id = ?", (id,)).fetchone()
        return None if row is None else _entry(row)

    def list(self) -> builtins.list[JournalEntry]:
        with self._reading() as db:
            rows = db.execute(f"SELECT {_ENTRY} FROM conversation ORDER BY used_s DESC").fetchall()
        return [_entry(row) for row in rows]

    def history(self, entry: JournalEntry) -> History:
        with self._reading() as db:
            rows = db.execute(
                f"SELECT {_TURN} FROM turn WHERE conversation = ? ORDER BY number", (entry.key,)
            ).fetchall()
        try:
            return History.of([_turn(row) for row in rows])
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            raise JournalError(
                f"the journal {self.where} has a damaged turn of conversation {entry.id!r} "
                f"({error}); delete the conversation, or put back a copy of the file"
            ) from error

    def append(
        self,
        id: str,
        before: JournalEntry | None,
        vocabulary: str,
        history: History,
        turns: Sequence[Turn],
    ) -> JournalEntry:
        """Write turns at the end of a conversation. They are on the disk when this returns.

        Args:
          before: what `find` returned; None begins the conversation.
          history: with the new turns.

        Raises:
          ConversationConflictError: the conversation has changed since `before`; nothing is
            written.
        """
        now_s = self._now()
        with self._writing("written") as db:
            if before is None:
                (taken,) = db.execute(
                    "SELECT count(*) FROM conversation WHERE id = ?", (id,)
                ).fetchone()
                if taken:
                    raise _conflict(id)
                key = db.execute(
                    "INSERT INTO conversation VALUES (NULL, ?, ?, ?, ?, 0, 0)",
                    (id, vocabulary, now_s, now_s),
                ).lastrowid
            else:
                key = before.key
            first = len(history.turns) - len(turns)
            changed = db.execute(
                "UPDATE conversation SET used_s = ?, num_turns = ?, num_tokens = ?"
                " WHERE key = ? AND num_turns = ?",
                (now_s, len(history.turns), len(history.token_ids), key, first),
            ).rowcount
            if changed != 1:
                raise _conflict(id)
            db.executemany(
                f"INSERT INTO turn (conversation, number, {_TURN}) VALUES (?,?,?,?,?,?,?,?,?,?)",
                [(key, first + i, *_turn_row(turn)) for i, turn in enumerate(turns)],
            )
            row = db.execute(f"SELECT {_ENTRY} FROM conversation WHERE key = ?", (key,)).fetchone()
        if self._limits is not None:
            with self.using(id):
                self._hold_limits(self._limits)
        return _entry(row)

    def delete(self, *ids: str) -> None:
        """Delete conversations, and every copy of them in the journal's files.

        This rewrites the journal, at about 160 MB a second.

        Raises:
          UnknownConversationError: an id is unknown; no conversation is deleted.
          JournalLockedError: the conversations are deleted, but another process prevents the
            rewrite, so that copies stay in the files.
        """
        with self._writing("written") as db:
            for id in ids:
                if db.execute("DELETE FROM conversation WHERE id = ?", (id,)).rowcount != 1:
                    raise UnknownConversationError(
                        f"no conversation {id!r} in the journal {self.where}"
                    )
            db.execute("INSERT INTO unwiped VALUES (?)", (self._now(),))
        self._wipe()

    def close(self) -> None:
        """Close the file. The last process that closes it removes SQLite's files next to it."""
        with self._lock:
            self._is_closed = True
            self._db.close()

    # ---- limits ----

    def _hold_limits(self, limits: JournalLimits) -> None:
        """Drop conversations over the limits. Only log errors: the turn is already written."""
        try:
            with self._writing("held within its limits") as db:
                dropped = [*self._drop_old(db, limits), *self._drop_surplus(db, limits)]
                if dropped:
                    db.execute("INSERT INTO unwiped VALUES (?)", (self._now(),))
            if dropped:
                _log.warning(
                    "the journal %s dropped %d conversation(s), the least recently used, to keep "
                    "its limits (journal_limits)",
                    self.where,
                    len(dropped),
                )
                self._wipe()
        except JournalError as error:
            _log.warning("%s", error)

    def _finish_wiping(self) -> None:
        """Rewrite the files if an earlier process deleted conversations without rewriting them."""
        with self._reading() as db:
            (num_unwiped,) = db.execute("SELECT count(*) FROM unwiped").fetchone()
        if num_unwiped:
            try:
                self._wipe()
            except JournalError as error:
                _log.warning("%s", error)

    def _drop_old(self, db: sqlite3.Connection, limits: JournalLimits) -> builtins.list[int]:
        age_s, now_s = limits.max_age_s, self._now()
        if age_s is None or now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + age_s / 8
        return self._drop(db, "used_s < ?", now_s - age_s, limit=-1)

    def _drop_surplus(self, db: sqlite3.Connection, limits: JournalLimits) -> builtins.list[int]:
        dropped: list[int] = []
        most = limits.max_conversations
        (num,) = db.execute("SELECT count(*) FROM conversation").fetchone()
        if num > most:
            dropped += self._drop(db, "?", True, limit=num - most + most // 8)
        if self._num_bytes(db) > limits.num_bytes:
            while self._num_bytes(db) > limits.num_bytes * 7 // 8:
                oldest = self._drop(db, "?", True, limit=1)
                if not oldest:
                    break
                dropped += oldest
        return dropped

    def _drop(
        self, db: sqlite3.Connection, condition: str, value: float, *, limit: int
    ) -> builtins.list[int]:
        """Drop conversations that are not in use, oldest first, and return their keys."""
        in_use = ",".join("?" * len(self._in_use))
        keys = db.execute(
            f"SELECT key FROM conversation WHERE {condition} AND id NOT IN ({in_use})"
            " ORDER BY used_s LIMIT ?",
            (value, *self._in_use, limit),
        ).fetchall()
        db.executemany("DELETE FROM conversation WHERE key = ?", keys)
        return [key for (key,) in keys]

    def _num_bytes(self, db: sqlite3.Connection) -> int:
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        (free,) = db.execute("PRAGMA freelist_count").fetchone()
        (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
        return (pages - free) * page_bytes

    def _wipe(self) -> None:
        """Rewrite the file with the remaining rows, and empty its write-ahead log.

        Overwriting deleted rows (`secure_delete`) is not enough: SQLite does not overwrite the
        copies that it leaves in the unused part of a page when it moves rows to other pages.
        """
        with self._reading("wiped") as db:
            db.execute("VACUUM")
            (is_busy, *_) = db.execute(_EMPTY_LOG).fetchone()
            if not is_busy:
                db.execute("DELETE FROM unwiped")
                db.execute(_EMPTY_LOG).fetchone()
        if is_busy:
            raise JournalLockedError(
                f"the conversations are deleted, but another process reads the journal "
                f"{self.where}, and traces of them stay in {self.where}-wal until it is done; "
                "close it in all processes, delete again, or open it with a runtime"
            )

    # ---- SQLite ----

    @contextmanager
    def _reading(self, what: str = "read") -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._is_closed:
                raise RuntimeClosedError("this runtime, and its journal, was closed")
            with journal_errors(self.where, what):
                yield self._db

    @contextmanager
    def _writing(self, what: str) -> Iterator[sqlite3.Connection]:
        """Write everything in the block, or nothing."""
        with self._reading(what) as db:
            self._check_is_there()
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def _check_is_there(self) -> None:
        """Raise if the file was removed, since SQLite would write to it anyway."""
        if self._path is None or self._file is None:
            return
        if not self._path.exists() or not os.path.samestat(self._path.stat(), self._file):
            raise JournalError(
                f"the journal {self.where} was removed or replaced while it was in use; put it "
                "back, or make a new runtime"
            )


_EMPTY_LOG = "PRAGMA wal_checkpoint(TRUNCATE)"
_ENTRY = "key, id, vocabulary, created_s, used_s, num_turns, num_tokens"
_TURN = "num_kept, prompt, answer, messages, text, finish_reason, finished_s, reasoning"
_ADD_REASONING = "ALTER TABLE turn ADD COLUMN reasoning TEXT NOT NULL DEFAULT ''"


def _entry(row: tuple[Any, ...]) -> JournalEntry:
    return JournalEntry(**dict(zip(_ENTRY.split(", "), row, strict=True)))


def _turn_row(turn: Turn) -> tuple[Any, ...]:
    messages = None if turn.messages is None else json.dumps(turn.messages, ensure_ascii=False)
    return (
        turn.num_kept,
        _packed(turn.prompt),
        _packed(turn.answer),
        messages,
        turn.text,
        turn.finish_reason,
        turn.finished_s,
        turn.reasoning,
    )


def _turn(row: tuple[Any, ...]) -> Turn:
    num_kept, prompt, answer, messages, text, finish_reason, finished_s, reasoning = row
    return Turn(
        num_kept=num_kept,
        prompt=_unpacked(prompt),
        answer=_unpacked(answer),
        messages=None if messages is None else tuple(map(dict, json.loads(messages))),
        text=text,
        finish_reason=finish_reason,
        finished_s=finished_s,
        reasoning=reasoning,
    )


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _unpacked(blob: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(blob) // 4}I", blob)


def _conflict(id: str) -> ConversationConflictError:
    return ConversationConflictError(
        f"another process or runtime has changed conversation {id!r} while this turn was answered; "
        "this turn was not kept. Read the history and ask again, or fork()"
    )


class Connect(Protocol):
    def __call__(
        self, where: str, /, *, timeout: float, isolation_level: None, check_same_thread: bool
    ) -> sqlite3.Connection: ...


def open_journal(
    path: str | Path | None, *, must_exist: bool = False, connect: Connect = sqlite3.connect
) -> sqlite3.Connection:
    """Return a connection for one thread at a time; `path` None keeps everything in memory.

    A commit returns when it is on the disk. Only its owner can read a new file.

    Raises:
      JournalError: the file must exist and does not, cannot be opened, read or written, or belongs
        to another program.
      JournalLockedError, JournalVersionError
    """
    where = ":memory:" if path is None else str(Path(path).absolute())
    with journal_errors(where, "opened"):
        if path is not None:
            _touch(Path(where), must_exist)
        db = connect(where, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            _check_version(db, where)
            (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
            if mode not in ("wal", "memory"):
                raise JournalError(
                    f"the journal {where} cannot have a write-ahead log (mode {mode}), as on a "
                    "network's file system; name a file on a local disk"
                )
            for setting in ("synchronous = FULL", "secure_delete = ON", "foreign_keys = ON"):
                db.execute(f"PRAGMA {setting}")
            _make_tables(db, where)
        except BaseException:
            db.close()
            raise
    return db


@contextmanager
def journal_errors(where: str, what: str) -> Iterator[None]:
    """Turn errors of SQLite and of the operating system into JournalError or a subclass."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # without its extension
        kind = JournalLockedError if code in _LOCKED else JournalError
        remedy = _REMEDIES.get(code, "see whether the file and its disk are sound")
        raise kind(f"the journal {where} cannot be {what}: {error}; {remedy}") from error
    except OSError as error:
        if isinstance(error, JournalError):
            raise
        raise JournalError(
            f"the journal {where} cannot be {what}: {error}; name a file in a folder that can be "
            "written"
        ) from error


def _touch(path: Path, must_exist: bool) -> None:
    if must_exist and not path.is_file():
        raise JournalError(f"there is no journal {path}; give the path of one that was written")
    os.close(os.open(path, os.O_RDWR | (0 if must_exist else os.O_CREAT), 0o600))


def _check_version(db: sqlite3.Connection, where: str) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (num_tables,) = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if application != _APPLICATION_ID and (application or version or num_tables):
        raise JournalError(
            f"{where} is a database of another program (application id {application:#x}); name "
            "another file"
        )
    if version > SCHEMA_VERSION:
        raise JournalVersionError(
            f"the journal {where} has version {version}, written by a newer jaxserve; this one "
            f"reads versions up to {SCHEMA_VERSION}. Update jaxserve, or name another file"
        )


def _make_tables(db: sqlite3.Connection, where: str) -> None:
    """Create the tables of a new file, or bring an older file's up to date.

    Check in any case that the file can be written.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        _check_version(db, where)  # another process may have been faster
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        elif version == 1:
            db.execute(_ADD_REASONING)
        if version < SCHEMA_VERSION:
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    finally:
        if db.in_transaction:
            db.execute("ROLLBACK")


_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_REMEDIES = {
    sqlite3.SQLITE_BUSY: "another process holds it; try again when that has ended",
    sqlite3.SQLITE_LOCKED: "another process holds it; try again when that has ended",
    sqlite3.SQLITE_FULL: "the disk is full; make room, lower journal_limits, or name another file",
    sqlite3.SQLITE_READONLY: "it is read-only; name a file that can be written",
    sqlite3.SQLITE_CANTOPEN: "name a file in a folder that exists and can be written",
    sqlite3.SQLITE_NOTADB: "it is not a journal; name another file",
    sqlite3.SQLITE_CORRUPT: "it is damaged; move it away, or recover it with the sqlite3 tool",
}
