"""What moving and recomputing KV costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.memory.eviction import RecomputeCost

# Without measurements: attending to this many positions is as much work as the rest of a token.
_POSITIONS_A_TOKEN = 4096


@final
@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """Times measured on the device.

    Attributes:
      page_s: seconds to copy a page to the host, and again to copy it back.
      token_s: seconds to compute the KV of a prompt's token.
      position_s: seconds on top of that for each position that the token attends to.
    """

    page_s: float
    token_s: float
    position_s: float = 0.0


def page_cost(config: EngineConfig, costs: SwapCosts | None) -> RecomputeCost:
    """Return what computing a page costs after a context, by the arithmetic of the model.

    Args:
      costs: None where nothing was measured: then the unit is the work of one token.
    """
    token_s = 1.0 if costs is None else costs.token_s
    position_s = token_s / _POSITIONS_A_TOKEN if costs is None else costs.position_s
    return RecomputeCost.analytic(
        attention=config.page_size * position_s,
        other=config.page_size * token_s,
        longest=config.max_context,
    )


def preempt_all_s(config: EngineConfig, costs: SwapCosts | None) -> float | None:
    """Return the seconds to preempt a full pool and to bring it back; None without costs."""
    if costs is None:
        return None
    token_s = costs.token_s
    if config.num_host_pages:
        token_s = min(token_s, 2 * costs.page_s / config.page_size)
    return (config.num_pages - 1) * config.page_size * token_s


def copy_s(costs: SwapCosts | None) -> float:
    """Return the seconds of a page's copy; 0 where they were not measured."""
    return 0.0 if costs is None else costs.page_s
