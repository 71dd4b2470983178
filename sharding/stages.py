"""Stage plans: consecutive layers on devices of their own, each stage with its own shards.

A stage has its own tensor-parallel degree, so that partial tensor parallelism (section 4 of the
ExeGPT paper) is a plan like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self, final

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.mesh import make_mesh


@final
@dataclass(frozen=True)
class Stage:
    """Layers `layers` (a range of their numbers) on `mesh`, shared out over its `tensor` axis."""

    mesh: Mesh
    layers: range

    @property
    def num_shards(self) -> int:
        return self.mesh.shape["tensor"]


@final
@dataclass(frozen=True)
class StagePlan:
    """Stages in the order in which tokens pass through them.

    Attributes:
      micro_batches: that a step is cut into, so that several stages work at once: a power of two.
    """

    stages: tuple[Stage, ...]
    micro_batches: int

    @classmethod
    def of(
        cls,
        num_layers: Sequence[int],
        *,
        tensor: int | Sequence[int] = 1,
        micro_batches: int | None = None,
        devices: Sequence[Any] | None = None,
    ) -> Self:
        """A plan over as many devices as it needs, in JAX's own order by default.

        Args:
          num_layers: of each stage.
          tensor: shards of each stage, or of all of them.
          micro_batches: as many as stages by default, rounded up to a power of two.

        Raises:
          ValueError: a number below 1, lists of different lengths, or too few devices.
        """
        shards = [tensor] * len(num_layers) if isinstance(tensor, int) else list(tensor)
        numbers = [*num_layers, *shards]
        if not num_layers or any(isinstance(n, bool) or int(n) != n or n < 1 for n in numbers):
            raise ValueError(
                f"stages with {list(num_layers)} layers and {shards} shards are not allowed; give "
                "a whole number of at least 1 for each"
            )
        if len(shards) != len(num_layers):
            raise ValueError(
                f"{len(num_layers)} stages, but {len(shards)} numbers of shards; give one a stage, "
                "or one for all"
            )
        available = list(jax.devices() if devices is None else devices)
        if sum(shards) > len(available):
            raise ValueError(
                f"stages with {shards} shards need {sum(shards)} devices, but there are "
                f"{len(available)}; lower a number of shards"
            )
        micro_batches = micro_batches or 1 << (len(shards) - 1).bit_length()
        if micro_batches < 1 or micro_batches & (micro_batches - 1):
            raise ValueError(
                f"micro_batches={micro_batches} is not allowed; give a power of two: 1, 2, 4, ..."
            )
        bounds = zip(accumulate(num_layers, initial=0), accumulate(num_layers), strict=False)
        parts = zip(accumulate(shards, initial=0), accumulate(shards), strict=False)
        stages = [
            Stage(make_mesh(tensor=last - first, devices=available[first:last]), range(begin, end))
            for (begin, end), (first, last) in zip(bounds, parts, strict=True)
        ]
        return cls(tuple(stages), micro_batches)

    @property
    def num_layers(self) -> int:
        return self.stages[-1].layers.stop

    def __str__(self) -> str:
        return " + ".join(f"{len(stage.layers)}x{stage.num_shards}" for stage in self.stages)


def stages_of(mesh: Mesh | StagePlan | None, num_layers: int) -> StagePlan | None:
    """The stage plan that is meant for a model of `num_layers`; None where there is none.

    A mesh with a `stage` axis longer than 1 means as many stages, their layers as even as can be.

    Raises:
      ValueError: more stages than layers.
    """
    if not isinstance(mesh, Mesh):
        return mesh
    size = mesh.shape.get("stage", 1)
    if size == 1:
        return None
    if size > num_layers:
        raise ValueError(f"a stage axis of {size} is more than the model's {num_layers} layers")
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0)
    return StagePlan.of(
        [num_layers // size + (i < num_layers % size) for i in range(size)],
        tensor=mesh.shape.get("tensor", 1),
        devices=list(devices.reshape(-1)),
    )
