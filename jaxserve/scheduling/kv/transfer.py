"""KV of prompts that goes from one engine's cache to another's, by way of host memory."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import final

from jaxserve.core.errors import InvalidConfigError
from jaxserve.memory.cached_page import Branch
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.memory.page_cache import PageCache


@final
class PageTransfer:
    """Reads cached pages for another engine, and caches the pages of another one.

    Pages are found by their tokens, so the engines need not know each other. What is missing is
    computed as if there were no transfer. The engines must have the same weights and page layout.

    Args:
      host_memory: the contents of host pages; None without host pages, and then nothing is sent or
        taken.
      keys_of: returns the keys of the full pages of a context.
      now: the clock.
    """

    def __init__(
        self,
        cache: PageCache,
        host_memory: HostMemory | None,
        keys_of: Callable[[Seq[int]], Seq[bytes]],
        now: Callable[[], float],
    ):
        self._cache = cache
        self._host_memory = host_memory
        self._keys_of = keys_of
        self._now = now

    def copy_to_host(self, tokens: Seq[int]) -> None:
        """Have the next plan copy the leading full pages of a context, as far as they are cached.

        It ends at the first page that is not cached, or for which the host has no room.
        """
        for key in self._keys_of(tokens) if self._host_memory is not None else ():
            if not self._cache.copy_to_host(key):
                return

    def read(self, tokens: Seq[int]) -> list[bytes]:
        """Return the contents of the leading full pages of a context that the host has.

        The plan after `copy_to_host` has been submitted.
        """
        contents: list[bytes] = []
        for page in self._cache.find(self._keys_of(tokens)):
            if page.index != len(contents) or page.host_page is None or self._host_memory is None:
                break
            contents.append(self._host_memory.read_host_page(page.host_page))
        return contents

    def load(self, tokens: Seq[int], contents: Seq[bytes]) -> int:
        """Cache the leading full pages of a context on the host; return how many it has room for.

        Args:
          contents: of each page, as `read` returned them.

        Raises:
          InvalidConfigError: they are of pages of another size.
        """
        if self._host_memory is None or not contents:
            return 0
        given, wanted = len(contents[0]), len(self._host_memory.read_host_page(0))
        if given != wanted:
            raise InvalidConfigError(
                f"KV pages of {given} bytes are not allowed; those of this runtime have {wanted}. "
                "Send KV only between runtimes of the same model and options"
            )
        branch = Branch(self._now())
        # No more than fit, so that the last ones do not evict the first ones.
        fitting = contents[: self._cache.max_host_pages]
        pages = zip(self._keys_of(tokens), fitting, strict=False)
        for index, (key, content) in enumerate(pages):
            if not self._cache.load(index, key, content, branch):
                return index
        return len(fitting)
