"""Which implementation of an operation serves a call: chosen when it is traced, and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import jax

_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """What serves an operation on arrays of these shapes.

    Attributes:
      reason: why, and why those that would have been preferred refused.
      shapes: of the arrays, such as "q float32[8, 9, 64], k_pages float32[30, 257, 3, 32, 64]".
    """

    operation: str
    implementation: str
    platform: str
    reason: str
    shapes: str


# In the order in which they were made; a dictionary, for its keys.
_choices: dict[Choice, None] = {}


def choices() -> tuple[Choice, ...]:
    """Every choice that this process has made, oldest first, each once."""
    return tuple(_choices)


def call(
    operation: str,
    implementations: Mapping[str, Callable[..., _Result]],
    preferred: Mapping[str, Sequence[str]],
    implementation: str | None,
    **arguments,
) -> _Result:
    """The result of the first of the platform's preferred implementations that can serve the call.

    Args:
      operation: for the log.
      implementations: by name; each raises NotImplementedError, saying why, for what it cannot do.
      preferred: by platform, names in order; where a platform is missing, or all refuse, "xla".
      implementation: use this one, whatever is preferred; of several, with commas between them,
        the first that can.

    Raises:
      NotImplementedError: no implementation that was asked for can serve this case.
      ValueError: there is no such implementation.
    """
    platform = target_platform()
    if implementation is not None:
        names, why = tuple(implementation.split(",")), "asked for"
        unknown = [name for name in names if name not in implementations]
        if unknown:
            raise ValueError(
                f"implementation={implementation!r}: {unknown[0]!r} is unknown; give one of "
                f"{tuple(implementations)}, or several with commas between them"
            )
    else:
        names, why = preferred.get(platform, ()), "the first choice"
    refused = []
    for name in names:
        try:
            out = implementations[name](**arguments)
        except NotImplementedError as error:
            if implementation == name:
                raise
            refused.append(f"{name} cannot: {error}")
        else:
            record(operation, name, "; ".join(refused) or why, **arguments)
            return out
    if implementation is not None:
        raise NotImplementedError("; ".join(refused))
    record(operation, "xla", "; ".join(refused) or "the only choice", **arguments)
    return implementations["xla"](**arguments)


def target_platform() -> str:
    """What is compiled for: "cpu", "cuda" and so on.

    That is JAX's default back end, or the device of the abstract mesh in force, for compiling
    where there is no such device.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "cuda" if platform == "gpu" else platform


def compute_capability() -> tuple[int, int] | None:
    """Of the GPU that is compiled for, such as (9, 0); None where it is not at hand."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if capability is None:
        return None
    major, minor = str(capability).split(".")
    return int(major), int(minor)


def is_partitioned() -> bool:
    """Whether what is traced now is for XLA to cut over a mesh; inside `shard_map` it is not."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return False
    manual = jax.sharding.AxisType.Manual
    return any(
        size > 1 and kind != manual
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def record(operation: str, name: str, reason: str, **arguments: Any) -> None:
    """Remember a choice, and log it the first time."""
    shapes = ", ".join(
        f"{argument} {value.dtype.name}{list(value.shape)}"
        for argument, value in arguments.items()
        if hasattr(value, "shape") and hasattr(value, "dtype")
    )
    platform = target_platform()
    choice = Choice(operation, name, platform, reason, shapes)
    if choice not in _choices:
        _choices[choice] = None
        _logger.info("%s: %s on %s (%s), %s", operation, name, platform, reason, shapes)
