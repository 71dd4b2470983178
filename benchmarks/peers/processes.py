"""Child processes that leave nothing behind: each leads a group, which ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, final

from jaxserve.core.errors import JaxserveError

ROOT = Path(__file__).resolve().parents[2]
STDERR = 2
SHOWN_LINES = 20
POLL_S = 0.1
GRACE_S = 3.0  # between asking a group to end and ending it


@final
class PeerError(JaxserveError):
    """A peer could not be installed, ended with an error, or did not end."""


def check_call(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end; what it prints goes to stderr.

    Raises:
      PeerError: it ended with an error.
    """
    with _group(command, STDERR, STDERR, env) as process:
        status = process.wait()
    if status:
        raise PeerError(f"{' '.join(command[:6])} ... ended with status {status}")


def run(command: Sequence[str], log: Path, limit_s: float) -> tuple[str, int]:
    """Run a command to its end; what it printed, and its largest process' peak resident bytes.

    Its stderr goes to `log`, of which the end is shown if it fails.

    Raises:
      PeerError: it ended with an error, or not within `limit_s`.
    """
    output = log.with_suffix(".out")
    with (
        log.open("wb") as errors,
        output.open("wb") as printed,
        _group(command, printed, errors) as process,
    ):
        status, peak_bytes = _wait(process, limit_s)
    if status is None:
        raise PeerError(f"no answer after {limit_s:g} s; it was ended")
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        print(*lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
        raise PeerError(f"ended with status {status}: {lines[-1] if lines else 'without a word'}")
    return output.read_text(encoding="utf-8"), peak_bytes


def _wait(process: subprocess.Popen, limit_s: float) -> tuple[int | None, int]:
    """Exit status, None if it still runs after `limit_s`; peak resident bytes."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_maxrss * 1024
        time.sleep(POLL_S)
    return None, 0


@contextlib.contextmanager
def _group(
    command: Sequence[str],
    stdout: IO | int,
    stderr: IO | int,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen]:
    """The command as the leader of a process group, of which nothing is left afterwards.

    A request to end this process counts as Ctrl-C meanwhile.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=env,
        process_group=0,
    )  # fmt: skip
    try:
        yield process
    finally:
        try:
            _end_group(process, signal.SIGTERM)
        finally:
            _end_group(process, signal.SIGKILL)
            signal.signal(signal.SIGTERM, before)


def _end_group(process: subprocess.Popen, kind: signal.Signals) -> None:
    """Signal the group, and wait until it is gone, but not for ever."""
    deadline_s = time.monotonic() + GRACE_S
    there = _signal_group(process.pid, kind)
    while there and time.monotonic() < deadline_s:
        process.poll()
        there = _signal_group(process.pid, 0)
        time.sleep(POLL_S)


def _signal_group(group: int, kind: int) -> bool:
    """Whether anything was there to receive it."""
    try:
        os.killpg(group, kind)
    except ProcessLookupError:
        return False
    return True
