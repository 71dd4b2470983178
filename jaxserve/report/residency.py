"""A picture of the tiers that hold the KV of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxserve.memory.page_cache import Tier
from jaxserve.report.picture import Picture

_COLOURS: dict[Tier, str] = {
    "device": "#0072B2",
    "host": "#56B4E9",
    "disk": "#E69F00",
    "nowhere": "#D0D0D0",
}


def draw_residency(contexts: Mapping[str, Sequence[Tier]]) -> Picture:
    """Draw a row per context and a square per page, the first page on the left.

    Args:
      contexts: name -> the result of `Runtime.residency` for its tokens.
    """
    longest = max((len(tiers) for tiers in contexts.values()), default=0)
    figure = Figure(figsize=(9, 1.2 + 0.28 * len(contexts)), layout="constrained")
    axes = figure.subplots()
    order = list(_COLOURS)
    cells = np.full((max(1, len(contexts)), max(1, longest)), np.nan)
    for row, tiers in enumerate(contexts.values()):
        cells[row, : len(tiers)] = [order.index(tier) for tier in tiers]
    axes.pcolormesh(
        cells, cmap=ListedColormap(list(_COLOURS.values())), vmin=-0.5, vmax=len(order) - 0.5,
        edgecolors="white", linewidth=0.5,
    )  # fmt: skip
    axes.set_yticks(np.arange(len(contexts)) + 0.5, list(contexts))
    axes.invert_yaxis()
    axes.set(xlabel="page of the context", title="residency of the KV")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.legend(
        handles=[Patch(color=colour, label=tier) for tier, colour in _COLOURS.items()],
        frameon=False, loc="upper left", bbox_to_anchor=(1, 1),
    )  # fmt: skip
    return Picture(figure)
