"""Sizes of page pools: device memory minus weights minus the largest step's temporaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, final

from jaxserve.core.errors import DeviceMemoryError, InvalidConfigError
from jaxserve.core.host import available_host_bytes
from jaxserve.core.sizes import parse_bytes
from jaxserve.memory.page_pool import MIN_PAGES

# Fractions of the free memory that a pool may take. Other processes use the memory of a CPU too, so
# that enough is left for any step: it need not be measured before the pool has its size.
_SHARE = {"cpu": 0.125}
_DEFAULT_SHARE = 0.92
_HOST_SHARE = 0.25
_SNAPSHOT_SHARE = 1 / 16
# Leading bits that `_repeatable` keeps of a number of pages that depends on free memory.
_BITS = {"cpu": 4}
_DEFAULT_BITS = 7


@final
class StepBytes:
    """The size of the largest step's temporaries; `measure` may compile that step."""

    def __init__(self, measure: Callable[[], int], known: int | None = None):
        self.known = known
        self._measure = measure

    @classmethod
    def of(cls, known: int) -> Self:
        return cls(lambda: known, known)

    def measure(self) -> int:
        """Return the size; the first call may take as long as a compilation."""
        if self.known is None:
            self.known = self._measure()
        return self.known


@final
@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """The size of a page pool, and the numbers from which it was computed.

    Attributes:
      num_pages: number of pages, including the null page.
      page_bytes: size of one page in all layers: keys, values and their scales.
      free_bytes: free memory of the device without the pool, the states and the temporaries.
      state_bytes: size of the states in slots and in snapshots; 0 for a model without recurrent
        layers.
    """

    num_pages: int
    page_bytes: int
    free_bytes: int
    step: StepBytes
    state_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def leaves_room(device: Any) -> bool:
    """Return whether a default pool leaves far more memory of a `jax.Device` than a step needs."""
    return device.platform in _SHARE


def free_device_bytes(device: Any) -> int:
    """Return a `jax.Device`'s free memory: its allocator's, or the host's for a CPU.

    Raises DeviceMemoryError if the allocator keeps no statistics.
    """
    if device.platform == "cpu":
        return available_host_bytes()
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise DeviceMemoryError(
            f"the free memory of {device} is unknown, because its allocator keeps no statistics, "
            "as with XLA_PYTHON_CLIENT_ALLOCATOR=platform; unset that variable, and set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false if memory is to be taken only as it is needed"
        )
    return stats["bytes_limit"] - stats["bytes_in_use"]


def plan_pool(
    device: Any,  # a jax.Device
    *,
    page_bytes: int,
    step_bytes: int,
    wanted_pages: int,
    min_pages: int,
    kv_bytes: int | None,
    state_bytes: int = 0,
    slot_bytes: int = 0,
) -> PoolSize:
    """Return the size of the page pool.

    Args:
      page_bytes: size of one page in all layers, on one device; 0 for a model without attention.
      step_bytes: size of the largest step's temporaries.
      wanted_pages: number of pages that all slots together can use.
      kv_bytes: size that the user asks for; None for a fraction of the free memory.
      state_bytes, slot_bytes: sizes of states in slots, and of the slots' tokens with the index for
        lookups of proposals; neither is allocated yet.

    Raises:
      DeviceMemoryError: `kv_bytes` or `state_bytes` are not free, or fewer than `min_pages` fit.
    """
    free = free_device_bytes(device)
    left = free - step_bytes - state_bytes - slot_bytes
    needed = f"the largest step needs {step_bytes:,}"
    if slot_bytes:
        needed += f", the tokens of all slots {slot_bytes:,}"
    if state_bytes:
        needed += f" and the states in slots need {state_bytes:,}"
        if left < min_pages * page_bytes:
            raise DeviceMemoryError(
                f"states in slots do not fit on {device}: {free:,} bytes are free, {needed}, and "
                f"the smallest page pool {min_pages * page_bytes:,}; lower max_slots or "
                "max_step_tokens"
            )
    if page_bytes == 0:
        num_pages = wanted_pages
    elif kv_bytes is None:
        budget = int(left * _SHARE.get(device.platform, _DEFAULT_SHARE))
        fitting = budget // page_bytes
        num_pages = min(wanted_pages, max(_repeatable(fitting, device.platform), min_pages))
        num_pages = min(num_pages, fitting)
    else:
        if kv_bytes > left:
            raise DeviceMemoryError(
                f"kv_memory={kv_bytes:,} bytes do not fit on {device}: {free:,} are free and "
                f"{needed}; pass at most {max(0, left):,}, or lower max_step_tokens"
                + (" or max_slots" if state_bytes else "")
            )
        num_pages = min(wanted_pages, kv_bytes // page_bytes)
    if num_pages < min_pages:
        raise DeviceMemoryError(
            f"{num_pages} pages of {page_bytes:,} bytes fit, at least {min_pages} are needed: "
            f"{free:,} bytes are free on {device}, {needed}"
            + ("" if kv_bytes is None else f", and kv_memory={kv_bytes:,}")
            + "; pass more kv_memory, a smaller page_size or kv_dtype, or a smaller model "
            "or dtype"
        )
    return PoolSize(
        num_pages=num_pages,
        page_bytes=page_bytes,
        free_bytes=free,
        step=StepBytes.of(step_bytes),
        state_bytes=state_bytes,
    )


def _repeatable(num_pages: int, platform: str) -> int:
    """Round down to a number that most starts share, although free memory varies.

    The compilation cache has executables only for numbers of pages that were used before.
    """
    step = 1 << max(0, num_pages.bit_length() - _BITS.get(platform, _DEFAULT_BITS))
    return num_pages - num_pages % step


def plan_host_pages(page_bytes: int, num_device_pages: int, wanted: int | str | None) -> int:
    """Return the number of host pages, which hold pages that leave the device.

    A page of `page_bytes` has all layers, on all devices that share the host's memory. By default
    there are as many as in the pool, up to a fraction of the free memory. Raises DeviceMemoryError
    if the `wanted` bytes are not free.
    """
    free = available_host_bytes()
    if wanted is None:
        return min(num_device_pages, int(free * _HOST_SHARE) // page_bytes)
    wanted_bytes = parse_bytes(wanted) if wanted else 0
    _raise_unless_free(wanted_bytes, free)
    return wanted_bytes // page_bytes


def plan_host_states(
    *,
    page_bytes: int,
    state_bytes: int,
    num_device_pages: int,
    num_snapshots: int,
    wanted: int | str | None,
) -> tuple[int, int]:
    """Return the numbers of host pages and of host states of a model with recurrent layers.

    Each of the two has half of the memory, so that at least half as many conversations fit as with
    the best shares, however long they are; a model whose pages have no bytes (`page_bytes` is 0)
    has as many pages as on the device, and states in all of the memory. By default they take as
    much as the pages and the snapshots on the device, up to a fraction of the free memory. A state
    of `state_bytes` has its page with it. Without snapshots on the device there is neither.

    Raises:
      DeviceMemoryError: the `wanted` bytes are not free.
      InvalidConfigError: they do not hold one state.
    """
    if not num_snapshots or wanted == 0:
        return 0, 0
    free = available_host_bytes()
    num_bytes = num_device_pages * page_bytes + num_snapshots * state_bytes
    num_bytes = min(num_bytes, int(free * _HOST_SHARE))
    if wanted is not None:
        num_bytes = parse_bytes(wanted)
        _raise_unless_free(num_bytes, free)
    num_states = (num_bytes // 2 if page_bytes else num_bytes) // state_bytes
    if not num_states and wanted is not None:
        least = 2 * state_bytes if page_bytes else state_bytes
        raise InvalidConfigError(
            f"host_memory={num_bytes:,} bytes hold no state of this model, which takes "
            f"{state_bytes:,} with a page; give at least {least:,}, or 0 to keep none on the host"
        )
    if not page_bytes:
        return (num_device_pages if num_states else 0), num_states
    return (num_bytes - num_bytes // 2) // page_bytes if num_states else 0, num_states


def _raise_unless_free(wanted_bytes: int, free: int) -> None:
    if wanted_bytes > free:
        raise DeviceMemoryError(
            f"host_memory={wanted_bytes:,} bytes do not fit on the host, where {free:,} are free; "
            "give less"
        )


def plan_snapshots(
    device: Any,  # a jax.Device
    snapshot_bytes: int,
    max_slots: int,
    wanted: int | str | None,
) -> int:
    """Return the number of snapshots of states, of `snapshot_bytes` each with its page.

    By default there are two for each slot, up to a fraction of the free memory.

    Raises:
      DeviceMemoryError: the `wanted` bytes are not free.
      InvalidConfigError: they do not hold one snapshot.
    """
    free = free_device_bytes(device)
    if wanted is None:
        fitting = _repeatable(int(free * _SNAPSHOT_SHARE) // snapshot_bytes, device.platform)
        return min(2 * max_slots, fitting)
    wanted_bytes = parse_bytes(wanted) if wanted else 0
    if wanted_bytes > free:
        raise DeviceMemoryError(
            f"state_memory={wanted_bytes:,} bytes do not fit on {device}, where {free:,} are free; "
            "give less"
        )
    if 0 < wanted_bytes < snapshot_bytes:
        raise InvalidConfigError(
            f"state_memory={wanted_bytes:,} bytes hold no state of this model, which takes "
            f"{snapshot_bytes:,} with a page; give at least as many, or 0 to keep none"
        )
    return wanted_bytes // snapshot_bytes


def plan_resize(
    device: Any,  # a jax.Device
    size: PoolSize,
    kv_bytes: int,
    *,
    wanted_pages: int,
    min_pages: int = MIN_PAGES,
    num_buffers: int,
) -> PoolSize:
    """Return the size of the pool after a resize to `kv_bytes`.

    It is rounded down to whole pages; 0 gives the smallest pool, of `min_pages`. All slots together
    can use `wanted_pages`. Buffers are copied one by one; the pool has the size of `num_buffers` of
    the largest.

    Raises:
      DeviceMemoryError: the new pool and one buffer of the copy do not fit, or `kv_bytes` hold
        fewer than `min_pages` pages.
    """
    kv_bytes = kv_bytes or min_pages * size.page_bytes
    num_pages = min(wanted_pages, kv_bytes // size.page_bytes)
    if num_pages < min_pages:
        raise DeviceMemoryError(
            f"{kv_bytes:,} bytes hold {num_pages} pages of {size.page_bytes:,}, at least "
            f"{min_pages} are needed; pass {min_pages * size.page_bytes:,} or more, or 0 for the "
            "smallest pool"
        )
    if num_pages == size.num_pages and kv_bytes <= size.pool_bytes:
        return size
    free = free_device_bytes(device)
    step_bytes = size.step.measure()
    if kv_bytes > size.pool_bytes:
        most = free + size.pool_bytes - max(step_bytes, size.pool_bytes // num_buffers)
    else:
        most = free * num_buffers
    if kv_bytes > most:
        raise DeviceMemoryError(
            f"a page pool of {kv_bytes:,} bytes instead of {size.pool_bytes:,} does not fit on "
            f"{device}: {free:,} are free beside the present pool, a step needs "
            f"{step_bytes:,}, and parts of up to 1/{num_buffers} are copied one by one; pass "
            f"at most {max(0, most):,}"
        )
    free_bytes = free + size.pool_bytes + size.state_bytes
    return replace(size, num_pages=num_pages, free_bytes=free_bytes)
