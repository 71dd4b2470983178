"""Sends the KV of prompts from one engine's cache to another's through host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.cached_page import Branch
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.grouped_table import TableSizes
from jaxserve.memory.page_cache import PageCache
from jaxserve.scheduling.kv.prefix_cache import key_in
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
        sizes: TableSizes | None,
        now: Callable[[], float],
    ):
        self._cache = cache
        self._host_memory = host_memory
        self._keys_of = keys_of
        self._sizes = sizes
        self._tables = (0,) if sizes is None else sizes.widest_first
        self._now = now
        self._weights = weights

    def keys_seen(self, tokens: Seq[int], first: int = 0) -> Iterator[list[bytes]]:
        """Yield the keys of the pages that a next request needs, for each full page of a context.

        With page groups, a full page of a context is a page in each of the first of `_tables`: of
        those without a window, and of those in whose window it is at the end of the context.
        """
        keys, sizes = self._keys_of(tokens), self._sizes
        for index in range(first, len(keys)):
            tables = self._tables
            if sizes is not None:
                tables = sizes.tables_seen(index, (len(tokens) - 1) // sizes.page_size)
            yield [key_in(keys[index], table) for table in tables]

    def copy_to_host(self, tokens: Seq[int], first: int = 0) -> None:
        """Copy cached full pages of a context to the host with the next plan, from page `first` on.

        It ends at the first page that is not cached, or for which the host has no room.
        """
        for keys in self.keys_seen(tokens, first) if self._host_memory is not None else ():
            if not all(map(self._cache.copy_to_host, keys)):
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
        if (host_memory := self._host_memory) is None:
            return KVPages(self._weights.of_every_run(), contents)
        for keys in self.keys_seen(tokens, first):
            pages = [
                page.host_page
                for page in self._cache.find(keys)
                if page.host_page is not None
                and page.host_page not in on_the_way
                and not self._cache.is_outgoing(page)
            ]
            if len(pages) < len(keys):
                break
            contents.append(b"".join(map(host_memory.read, pages)))
        return KVPages(self._weights.of_every_run(), contents)

    def load(self, tokens: Seq[int], kv: KVPages) -> int:
        """Cache the leading full pages of a context on the host; return how many it had room for.

        Raises:
          InvalidConfigError: `kv` is of other weights, or of pages of another size.
        """
        if self._host_memory is None or not kv.pages:
            return 0
        page_bytes, num_tables = self._host_memory.entry_bytes, len(self._tables)
        fewest = 1 if self._sizes is None else len(self._sizes.whole)
        wanted = [num * page_bytes for num in range(fewest, num_tables + 1)]
        others = sorted({len(content) for content in kv.pages}.difference(wanted))
        if others:
            raise InvalidConfigError(
                f"KV pages of {others[0]} bytes are not allowed; those of this runtime have "
                f"{' or '.join(map(str, wanted))}. Send KV only between runtimes of the same model "
                "and options"
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
        room = self._cache.max_host_pages
        pages = zip(self._keys_of(tokens), kv.pages, strict=False)
        for index, (key, content) in enumerate(pages):
            tables = self._tables[: len(content) // page_bytes]
            room -= len(tables)
            if room < 0:  # no more than fit, so that the last ones do not evict the first ones
                return index
            for table in sorted(tables):
                start = tables.index(table) * page_bytes
                part = content[start : start + page_bytes]
                number = index * num_tables + table
                if not self._cache.load(number, key_in(key, table), part, branch):
                    return index
        return len(kv.pages)
