"""The memory that the plan of the page pool may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxserve.core.errors import DeviceMemoryError
from jaxserve.execution.memory_plan import available_host_bytes, plan_pool, plan_resize

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


@dataclass(frozen=True)
class _Gpu:
    free_bytes: int
    platform: str = "cuda"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": 2 * self.free_bytes, "bytes_in_use": self.free_bytes}


def _pages(free_bytes: int, *, wanted: int = 10**9, least: int = 2, kv_bytes: int | None = None):
    size = plan_pool(
        _Gpu(free_bytes),
        page_bytes=1000,
        step_bytes=0,
        wanted_pages=wanted,
        min_pages=least,
        kv_bytes=kv_bytes,
    )
    return size.num_pages


def test_the_pool_has_one_size_though_free_memory_differs_a_little():
    """The compilation cache then has the executables; the rounding costs few pages."""
    assert len({_pages(60 * GIB + extra * 2**20) for extra in range(32)}) == 1
    for free_bytes in range(10_000, 3_000_000, 12_345):
        fitting = int(free_bytes * 0.92) // 1000
        assert 0.98 * fitting <= _pages(free_bytes) <= fitting


def test_sizes_that_are_asked_for_are_exact():
    """The requested, the maximum useful and the minimum number of pages are not rounded."""
    assert _pages(60 * GIB, kv_bytes=12_345_678) == 12_345
    assert _pages(60 * GIB, wanted=1357) == 1357
    assert _pages(1_100_000, least=1009) == 1009


def _plan_with_states(state_bytes: int, *, page_bytes: int = 1000, kv_bytes: int | None = None):
    """Return the plan where 1,000,000 bytes are free and a step needs 100,000."""
    return plan_pool(
        _Gpu(1_000_000),
        page_bytes=page_bytes,
        step_bytes=100_000,
        state_bytes=state_bytes,
        wanted_pages=10**6,
        min_pages=2,
        kv_bytes=kv_bytes,
    )


def test_a_resize_counts_states_once():
    """States are allocated before a resize, so the free memory is already without them."""
    size = _plan_with_states(600_000, kv_bytes=200_000)
    assert (size.pool_bytes, size.step_bytes, size.state_bytes) == (200_000, 100_000, 600_000)
    left = _Gpu(1_000_000 - size.state_bytes - size.pool_bytes)
    resized = plan_resize(left, size, 300_000, wanted_pages=10**6, num_buffers=8)
    assert resized.pool_bytes == 300_000
    assert resized.free_bytes == size.free_bytes
    with pytest.raises(DeviceMemoryError, match="pass at most 300,000"):
        plan_resize(left, size, 301_000, wanted_pages=10**6, num_buffers=8)


@pytest.mark.parametrize("page_bytes", [0, 1000])
@pytest.mark.parametrize("kv_bytes", [None, 10_000])
def test_states_that_do_not_fit_are_named(page_bytes, kv_bytes):
    """No size of pages helps then, so the error asks for fewer slots."""
    with pytest.raises(DeviceMemoryError, match=r"950,000.*lower max_slots") as caught:
        _plan_with_states(950_000, page_bytes=page_bytes, kv_bytes=kv_bytes)
    assert "kv_memory" not in str(caught.value) and "page_size" not in str(caught.value)
