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
SAMPLE_S = 0.5  # between looks at the memory in use
GRACE_S = 3.0  # between asking a group to end and ending it


@final
class PeerError(JaxserveError):
    """A peer could not be installed, ended with an error, or did not end."""


def check_call(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end; what it prints goes to stderr.

    Raises:
      PeerError: it ended with an error.
    """
    with group(command, STDERR, STDERR, env) as process:
        status = process.wait()
    if status:
        raise PeerError(f"{' '.join(command[:6])} ... ended with status {status}")


def run(command: Sequence[str], log: Path, limit_s: float) -> tuple[str, int]:
    """Run a command to its end; what it printed, and its processes' peak resident bytes together.

    Its stderr goes to `log`, of which the end is shown if it fails.

    Raises:
      PeerError: it ended with an error, or not within `limit_s`.
    """
    output = log.with_suffix(".out")
    with (
        log.open("wb") as errors,
        output.open("wb") as printed,
        group(command, printed, errors) as process,
    ):
        peak_bytes = _wait(process, limit_s)
        status = process.returncode
    if status is None:
        raise PeerError(f"no answer after {limit_s:g} s; it was ended")
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        print(*lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
        raise PeerError(f"ended with status {status}: {lines[-1] if lines else 'without a word'}")
    return output.read_text(encoding="utf-8"), peak_bytes


def _wait(process: subprocess.Popen, limit_s: float) -> int:
    """Wait for the leader of a group, `limit_s` at most; the group's peak resident bytes.

    Sampled: what the system keeps of a process that ended begins with the size of its parent.
    """
    deadline_s = time.monotonic() + limit_s
    peak_bytes = 0
    while (left_s := deadline_s - time.monotonic()) > 0:
        peak_bytes = max(peak_bytes, _resident_bytes(process.pid))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(SAMPLE_S, left_s))
            break
    return peak_bytes


def _resident_bytes(group: int) -> int:
    """Of all processes of the group together; 0 where there is no /proc."""
    pages = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name in brackets: state, parent, group, and resident pages as the 22nd.
            fields = path.read_text().rpartition(")")[2].split()
            pages += int(fields[21]) if int(fields[2]) == group else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def group(
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
