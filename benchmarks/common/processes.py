"""Child processes that leave no process behind: each leads a process group that ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, final

from benchmarks.common.environment import ROOT
from jaxserve.core.errors import InvalidConfigError, JaxserveError

T = TypeVar("T")
STDERR = 2
SHOWN_LINES = 20
POLL_S = 0.1
SAMPLE_S = 0.5  # between two samples of the memory in use
GRACE_S = 3.0  # between SIGTERM and SIGKILL


@final
class PeerError(JaxserveError):
    """A peer could not be installed, ended with an error, or did not end."""


def chosen(
    names: str | None, known: Mapping[str, T], groups: Mapping[str, Sequence[str]] | None = None
) -> dict[str, T]:
    """Return the peers of a list separated by commas; a group is replaced by its members.

    Raises:
      InvalidConfigError: a name is neither.
    """
    groups = groups or {}
    given = [] if names is None else [name.strip() for name in names.split(",")]
    if unknown := sorted(set(given) - set(known) - set(groups)):
        raise InvalidConfigError(
            f"unknown peer(s) {unknown}; known are {sorted([*groups, *known])}, separated by commas"
        )
    return {member: known[member] for name in given for member in groups.get(name, (name,))}


def check_call(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end; its output goes to stderr.

    Raises:
      PeerError: the command ended with an error.
    """
    with group(command, STDERR, STDERR, env) as process:
        status = process.wait()
    if status:
        raise PeerError(f"{' '.join(command[:6])} ... ended with status {status}")


HERE, OTHER = "here", "against"


def checkouts(other: Path | None) -> dict[str, Path]:
    """Return this checkout, and another one if given.

    Raises:
      InvalidConfigError: the other folder is not a checkout.
    """
    if other is None:
        return {HERE: ROOT}
    if not (other / "jaxserve").is_dir():
        raise InvalidConfigError(f"the folder {other} has no jaxserve; give a checkout")
    return {HERE: ROOT, OTHER: other.resolve()}


def result_of(*arguments: str, checkout: Path = ROOT, env: Mapping[str, str] | None = None) -> Any:
    """Run `python ARGUMENTS` in a checkout, and return the object on the last line it prints.

    Args:
      env: all environment variables except PYTHONPATH; by default those of this process.

    Raises:
      PeerError: it ended with an error, or printed no result.
    """
    command = [sys.executable, *arguments]
    env = {**(os.environ if env is None else env), "PYTHONPATH": str(checkout)}
    with group(command, subprocess.PIPE, STDERR, env, checkout) as process:
        printed = process.communicate()[0].decode()
    if process.returncode:
        raise PeerError(f"python {' '.join(arguments[:2])} ended with status {process.returncode}")
    return _last_object(printed)


def _last_object(printed: str) -> Any:
    try:
        return json.loads(printed.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise PeerError("printed no result") from error


def run(command: Sequence[str], log: Path, limit_s: float) -> dict[str, Any]:
    """Run a command to its end.

    Its stderr goes to `log`; the last lines of the log are printed if the command fails.

    Returns:
      The object on the last line that it printed, with `peak_bytes`: the peak of the resident bytes
        of all its processes together.

    Raises:
      PeerError: the command ended with an error, did not end within `limit_s` seconds, or printed
        no result.
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
    return {**_last_object(output.read_text(encoding="utf-8")), "peak_bytes": peak_bytes}


def _wait(process: subprocess.Popen, limit_s: float) -> int:
    """Wait `limit_s` seconds at most for the leader of a group; return the group's peak bytes.

    The peak is sampled, because the system's own record of a process includes the size of its
    parent before `exec`.
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
    """Return the resident bytes of all processes of the group together; 0 without /proc."""
    pages = 0
    proc = Path("/proc")
    # Not by `glob`, which fails if a process ends while its entry is read.
    for name in filter(str.isdigit, os.listdir(proc) if proc.exists() else ()):
        with contextlib.suppress(OSError):
            # After the name in brackets: state, parent, group, and resident pages as the 22nd.
            fields = (proc / name / "stat").read_text().rpartition(")")[2].split()
            pages += int(fields[21]) if int(fields[2]) == group else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def group(
    command: Sequence[str],
    stdout: IO | int,
    stderr: IO | int,
    env: Mapping[str, str] | None = None,
    folder: Path = ROOT,
) -> Iterator[subprocess.Popen]:
    """Run the command as the leader of a process group, and end the whole group on exit.

    Inside the block, SIGTERM to this process raises KeyboardInterrupt.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=env,
        process_group=0,
    )
    try:
        yield process
    finally:
        try:
            _end_group(process, signal.SIGTERM)
        finally:
            _end_group(process, signal.SIGKILL)
            signal.signal(signal.SIGTERM, before)


def _end_group(process: subprocess.Popen, kind: signal.Signals) -> None:
    """Signal the group, and wait `GRACE_S` seconds at most until it is gone."""
    deadline_s = time.monotonic() + GRACE_S
    there = _signal_group(process.pid, kind)
    while there and time.monotonic() < deadline_s:
        process.poll()
        there = _signal_group(process.pid, 0)
        time.sleep(POLL_S)


def _signal_group(group: int, kind: int) -> bool:
    """Send a signal; return whether the group had a process to receive it."""
    try:
        os.killpg(group, kind)
    except ProcessLookupError:
        return False
    return True
