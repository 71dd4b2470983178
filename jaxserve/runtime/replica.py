"""One engine of a runtime, with what belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from jaxserve.core.options import RuntimeOptions
from jaxserve.engine.engine import Engine
from jaxserve.engine.loop import EngineLoop
from jaxserve.execution.compilation import warm_up
from jaxserve.execution.memory_plan import PoolSize
from jaxserve.execution.protocol import ModelExecutor

# Pages of a pool without any that a sequence could use: the null page, and one more.
_NO_PAGES = 2


@final
@dataclass
class Replica:
    """A replica: one engine with its own devices, page pool, slots, scheduler and thread."""

    executor: ModelExecutor
    pool_size: PoolSize
    engine: Engine
    loop: EngineLoop

    def warm_up(self, options: RuntimeOptions, *, waits: bool = False) -> None:
        """Compile for the present pool size, unless that was done; `waits` for all of it."""
        if options.warmup and not self.executor.is_warm:
            behind = options.warms_up_behind and not waits
            warm_up(self.executor, progress=options.progress, behind=behind)

    def free_pool(self) -> None:
        """Free the page pool until `take_pool`; no step follows before. The loop is paused.

        Every sequence is computed anew when it goes on. The scheduler knows the pool as it was.
        """
        self.engine.drop_kv()
        self.executor.resize(_NO_PAGES, ())

    def take_pool(self) -> None:
        """Allocate the page pool as it was before `free_pool`. The loop is paused.

        Raises:
          DeviceMemoryError: the pool does not fit; nothing has changed.
        """
        self.executor.resize(self.engine.scheduler.config.num_pages, ())

    def resize(self, size: PoolSize) -> None:
        """Resize the page pool. The loop must be paused.

        Raises:
          DeviceMemoryError: the new pool does not fit; nothing has changed.
        """
        self.engine.resize(size.num_pages)
        self.pool_size = size

    def recompute(self, size: PoolSize, exchange: Callable[[], None]) -> int:
        """Go on with other caches, in which KV is computed anew. The loop is paused.

        Args:
          size: of the pool after `exchange`, which holds as long an answer as before.
          exchange: replaces the executor's caches. If it raises, they are as large as before.

        Returns:
          Tokens that were computed, and will be again.
        """
        num_tokens = self.engine.drop_kv()
        exchange()
        self.engine.pool_exchanged(size.num_pages)
        self.pool_size = size
        return num_tokens
