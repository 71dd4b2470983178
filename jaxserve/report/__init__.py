"""Reports of a runtime: figures, tables, traces and pictures of its steps and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxserve.report.report import Report

if TYPE_CHECKING:
    from jaxserve.report.frontier import draw_frontier
    from jaxserve.report.picture import draw_residency

__all__ = ["Report", "draw_frontier", "draw_residency"]


def __getattr__(name: str) -> Any:
    """Import names that need Matplotlib on first use, because its import is slow."""
    if name == "draw_residency":
        from jaxserve.report.picture import draw_residency

        return draw_residency
    if name == "draw_frontier":
        from jaxserve.report.frontier import draw_frontier

        return draw_frontier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
