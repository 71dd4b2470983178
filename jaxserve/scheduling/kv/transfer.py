"""Sends the KV of prompts from one engine's cache to another's through host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.cached_page import Branch
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_cache import PageCache
from jaxserve.scheduling.plan import PageCopies


@final
@dataclass(frozen=True)
class WeightsName:
    """The name of an engine's weights.

    The `version` distinguishes weights within this run; it is empty for the first ones, so that
    another run finds their pages on the disk. The `fingerprint` distinguishes runs, once needed.
    """

    version: bytes = b""
    fingerprint: bytes | None = None


@final
class WeightsIdentity:
    """The identity of an engine's weights, with which the keys of cached pages begin."""

    def __init__(self, host_memory: HostMemory | None, *, has_disk: bool):
        self._host_memory = host_memory
        self._has_disk = has_disk
        self._name = WeightsName()

    def name_of(self, version: int) -> WeightsName:
        """Return the name of the executor's weights as those of a version, and change nothing.

        With a disk it reads their fingerprint, which may fail.
        """
        fingerprint = self._read() if self._has_disk else None
        return WeightsName(version.to_bytes(8, "big"), fingerprint)

    def change(self, name: WeightsName) -> None:
        self._name = name

    def of_cache(self) -> bytes:
        """Return the identity of pages in the cache: the version alone, unless there is a disk."""
        return self.of_every_run() if self._has_disk else self._name.version

    def of_every_run(self) -> bytes:
        """Return the identity that equal weights of the same version have in every run.

        The fingerprint is read once for each version, since that reads all weights.
        """
        if self._name.fingerprint is None:
            self._name = replace(self._name, fingerprint=self._read())
        return (self._name.fingerprint or b"") + self._name.version

    def _read(self) -> bytes:
        return b"" if self._host_memory is None else self._host_memory.fingerprint()


class KVPages(NamedTuple):
    """KV of consecutive full pages of a context, by default the leading ones.

    `identity` is that of the model, its weights, their version and its pages.
    """

    identity: bytes
    pages: Seq[bytes]


@final
class PageTransfer:
    """Exports cached pages to another engine, and imports pages from one.

    Pages are found by their tokens, so the engines need not know each other. Missing pages are
    computed. The engines must have the same weights and page layout, which the identity of a
    message proves. Without `host_memory` nothing is sent or taken.
    """

    def __init__(
        self,
        cache: PageCache,
        host_memory: HostMemory | None,
        weights: WeightsIdentity,
        keys_of: Callable[[Seq[int]], Seq[bytes]],
        now: Callable[[], float],
    ):
        self._cache = cache
        self._host_memory = host_memory
        self._keys_of = keys_of
        self._now = now
        self._weights = weights

    def copy_to_host(self, tokens: Seq[int], first: int = 0) -> None:
        """Copy cached full pages of a context to the host with the next plan, from page `first` on.

        It ends at the first page that is not cached, or for which the host has no room.
        """
        for key in self._keys_of(tokens)[first:] if self._host_memory is not None else ():
            if not self._cache.copy_to_host(key):
                return

    def copies_failed(self, copies: PageCopies) -> None:
        """Evict from the host what a failed plan was to copy there, (device page, host page)."""
        self._cache.drop_copies(host_page for _, host_page in copies)

    def read(
        self, tokens: Seq[int], first: int = 0, *, on_the_way: Collection[int] = ()
    ) -> KVPages:
        """Return the contents of full pages of a context on the host, from page `first` on.

        It ends at the first page that was not copied, or is `on_the_way` with a plan in flight.
        """
        contents: list[bytes] = []
        for page in self._cache.find(self._keys_of(tokens)[first:]):
            is_next = page.index == first + len(contents)
            if not is_next or page.host_page is None or self._host_memory is None:
                break
            if self._cache.is_outgoing(page) or page.host_page in on_the_way:
                break
            contents.append(self._host_memory.read_host_page(page.host_page))
        return KVPages(self._weights.of_every_run(), contents)

    def load(self, tokens: Seq[int], kv: KVPages) -> int:
        """Cache the leading full pages of a context on the host; return how many it had room for.

        Raises:
          InvalidConfigError: `kv` is of other weights, or of pages of another size.
        """
        if self._host_memory is None or not kv.pages:
            return 0
        wanted = len(self._host_memory.read_host_page(0))
        others = sorted({len(content) for content in kv.pages} - {wanted})
        if others:
            raise InvalidConfigError(
                f"KV pages of {others[0]} bytes are not allowed; those of this runtime have "
                f"{wanted}. Send KV only between runtimes of the same model and options"
            )
        own = self._weights.of_every_run()
        if kv.identity != own:
            raise InvalidConfigError(
                f"KV of the identity {kv.identity.hex()!r} is not allowed; that of this runtime's "
                f"model and weights is {own.hex()!r}. Send KV only between "
                "runtimes with the same weights in the same version, and export it again after an "
                "update of them"
            )
        branch = Branch(self._now())
        # No more than fit, so that the last ones do not evict the first ones.
        fitting = kv.pages[: self._cache.max_host_pages]
        pages = zip(self._keys_of(tokens), fitting, strict=False)
        for index, (key, content) in enumerate(pages):
            if not self._cache.load(index, key, content, branch):
                return index
        return len(fitting)
