"""The errors with which a cell engine ends requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.cells.answers import Part
from jaxserve.cells.layout import Layout
from jaxserve.core.errors import (
    DeviceMemoryError,
    InvalidGraphError,
    NumericalError,
    TooManyNodesError,
    UnfoldError,
)


def too_many_values(
    layout: Layout, num_slots: Sequence[int], allowed: Sequence[int]
) -> TooManyNodesError | None:
    """Return the error for a graph that needs more slots than a device has; None for others.

    Args:
      num_slots, allowed: of each pool.
    """
    for spec, needed, most in zip(layout.pools, num_slots, allowed, strict=True):
        if needed > most:
            return TooManyNodesError(
                f"the graph may have {needed} live values {spec}, and a device has {most} slots "
                "for them; pass a shorter input, or create the runtime with more slot_memory"
            )
    return None


def no_free_slots(part: Part) -> DeviceMemoryError:
    """Return the error for a part that would wait for ever."""
    return DeviceMemoryError(
        f"request {part.answer.id}: its next graph needs more slots than are free, and all others "
        "are kept by requests whose `then` returned further graphs; pass more slot_memory, or "
        "submit fewer at a time"
    )


def not_finite(part: Part, node: int, layout: Layout) -> NumericalError:
    """Return the error for a node whose outputs are not finite."""
    number = node - part.first_row
    cell = layout.types[part.graph.graph.types[number]].cell
    return NumericalError(
        f"request {part.answer.id}: node {number} (cell {cell.name!r}) returned NaN or infinite "
        "values; check the input and the cell's parameters, or pass allows_infinite to its Cell if "
        "infinity is meant"
    )


def policy_failed(policy: str, cause: Exception) -> InvalidGraphError:
    """Return the error for a graph for which a policy raised an exception."""
    refused = InvalidGraphError(
        f"the policy {policy!r} raised {type(cause).__name__} for the graph: {cause}; pass a graph "
        "that it schedules, or another policy"
    )
    refused.__cause__ = cause
    return refused


def not_scheduled(part: Part, policy: str) -> InvalidGraphError:
    """Return the error for a graph of which a policy schedules no node although nothing runs."""
    return InvalidGraphError(
        f"request {part.answer.id}: the policy {policy!r} schedules none of the nodes that are "
        "left, and nothing else runs; pass a graph that it schedules, or another policy"
    )


def then_failed(part: Part, cause: Exception) -> UnfoldError:
    """Return the error for a `then` that raised an exception."""
    failure = UnfoldError(
        f"request {part.answer.id}: its `then` raised {type(cause).__name__}: {cause}; it must "
        "return a Graph or the values"
    )
    failure.__cause__ = cause
    return failure
