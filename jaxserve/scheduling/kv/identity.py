"""Names for the weights that pages were computed with."""

from __future__ import annotations

from typing import final

from jaxserve.memory.disk_tier import HostMemory


@final
class WeightsIdentity:
    """The identity of an engine's weights, which the keys of cached pages begin with.

    Args:
      host_memory: has the fingerprint of the weights; None without host pages.
      has_disk: whether cached pages may come from another run.
    """

    def __init__(self, host_memory: HostMemory | None, *, has_disk: bool):
        self._host_memory = host_memory
        self._has_disk = has_disk
        # The first weights have none, so that another run finds their pages on the disk.
        self._version = b""
        self._of_every_run: bytes | None = None

    def change(self, version: int) -> None:
        """Take note of other weights."""
        self._version = version.to_bytes(8, "big")
        self._of_every_run = None

    def of_cache(self) -> bytes:
        """Return the identity of pages in the cache: the version alone, unless there is a disk."""
        return self.of_every_run() if self._has_disk else self._version

    def of_every_run(self) -> bytes:
        """Return what equal weights of the same version have in every run.

        The fingerprint is read once for each version, since that looks at all weights.
        """
        if self._of_every_run is None:
            fingerprint = b"" if self._host_memory is None else self._host_memory.fingerprint()
            self._of_every_run = fingerprint + self._version
        return self._of_every_run
