"""A model cut into the stages of a plan: the parameters of each stage, and their shardings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.config import DecoderConfig, check_fits
from jaxserve.models.decoder import LayerLayout, Part
from jaxserve.models.loading import abstract_model
from jaxserve.sharding import Stage, StagePlan, stages_of, state_shardings

Path = tuple[Any, ...]


@final
@dataclass(frozen=True)
class ModelPart:
    """The part of a model that one stage has."""

    stage: Stage
    graphdef: nnx.GraphDef  # the static part, to `nnx.merge` with `params_of(whole)`
    shardings: nnx.State  # the shardings of the part's parameters, in their structure

    def params_of(self, whole: nnx.State) -> nnx.State:
        """Return this part's share of a whole model's parameters, or of some of them.

        Arrays in place are not copied.
        """
        flat = dict(nnx.to_flat_state(whole))

        def own(path: Path, place: nnx.Variable) -> nnx.Variable:
            variable = flat[self._origin(path)]
            array = self._cut(path, variable.get_value())
            return variable.replace(jax.device_put(array, place.get_value()))

        return nnx.from_flat_state(
            [
                (path, own(path, place))
                for path, place in nnx.to_flat_state(self.shardings)
                if self._origin(path) in flat
            ]
        )

    def _origin(self, path: Path) -> Path:
        if path[0] == "blocks" and isinstance(path[1], int):
            return ("blocks", path[1] + self.stage.layers.start, *path[2:])
        return path

    def _cut(self, path: Path, array: jax.Array) -> jax.Array:
        """Return this part's layers of a parameter that stacks all layers."""
        layers = self.stage.layers
        is_stacked = path[0] == "blocks" and not isinstance(path[1], int)
        return array[layers.start : layers.stop] if is_stacked else array

    def whole_shardings(self) -> dict[Path, Any]:
        """Return the variables with shardings, by path in a whole unrolled model."""
        return {self._origin(path): place for path, place in nnx.to_flat_state(self.shardings)}


def cut(config: DecoderConfig, plan: StagePlan, layer_layout: LayerLayout) -> list[ModelPart]:
    """Return the parts of a model, one for each stage.

    Raises InvalidConfigError if the numbers of layers differ, or a mesh does not divide its stage.
    """
    if plan.num_layers != config.num_layers:
        raise InvalidConfigError(
            f"the stages {plan} have {plan.num_layers} layers, the model has {config.num_layers}; "
            "give each of its layers to one stage"
        )
    parts = []
    for stage in plan.stages:
        check_fits(stage.mesh, config)
        part = Part(
            stage.layers, has_start=stage is plan.stages[0], has_end=stage is plan.stages[-1]
        )
        graphdef, state = abstract_model(config, layer_layout=layer_layout, part=part)
        parts.append(ModelPart(stage, graphdef, state_shardings(state, stage.mesh)))
    return parts


def planned_stages(mesh: Mesh | StagePlan | None, config: DecoderConfig) -> StagePlan | None:
    """Return the stages of a user's mesh or None; raise InvalidConfigError for too many."""
    try:
        return stages_of(mesh, config.num_layers)
    except ValueError as error:
        raise InvalidConfigError(f"{error}; lower it") from error


def shardings_over(parts: Sequence[ModelPart]) -> nnx.State:
    """Return shardings of a whole unrolled model, each on the first stage with the parameter."""
    places: dict[Path, Any] = {}
    for part in reversed(parts):
        places |= part.whole_shardings()
    return nnx.from_flat_state(list(places.items()))
