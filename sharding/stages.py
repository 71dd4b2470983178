"""Stage plans: consecutive layers, each stage on its own devices.

Each stage has its own tensor-parallel degree, so that a plan can express partial tensor
parallelism (ExeGPT, section 4).
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
    """A range of layers on a mesh, split over its `tensor` axis."""

    mesh: Mesh
    layers: range

    @property
    def num_shards(self) -> int:
        return self.mesh.shape["tensor"]


@final
@dataclass(frozen=True)
class StagePlan:
    """The stages of a model, in the order of their layers.

    Attributes:
      micro_batches: number of parts of a step, so that several stages work at the same time; a
        power of two.
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
        """Make a plan over the first devices of `devices` (default: `jax.devices()`).

        Args:
          num_layers: number of layers of each stage.
          tensor: number of shards of each stage, or one number for all stages.
          micro_batches: by default the number of stages, rounded up to a power of two.

        Raises:
          ValueError: a number is below 1, the lists differ in length, or there are too few devices.
        """
        shards = [tensor] * len(num_layers) if isinstance(tensor, int) else list(tensor)
        numbers = [*num_layers, *shards]
        if not num_layers or any(isinstance(n, bool) or int(n) != n or n < 1 for n in numbers):
            raise ValueError(
                f"stages with {list(num_layers)} layers and {shards} shards are not allowed; pass "
                "a whole number of at least 1 for each"
            )
        if len(shards) != len(num_layers):
            raise ValueError(
                f"{len(num_layers)} stages, but {len(shards)} numbers of shards; pass one per "
                "stage, or one for all"
            )
        available = list(jax.devices() if devices is None else devices)
        if sum(shards) > len(available):
            raise ValueError(
                f"stages with {shards} shards need {sum(shards)} devices, but there are "
                f"{len(available)}; reduce the number of shards"
            )
        micro_batches = micro_batches or 1 << (len(shards) - 1).bit_length()
        if micro_batches < 1 or micro_batches & (micro_batches - 1):
            raise ValueError(
                f"micro_batches={micro_batches} is not allowed; pass a power of two: 1, 2, 4, ..."
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
    """Return the stage plan of a model with `num_layers`; None if `mesh` has a single stage.

    A mesh whose `stage` axis is longer than 1 gives one stage per index. The stages' numbers of
    layers differ by at most 1.

    Raises:
      ValueError: there are more stages than layers.
    """
    if not isinstance(mesh, Mesh):
        return mesh
    size = mesh.shape.get("stage", 1)
    if size == 1:
        return None
    if size > num_layers:
        raise ValueError(
            f"a stage axis of {size} is more than the model's {num_layers} layers; use a mesh with "
            "fewer stages"
        )
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0)
    return StagePlan.of(
        [num_layers // size + (i < num_layers % size) for i in range(size)],
        tensor=mesh.shape.get("tensor", 1),
        devices=list(devices.reshape(-1)),
    )
