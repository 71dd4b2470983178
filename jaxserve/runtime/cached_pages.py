"""The part of a runtime that deals with cached pages."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from jaxserve.memory.page_cache import Tier
from jaxserve.runtime.adapted import Adapted
from jaxserve.runtime.maintenance import Maintenance
from jaxserve.scheduling.kv.transfer import KVPages


class CachedPages(Adapted):
    """The methods of `Runtime` for the KV that it keeps of ended requests."""

    @abc.abstractmethod
    def __init__(self, maintenance: Maintenance):
        super().__init__(maintenance)

    def residency(self, token_ids: Sequence[int]) -> list[Tier]:
        """Return the tier that holds the KV of each full page of a context at present.

        The result is that of the replica that holds most of the context.
        `jaxserve.report.draw_residency` draws it.
        """
        return self._maintenance.residency(token_ids)

    def forget_kept_pages(self) -> None:
        """Drop all cached pages, so that later requests compute their prompts; for measurements.

        Nor are past answers proposed to later requests, in a runtime that speculates.

        Raises:
          RuntimeClosedError, EngineFailedError
        """
        self._maintenance.forget_kept_pages()

    def export_kv(self, token_ids: Sequence[int], first: int = 0, *, waits: bool = True) -> KVPages:
        """Return the KV of the leading full pages of a context that are cached, for `import_kv`.

        Of a prompt that was just answered these are all full pages, if the policy keeps pages and
        host memory has room for them; they pass through it. Where it has none, there are fewer.

        Args:
          first: the page to begin with, in place of the first one. `import_kv` needs all from the
            first one on.
          waits: False to return only pages that are on the host, without waiting. The next steps
            copy those that are missing. So the pages of a prompt can be read while it is computed.

        Raises:
          ProcessGroupError: several processes serve the model.
          RuntimeClosedError, EngineFailedError
        """
        return self._maintenance.export_kv(token_ids, first, waits=waits)

    def import_kv(self, token_ids: Sequence[int], kv: KVPages) -> int:
        """Cache KV that another runtime of the same model and options exported.

        The next request that begins with these tokens finds it, unless it is evicted before.

        Returns:
          The number of pages for which host memory has room.

        Raises:
          InvalidConfigError: the KV is that of a runtime with other weights or sizes.
          ProcessGroupError: several processes serve the model.
          RuntimeClosedError, EngineFailedError
        """
        return self._maintenance.import_kv(token_ids, kv)
