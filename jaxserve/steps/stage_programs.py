"""The executables of a stage beside those that every placement has (`steps.programs`)."""

from __future__ import annotations

from functools import partial
from typing import final

from flax import nnx

from jaxserve.core.config import EngineConfig
from jaxserve.steps import stages
from jaxserve.steps.heads import stage_head
from jaxserve.steps.placement import Placement
from jaxserve.steps.step_function import Shelf, StepFunction


@final
class StagePrograms:
    """The jitted functions of `steps.stages`, and `heads.stage_head`, for one stage.

    All but the last use `decode` and `append` alone.

    Args:
      graphdef: see `Programs`.
    """

    def __init__(
        self, graphdef: nnx.GraphDef, config: EngineConfig, place: Placement, shelf: Shelf
    ):
        bind = partial(partial, graphdef=graphdef, config=config)
        whole = place.whole
        self.decode = StepFunction(
            "stage_decode",
            bind(stages.decode),
            shelf,
            packs=True,
            donate_argnames="cache",
            out_shardings=(place.pages, whole),
        )
        self.append = StepFunction(
            "stage_append",
            stages.append,
            shelf,
            num_fixed=0,
            donate_argnames="slots",
            out_shardings=whole,
        )
        of_the_last = partial(
            StepFunction, shelf=shelf, static_argnames="variant", out_shardings=whole
        )
        changed = ("slots", "outputs")
        self.head = of_the_last("stage_head", bind(stage_head), donate_argnames=changed)
        self.choose = of_the_last(
            "stage_choose", bind(stages.choose_proposed), packs=True, donate_argnames=changed
        )
        self.verify = of_the_last("stage_verify", bind(stages.verify), donate_argnames="slots")
        self.propose = StepFunction(
            "stage_propose",
            stages.propose,
            shelf,
            num_fixed=0,
            packs=True,
            static_argnames="num_proposed",
            out_shardings=whole,
        )
