"""The memory that the plan of the page pool may use."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from jaxserve.core.errors import DeviceMemoryError, InvalidConfigError
from jaxserve.execution.memory_plan import (
    free_device_bytes,
    plan_host_states,
    plan_pool,
    plan_resize,
    plan_snapshots,
)

pytestmark = pytest.mark.fast

GIB = 2**30


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


def test_snapshots_take_a_part_of_the_free_memory():
    """By default two for each slot, if a sixteenth holds them; else as many as are asked for."""
    assert plan_snapshots(_Gpu(GIB), 1000, 8, None) == 16
    assert 60 <= plan_snapshots(_Gpu(GIB), 1_000_000, 64, None) <= 67
    assert plan_snapshots(_Gpu(GIB), 1000, 8, 0) == 0
    assert plan_snapshots(_Gpu(GIB), 1000, 8, "45kB") == 45
    with pytest.raises(DeviceMemoryError, match="state_memory=2,147,483,648.*give less"):
        plan_snapshots(_Gpu(GIB), 1000, 8, "2GiB")
    with pytest.raises(InvalidConfigError, match="state_memory=999 bytes hold no state.*1,000.*0"):
        plan_snapshots(_Gpu(GIB), 1000, 8, 999)


def _on_host(wanted: int | str | None, *, page_bytes: int = 100, num_snapshots: int = 8):
    return plan_host_states(
        page_bytes=page_bytes,
        state_bytes=1000,
        num_device_pages=20,
        num_snapshots=num_snapshots,
        wanted=wanted,
    )


def test_states_on_the_host_have_half_of_its_memory():
    """By default as much as the device has; all of it if pages have no bytes."""
    assert _on_host(None) == (50, 5)
    assert _on_host("20kB") == (100, 10)
    assert _on_host("20kB", page_bytes=0) == (20, 20)
    assert _on_host(None, page_bytes=0) == (20, 8)
    assert _on_host(0) == _on_host(None, num_snapshots=0) == (0, 0)
    with pytest.raises(InvalidConfigError, match="host_memory=1,999 .*no state.*2,000, or 0"):
        _on_host(1999)
    with pytest.raises(DeviceMemoryError, match="host_memory=.*give less"):
        _on_host(1 << 60)


@pytest.mark.parametrize("stats", [None, {"bytes_in_use": 0}])
def test_free_memory_without_statistics_is_not_that_of_the_host(stats):
    """An allocator such as `platform` has none, and the host's memory says nothing about it."""
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    with pytest.raises(DeviceMemoryError, match="unset that variable"):
        free_device_bytes(gpu)


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
    assert (size.pool_bytes, size.step.measure(), size.state_bytes) == (200_000, 100_000, 600_000)
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


def test_tokens_of_slots_have_their_room():
    """They are allocated after the pool, with the index of proposals, and may take a gigabyte."""

    def planned(kv_bytes: int | None):
        return plan_pool(
            _Gpu(1_000_000),
            page_bytes=1000,
            step_bytes=100_000,
            slot_bytes=200_000,
            wanted_pages=10**6,
            min_pages=2,
            kv_bytes=kv_bytes,
        )

    assert 0.98 * 0.92 * 700 <= planned(None).num_pages <= 0.92 * 700
    assert planned(700_000).num_pages == 700
    with pytest.raises(
        DeviceMemoryError, match="the tokens of all slots 200,000; pass at most 700"
    ):
        planned(700_001)
