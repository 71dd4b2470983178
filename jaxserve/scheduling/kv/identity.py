"""Names for the weights that pages were computed with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from jaxserve.memory.disk_tier import HostMemory


@final
@dataclass(frozen=True)
class WeightsName:
    """The name of an engine's weights.

    Attributes:
      version: distinguishes them from others in this run. The first weights have none, so that
        another run finds their pages on the disk.
      fingerprint: distinguishes them from those of other runs; None until it is needed.
    """

    version: bytes = b""
    fingerprint: bytes | None = None


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
        self._name = WeightsName()

    def name_of(self, version: int) -> WeightsName:
        """Return the name of the weights that the executor has now, as those of a version.

        With a disk it reads their fingerprint, which may fail. Nothing changes.
        """
        fingerprint = self._read() if self._has_disk else None
        return WeightsName(version.to_bytes(8, "big"), fingerprint)

    def change(self, name: WeightsName) -> None:
        """Take note of other weights, by their `name_of`."""
        self._name = name

    def of_cache(self) -> bytes:
        """Return the identity of pages in the cache: the version alone, unless there is a disk."""
        return self.of_every_run() if self._has_disk else self._name.version

    def of_every_run(self) -> bytes:
        """Return what equal weights of the same version have in every run.

        The fingerprint is read once for each version, since that looks at all weights.
        """
        if self._name.fingerprint is None:
            self._name = replace(self._name, fingerprint=self._read())
        return (self._name.fingerprint or b"") + self._name.version

    def _read(self) -> bytes:
        return b"" if self._host_memory is None else self._host_memory.fingerprint()
