"""`jaxserve chat` on a terminal: Ctrl-C, and what remains after it."""

from __future__ import annotations

import io
import os
import pty
import re
import readline
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import pytest
from rich.console import Console

from jaxserve.cli.chat import line_history, shown
from jaxserve.conversations import Journal
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.testing import write_chat_model
from tests.common.processes import HEED_INTERRUPTS
from tests.conversations.fakes import conversations

WAIT_S = 120
CTRL_C = b"\x03"
# A program that execs its arguments with the terminal of its session, as a user's shell does.
ON_ITS_TERMINAL = f"""
{HEED_INTERRUPTS}
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from jaxserve.cli import main
main()
"""


@final
class Terminal:
    """A command that runs on its own pseudo-terminal."""

    def __init__(self, line: str):
        self._ours, theirs = pty.openpty()
        self._said = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_ITS_TERMINAL, *line.split()],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(theirs)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def wait_for(self, pattern: bytes) -> None:
        """Wait for this output after the output that was waited for before."""
        end_s = time.monotonic() + WAIT_S
        while (found := re.search(pattern, self._said)) is None:
            assert self._read() and time.monotonic() < end_s, self._said
        self._said = self._said[found.end() :]

    def wait_for_end(self) -> tuple[int, bytes]:
        """Return the exit code and the last output."""
        end_s = time.monotonic() + WAIT_S
        while self._read():
            assert time.monotonic() < end_s, self._said
        return self.process.wait(WAIT_S), self._said

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self) -> bool:
        """Read the available output; return False if no process holds the terminal any more."""
        if not select.select([self._ours], [], [], 1.0)[0]:
            return True
        try:
            said = os.read(self._ours, 1 << 16)
        except OSError:  # the error of a terminal that its last process has closed
            return False
        self._said += said
        return bool(said)


@contextmanager
def _terminal(line: str) -> Iterator[Terminal]:
    terminal = Terminal(line)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.fast
def test_markdown_is_rendered_on_a_console(capsys: pytest.CaptureFixture[str]):
    """At the end all of an answer is there, though it is longer than the screen, or stopped."""
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=40, height=5, color_system=None)
    items = [f"- item {i}\n" for i in range(20)]
    with pytest.raises(KeyboardInterrupt), shown(console) as show:
        for piece in ("**bold**\n\n", *items):
            show(piece)
        raise KeyboardInterrupt
    drawn = said.getvalue().rpartition("\x1b[2K")[2]
    assert "bold" in drawn and "**" not in drawn
    assert [f"• item {i} " in drawn for i in range(20)] == [True] * 20
    with shown(None) as show:
        show("**bold**")
    assert capsys.readouterr().out == "**bold**"


@pytest.mark.fast
def test_typed_lines_are_kept_for_the_user_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A later chat recalls them; a file that cannot be used is a warning."""
    path = tmp_path / "state" / "chat_history"
    for line in ("first", "second"):
        with line_history(path):
            readline.add_history(line)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().split() == ["first", "second"]
    with line_history(tmp_path / "state" / "chat_history" / "below"):
        pass
    assert "typed lines are not kept" in capsys.readouterr().err


@pytest.mark.release
def test_ctrl_c_stops_an_answer_and_then_leaves(tmp_path: Path):
    """The journal has the acknowledged turns; no process and no lock remains."""
    folder = tmp_path / "model"
    folder.mkdir()
    journal = tmp_path / "journal" / "kept.sqlite"
    journal.parent.mkdir()
    chat = (
        f"chat --model {write_chat_model(folder)} --load random --max-context 16384 --quiet "
        f"--journal {journal} --id mine --max-tokens 16000 --no-history"
    )
    home = conversations(str(journal), tokenizer=Tokenizer.from_folder(folder))
    home.open("mine").send("hi")
    home.journal.close()
    (before,) = _turns(journal)

    with _terminal(chat) as terminal:
        terminal.wait_for(b"continues after 1 turns")
        terminal.wait_for(b"\r\n> ")
        terminal.type(b"endless\n")
        terminal.wait_for(b"(?s)endless\r\n.{20}")
        terminal.type(CTRL_C)
        terminal.wait_for(rb"\(stopped, and not kept\)\r\n> ")
        assert _turns(journal) == [before]
        time.sleep(1)  # Python ignores Ctrl-C between the prompt and the wait for a line
        terminal.type(CTRL_C)
        code, said = terminal.wait_for_end()
        assert code == 130 and b"interrupted" in said and b"Traceback" not in said
        assert b"continue with: jaxserve chat" in said
        with pytest.raises(ProcessLookupError):
            os.killpg(terminal.process.pid, 0)
    assert _turns(journal) == [before]
    assert list(journal.parent.iterdir()) == [journal]


def _turns(journal: Path) -> list[tuple[int, ...]]:
    opened = Journal(journal, must_exist=True)
    (entry,) = opened.list()
    turns = [turn.answer for turn in opened.history(entry).turns]
    opened.close()
    return turns
