"""The memory of the host that this process may use."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from benchmarks.common.environment import status_bytes
from jaxserve.core.host import available_host_bytes, release_freed_memory

pytestmark = pytest.mark.fast

GIB = 2**30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def root(tmp_path) -> Path:
    """A host with 64 GiB available and no control groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable: {64 * GIB // 1024} kB\n"
    )
    return tmp_path


def _group(root: Path, folder: str, names: tuple[str, str, str], limit, used=GIB, cache=0) -> None:
    group = root / "sys/fs/cgroup" / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")


def _process_groups(root: Path, *lines: str) -> None:
    (root / "proc" / "self" / "cgroup").write_text("\n".join(lines) + "\n")


def test_without_control_groups_the_system_says(root):
    """MemAvailable counts if no group limits the process."""
    assert available_host_bytes(root) == 64 * GIB
    _process_groups(root, "0::/user.slice")
    _group(root, "user.slice", V2, "max")
    assert available_host_bytes(root) == 64 * GIB


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/a/b", "a/b", V2),
        ("0::/a/b", "a", V2),
        ("0::/a/b", "", V2),
        ("0::/../../elsewhere", "", V2),
        ("4:cpu,memory:/docker/c", "memory/docker/c", V1),
        ("4:memory:/docker/c", "memory", V1),
    ],
)
def test_the_limit_of_any_group_above_counts(root, line, folder, names):
    """The available memory is the rest below the limit, plus page cache that can be dropped."""
    _process_groups(root, "9:name=systemd:/", "1:cpuset:/other", line)
    _group(root, folder, names, 2 * GIB, used=GIB, cache=GIB // 4)
    assert available_host_bytes(root) == GIB + GIB // 4


def test_the_smallest_remainder_counts(root):
    """A large limit has no effect; an exhausted limit leaves 0, not a negative number."""
    _group(root, "", V2, 2**60)
    assert available_host_bytes(root) == 64 * GIB
    _group(root, "memory", V1, 3 * GIB, used=4 * GIB)
    assert available_host_bytes(root) == 0


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library is not glibc"
)
def test_freed_memory_is_returned_to_the_system():
    """Small blocks below one that is in use are returned, too."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [libc.malloc(ctypes.c_size_t(1 << 16)) for _ in range(1000)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 16)
    for block in blocks[:-1]:
        libc.free(ctypes.c_void_p(block))
    before = status_bytes("RssAnon")
    release_freed_memory()
    assert before - status_bytes("RssAnon") > 50e6
    libc.free(ctypes.c_void_p(blocks[-1]))
