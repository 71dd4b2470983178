"""Cells without a module, for simulations and tests of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from jaxserve.cells.base import BATCH_SIZES, BaseCell, Node
from jaxserve.cells.values import HasShape, ValueSpec


@final
class SimulatedCell(BaseCell):
    """A cell that only has a signature; a `SimulatedWorker` says how long it takes.

    Args:
      name: also the identity of its type.
      inputs, outputs: without the batch axis.
      is_loop: whether a node runs several steps; pass their number as `max_steps` in its call.
      priority, batch_sizes: see `BaseCell`.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, HasShape],
        outputs: Mapping[str, HasShape],
        *,
        priority: int = 0,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        is_loop: bool = False,
    ):
        super().__init__(
            ("simulated", name),
            name,
            {key: ValueSpec.of(value) for key, value in inputs.items()},
            {key: ValueSpec.of(value) for key, value in outputs.items()},
            priority=priority,
            batch_sizes=batch_sizes,
            is_loop=is_loop,
            ends_by_itself=is_loop,
        )

    def __call__(self, *, max_steps: int = 1, **inputs: Any) -> Node:
        return Node(self, self.bind(inputs), max_steps)
