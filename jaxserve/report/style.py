"""The style of all pictures: ink and colours that are told apart on light and dark pages."""

from __future__ import annotations

from typing import Any

INK = "#767676"  # a contrast of 4 to 5 on white and on near black
# Okabe and Ito's palette, tell-apart for colour-blind readers; the pale ones darkened for white.
BLUE, SKY, GREEN = "#0072B2", "#3D8FC0", "#009E73"
ORANGE, PINK, OCHRE = "#D55E00", "#C0619A", "#A67C00"
# Settings of Matplotlib.
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}
