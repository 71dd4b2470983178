"""The contents of host pages of a model in stages, each of which has a part of every page."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import final

from jaxserve.execution.device_stage import DeviceStage


@final
class StagedHostMemory:
    """A `HostMemory` whose contents are those of the first stage, then of the next, and so on.

    Args:
      stages: in order; the list of the executor, which empties it when it is closed.
    """

    def __init__(self, stages: Sequence[DeviceStage]):
        self._stages = stages

    def has_arrived(self, host_page: int) -> bool:
        """See `HostMemory`; the page has arrived when it has on all stages."""
        return all(stage.pages.has_arrived(host_page) for stage in self._stages)

    def read_host_page(self, host_page: int) -> bytes:
        """See `HostMemory`."""
        return b"".join(stage.pages.read_host_page(host_page) for stage in self._stages)

    def write_host_page(self, host_page: int, contents: bytes) -> None:
        """See `HostMemory`."""
        start = 0
        for stage in self._stages:
            num_bytes = stage.pages.host_page_bytes
            stage.pages.write_host_page(host_page, contents[start : start + num_bytes])
            start += num_bytes

    def fingerprint(self) -> bytes:
        """See `HostMemory`. Another stage plan has another one, as contents depend on it."""
        digest = blake2b(digest_size=16)
        for stage in self._stages:
            digest.update(stage.fingerprint())
        return digest.digest()
