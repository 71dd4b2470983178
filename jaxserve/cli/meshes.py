"""Stages and device groups as text on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from sharding import DeviceGroups, StagePlan

_STAGE = r"([1-9]\d*\*)?\d+(x\d+)?"
_STAGES = re.compile(f"{_STAGE}(,{_STAGE})*")


def stage_plan(text: str, tensor_parallel: int, devices: Sequence[Any] | None = None) -> StagePlan:
    """Parse e.g. "20x2,2*10x1", where the second and third stage have 10 layers and a device each.

    A stage without a number of devices has `tensor_parallel`.

    Raises:
      ValueError: the text is not understood, or there are too few devices.
    """
    from sharding import StagePlan

    if not _STAGES.fullmatch(text):
        raise ValueError(f"stages={text!r} is not understood; pass e.g. 20x2,10x1 or 15,15")
    stages = [stage.split("x") for stage in _each_stage(text)]
    return StagePlan.of(
        [int(layers) for layers, *_ in stages],
        tensor=[int(shards[0]) if shards else tensor_parallel for _, *shards in stages],
        devices=devices,
    )


def device_groups(text: str) -> DeviceGroups:
    """Parse e.g. "1/4", numbers of devices, or "2/20x2,10x1" with stages in a group.

    The encode group has the first devices, and the decode group those after them.

    Raises:
      ValueError: the text is not understood, or there are too few devices.
    """
    import jax

    from sharding import DeviceGroups

    parts = text.split("/")
    if len(parts) != 2 or not all(map(_STAGES.fullmatch, parts)):
        raise ValueError(
            f"groups={text!r} is not understood; pass the devices for prompts and those for "
            "answers, e.g. 1/4 or 2/20x2,10x1"
        )
    devices = jax.devices()
    num_encode = _num_devices(parts[0])
    return DeviceGroups(
        _group(parts[0], devices[:num_encode]), _group(parts[1], devices[num_encode:])
    )


def _num_devices(text: str) -> int:
    if text.isdecimal():
        return int(text)
    return sum(int(stage.partition("x")[2] or 1) for stage in _each_stage(text))


def _each_stage(text: str) -> list[str]:
    """Return the text of each stage, without the numbers of equal ones."""
    counted = [part.rpartition("*") for part in text.split(",")]
    return [stage for count, _, stage in counted for _ in range(int(count or 1))]


def _group(text: str, devices: Sequence[Any]) -> Mesh | StagePlan:
    from sharding import make_mesh

    if text.isdecimal():
        return make_mesh(tensor=int(text), devices=devices)
    return stage_plan(text, 1, devices)
