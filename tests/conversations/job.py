"""A process that hangs at a stage of its second turn, to be killed: `... job STAGE PATH`."""

from __future__ import annotations

import sqlite3
import sys
import time

from tests.conversations.fakes import Connections, FakeTurnClient, conversations

FIRST, SECOND = [1, 2, 3], [4, 5]


def hang() -> None:
    """Notify the parent, and wait to be killed."""
    print("here", flush=True)
    time.sleep(60)


def hang_before(db: sqlite3.Connection, statement: str) -> None:
    """Hang when SQLite is about to execute this statement."""

    def traced(sql: str) -> None:
        if sql.startswith(statement):
            hang()

    db.set_trace_callback(traced)


def main(stage: str, path: str) -> None:
    client, opened = FakeTurnClient(), Connections()
    home = conversations(path, client=client, connect=opened)
    chat = home.open("a")
    chat.send(FIRST)
    if stage == "asked":
        client.during = hang
    elif stage in ("INSERT INTO turn", "COMMIT", "VACUUM", "DELETE FROM unwiped"):
        hang_before(opened.last, stage)
    if stage in ("VACUUM", "DELETE FROM unwiped"):
        chat.delete()
    elif stage == "streaming":
        for _ in chat.stream(SECOND):
            hang()
    elif stage == "last piece":
        for piece in chat.stream(SECOND):
            if piece.finish_reason is not None:
                hang()
    else:
        chat.send(SECOND)
        hang()


if __name__ == "__main__":
    main(*sys.argv[1:])
