"""Conversations in SQLite: every turn is there before anybody hears of it."""

from __future__ import annotations

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
from typing import Any, final

from jaxserve.conversations.journal_file import Connect, journal_errors, open_journal
from jaxserve.conversations.turns import History, Turn
from jaxserve.core.errors import (
    ConversationConflictError,
    JournalError,
    JournalLockedError,
    RuntimeClosedError,
    UnknownConversationError,
)
from jaxserve.core.journal_limits import JournalLimits

_log = logging.getLogger(__name__)


def check_journal(path: str | Path | None) -> None:
    """Refuse a journal that cannot be used, before anything slow has happened.

    Raises:
      JournalError: one of its subclasses.
    """
    if path is not None:
        Journal(path).close()


@final
@dataclass(frozen=True, kw_only=True)
class Entry:
    """A conversation in the journal.

    Attributes:
      key: of this conversation alone, also when another of its id comes after it.
      vocabulary: fingerprint of what its tokens mean.
      created_s, used_s: seconds since 1970, of its first and last turn.
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

    Args:
      path: of the file; None for memory alone.
      limits: held from the opening on, whenever a turn has been written; None for none.
      must_exist: refuse to begin a file.
      connect: opens the SQLite connection, which the journal sets up and closes.
      now: returns the seconds since 1970 that turns are dated with.

    Raises:
      JournalError: one of its subclasses, as all methods do.
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
        """For the length of the block no limit drops this conversation."""
        with self._lock:
            self._in_use[id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[id] -= 1
                if not self._in_use[id]:
                    del self._in_use[id]

    def find(self, id: str) -> Entry | None:
        """The conversation of this id, if there is one."""
        with self._reading() as db:
            row = db.execute(f"SELECT {_ENTRY} FROM conversation WHERE id = ?", (id,)).fetchone()
        return None if row is None else _entry(row)

    def list(self) -> list[Entry]:
        """All conversations, the one used last first."""
        with self._reading() as db:
            rows = db.execute(f"SELECT {_ENTRY} FROM conversation ORDER BY used_s DESC").fetchall()
        return [_entry(row) for row in rows]

    def history(self, entry: Entry) -> History:
        """Its turns."""
        with self._reading() as db:
            rows = db.execute(
                f"SELECT {_TURN} FROM turn WHERE conversation = ? ORDER BY number", (entry.key,)
            ).fetchall()
        return History.of([_turn(row) for row in rows])

    def append(
        self,
        id: str,
        before: Entry | None,
        vocabulary: str,
        history: History,
        turns: Sequence[Turn],
    ) -> Entry:
        """Write turns at the end of a conversation; on the disk when this returns.

        Args:
          before: what `find` said of it; None begins it.
          history: with the new turns.

        Raises:
          ConversationConflictError: it is not as it was `before`; nothing was written.
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
                f"INSERT INTO turn (conversation, number, {_TURN}) VALUES (?,?,?,?,?,?,?,?,?)",
                [(key, first + i, *_turn_row(turn)) for i, turn in enumerate(turns)],
            )
            row = db.execute(f"SELECT {_ENTRY} FROM conversation WHERE key = ?", (key,)).fetchone()
        if self._limits is not None:
            with self.using(id):
                self._hold_limits(self._limits)
        return _entry(row)

    def delete(self, *ids: str) -> None:
        """Forget conversations, and wipe every trace of them from the journal's files.

        The rest of the journal is written anew for this, about 160 MB a second.

        Raises:
          UnknownConversationError: there is one that is not there; then none is deleted.
          JournalLockedError: they are deleted, but another process keeps traces from being wiped.
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
        """Of several processes the last one to close tidies up the files."""
        with self._lock:
            self._is_closed = True
            self._db.close()

    # ---- limits ----

    def _hold_limits(self, limits: JournalLimits) -> None:
        """Drop what is over the limits. What goes wrong is logged: the turn has been written."""
        try:
            with self._writing("held within its limits") as db:
                dropped = [*self._drop_old(db, limits), *self._drop_surplus(db, limits)]
                if dropped:
                    db.execute("INSERT INTO unwiped VALUES (?)", (self._now(),))
            if dropped:
                _log.warning(
                    "the journal %s dropped %d conversation(s), used longest ago, to keep its "
                    "limits (journal_limits)",
                    self.where,
                    len(dropped),
                )
                self._wipe()
        except JournalError as error:
            _log.warning("%s", error)

    def _finish_wiping(self) -> None:
        """Of deletions after which a process was killed, or could not wipe."""
        with self._reading() as db:
            (num_unwiped,) = db.execute("SELECT count(*) FROM unwiped").fetchone()
        if num_unwiped:
            try:
                self._wipe()
            except JournalError as error:
                _log.warning("%s", error)

    def _drop_old(self, db: sqlite3.Connection, limits: JournalLimits) -> list[int]:
        age_s, now_s = limits.max_age_s, self._now()
        if age_s is None or now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + age_s / 8
        return self._drop(db, "used_s < ?", now_s - age_s, limit=-1)

    def _drop_surplus(self, db: sqlite3.Connection, limits: JournalLimits) -> list[int]:
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
    ) -> list[int]:
        """Keys of those dropped, oldest first, of which none is in use."""
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
        """Write the file anew, with what it still holds, and empty the log beside it.

        Overwriting what is deleted (`secure_delete`) is not enough: copies that SQLite leaves in
        the unused part of a page, when it moves rows to others, are not overwritten.
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
                f"{self.where}, and traces of them stay in {self.where}-wal until it is done; they "
                "are gone when all have closed it, after the next deletion, or when a runtime "
                "opens it"
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
        """All of the block, or nothing."""
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
        """SQLite would go on writing to a file that nobody can open any more."""
        if self._path is None or self._file is None:
            return
        if not self._path.exists() or not os.path.samestat(self._path.stat(), self._file):
            raise JournalError(
                f"the journal {self.where} was removed or replaced while it was in use; put it "
                "back, or make a new runtime"
            )


_EMPTY_LOG = "PRAGMA wal_checkpoint(TRUNCATE)"
_ENTRY = "key, id, vocabulary, created_s, used_s, num_turns, num_tokens"
_TURN = "num_kept, prompt, answer, messages, text, finish_reason, finished_s"


def _entry(row: tuple[Any, ...]) -> Entry:
    return Entry(**dict(zip(_ENTRY.split(", "), row, strict=True)))


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
    )


def _turn(row: tuple[Any, ...]) -> Turn:
    num_kept, prompt, answer, messages, text, finish_reason, finished_s = row
    return Turn(
        num_kept=num_kept,
        prompt=_unpacked(prompt),
        answer=_unpacked(answer),
        messages=None if messages is None else tuple(json.loads(messages)),
        text=text,
        finish_reason=finish_reason,
        finished_s=finished_s,
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
