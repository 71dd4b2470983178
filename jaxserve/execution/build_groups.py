"""Builds an executor of two device groups: one for each group, with pools of one size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from flax import nnx

from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.build import build_executor
from jaxserve.execution.grouped import GroupedExecutor, LinkedExecutor
from jaxserve.execution.memory_plan import PoolSize
from jaxserve.execution.protocol import ModelExecutor
from jaxserve.execution.state_limits import check_slot_states
from jaxserve.execution.warmup import warm_up
from jaxserve.models.decoder import LayerLayout
from jaxserve.steps.probing import Probe
from sharding import StagePlan


def build_groups(
    graphdef: nnx.GraphDef,
    places: Sequence[tuple[Any, StagePlan | None]],
    model_config: Any,
    layer_layout: LayerLayout,
    options: RuntimeOptions,
    probe: Probe | None = None,
    *,
    takes_masks: bool = False,
) -> tuple[GroupedExecutor, PoolSize]:
    """Return an executor of two device groups, compiled; see `build_executor`.

    A page has one number in both groups, so the group with the least memory limits their number.

    Args:
      places: for the encode group and the decode group, parameters of the whole model and the
        stages to cut it into. Those of a group in one piece are on its devices.

    Returns:
      The executor, and the size of the pool on the devices whose pages are the largest.

    Raises:
      DeviceMemoryError, InvalidConfigError: see `build_executor`.
    """
    check_slot_states(model_config, options, num_device_groups=len(places))
    own = replace(options, warmup=False, host_memory=0)
    with ExitStack() as if_one_fails:
        built: list[tuple[ModelExecutor, PoolSize]] = []
        # Answers are computed by the decode group, which alone speculates.
        for (params, stages), speculation in zip(places, (None, own.speculation), strict=True):
            group_options = replace(own, speculation=speculation)
            built.append(
                build_executor(
                    *(graphdef, params, model_config, layer_layout, group_options, stages),
                    probe=probe,
                    takes_masks=takes_masks,
                )
            )
            if_one_fails.callback(built[-1][0].close)
        num_pages = min(executor.config.num_pages for executor, _ in built)
        for executor, _ in built:
            if executor.config.num_pages > num_pages:
                executor.resize(num_pages, ())
        groups = [cast(LinkedExecutor, executor) for executor, _ in built]
        grouped = GroupedExecutor(groups, strict=options.strict)
        if options.warmup:
            warm_up(grouped, progress=options.progress)
        if_one_fails.pop_all()
    largest = max((size for _, size in built), key=lambda size: size.page_bytes)
    return grouped, replace(largest, num_pages=num_pages)
