"""After kill -9 at any stage of a turn, exactly the acknowledged turns are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.tiers import some
from tests.conversations.fakes import Connections, conversations
from tests.conversations.job import FIRST, SECOND

ROOT = Path(__file__).parents[2]


def _killed_at(stage: str, path: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.conversations.job", stage, path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.kill()
    assert (said, process.returncode) == ("here\n", -9)


@pytest.mark.parametrize(
    ("stage", "is_kept"),
    some(
        [
            ("asked", False),
            ("streaming", False),
            ("INSERT INTO turn", False),
            ("COMMIT", False),
            ("last piece", True),
            ("acknowledged", True),
        ],
        0,
        1,
    ),
)
def test_a_killed_process_keeps_what_it_acknowledged(tmp_path, stage, is_kept):
    """The next process continues with the same tokens as without the kill."""
    path = str(tmp_path / "journal")
    undisturbed = conversations().open("a")
    for said in (FIRST, SECOND, [6]):
        undisturbed.send(said)
    _killed_at(stage, path)
    chat = conversations(path).open("a")
    assert chat.turns[0].answer == undisturbed.turns[0].answer
    assert len(chat.turns) == 1 + is_kept
    for said in ([], [SECOND])[not is_kept]:
        chat.send(said)
    chat.send([6])
    assert chat.token_ids == undisturbed.token_ids


@pytest.mark.parametrize("stage", some(["VACUUM", "DELETE FROM unwiped"]))
def test_a_killed_deletion_is_finished(tmp_path, stage):
    """The deleted data is gone, and its traces are erased when the journal is next opened."""
    path = tmp_path / "journal"
    answer = conversations().open("a").send(FIRST).token_ids
    _killed_at(stage, str(path))
    opened = Connections()
    home = conversations(str(path), connect=opened)
    assert home.list() == []
    blob = b"".join(token_id.to_bytes(4, "little") for token_id in answer)
    assert all(blob not in file.read_bytes() for file in tmp_path.iterdir())
    assert opened.last.execute("SELECT count(*) FROM unwiped").fetchone() == (0,)
