"""The journal's SQLite file: its schema, how it is opened, and its errors."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from jaxserve.core.errors import JournalError, JournalLockedError, JournalVersionError

SCHEMA_VERSION = 1
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
  PRIMARY KEY (conversation, number)
);
-- Deletions of which there may be traces in the files.
CREATE TABLE unwiped (since_s REAL NOT NULL);
"""


class Connect(Protocol):
    """Opens a connection; `sqlite3.connect` is one."""

    def __call__(
        self, where: str, /, *, timeout: float, isolation_level: None, check_same_thread: bool
    ) -> sqlite3.Connection: ...


def open_journal(
    path: str | Path | None, *, must_exist: bool = False, connect: Connect = sqlite3.connect
) -> sqlite3.Connection:
    """Return a connection for one thread at a time.

    A commit returns when it is on the disk. Only its owner can read a new file.

    Args:
      path: None keeps everything in memory.

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
    """Turn errors of SQLite and of the operating system into typed errors.

    Raises:
      JournalError: or one of its subclasses.
    """
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
    """Create the tables of a new file. Checks in any case that the file can be written."""
    db.execute("BEGIN IMMEDIATE")
    try:
        _check_version(db, where)  # another process may have been faster
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
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
