"""What a runtime did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.engine.stats import EngineStats


@final
@dataclass(frozen=True, kw_only=True)
class RuntimeStats:
    """Counters since the start, and what memory is used for; see `EngineStats`."""

    num_steps: int
    num_decode_loops: int
    num_iterations: int
    num_tokens: int
    num_padding_tokens: int
    num_preemptions: int
    num_compilations: int
    busy_s: float
    host_gap_s: float
    num_pages: int
    max_pages_owned: int
    page_size: int
    pool_bytes: int
    weights_bytes: int
    step_bytes: int

    @classmethod
    def of(cls, stats: EngineStats, config: EngineConfig, **sizes: int) -> RuntimeStats:
        """The engine's counters as they stand, and what else there is to know."""
        names = {field.name for field in fields(cls)} & {field.name for field in fields(stats)}
        counters = {name: getattr(stats, name) for name in names}
        return cls(**counters, num_pages=config.num_pages, page_size=config.page_size, **sizes)
