"""The machine that this process runs on: its processor and its free memory."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the free memory of the host, or of this process's control group if that is less.

    `root` is the root of the file system that has `proc` and `sys`.
    """
    return max(0, min([_system_bytes(root), *_control_group_bytes(root)]))


def release_freed_memory() -> None:
    """Return memory that was freed to the operating system; glibc keeps much of it otherwise."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _system_bytes(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        _log.debug("there is no /proc/meminfo; reading sysconf")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _control_group_bytes(root: Path) -> Iterator[int]:
    """Yield the free memory of each limited control group of this process, of versions 2 and 1.

    In a container the mount may show the process's own group as its root, while
    `/proc/self/cgroup` gives the host's path. Groups without a folder are therefore skipped.
    """
    groups = {"": "/", "memory": "/"}  # controllers -> path
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            key = "memory" if "memory" in controllers.split(",") else controllers
            groups[key] = os.path.normpath(path)
    except OSError:
        _log.debug("there is no /proc/self/cgroup; reading the root groups")
    mount = root / "sys/fs/cgroup"
    yield from _left_above(mount, groups[""], "memory.max", "memory.current", "inactive_file")
    yield from _left_above(
        mount / "memory",
        groups["memory"],
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    )


def _left_above(
    mount: Path, path: str, limit_name: str, used_name: str, cache_name: str
) -> Iterator[int]:
    own = mount / path.lstrip("/")
    for folder in (own, *own.parents):
        try:
            limit = (folder / limit_name).read_text().strip()
            if limit != "max":
                used = int((folder / used_name).read_text())
                counts = dict(map(str.split, (folder / "memory.stat").read_text().splitlines()))
                # The kernel drops the inactive page cache before it kills a process.
                yield int(limit) - used + int(counts.get(cache_name, 0))
        except OSError:
            pass
        if folder == mount:
            return
