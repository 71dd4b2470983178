"""Which implementation of an operation serves a call: chosen when it is traced, and logged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import jax

_logger = logging.getLogger(__name__)


def call(
    operation: str,
    implementations: Mapping[str, Callable[..., jax.Array]],
    preferred: Mapping[str, Sequence[str]],
    implementation: str | None,
    **arguments,
) -> jax.Array:
    """The result of the first of the platform's preferred implementations that can serve the call.

    Args:
      operation: for the log.
      implementations: by name; each raises NotImplementedError, saying why, for what it cannot do.
      preferred: by platform, names in order; where a platform is missing, or all refuse, "xla".
      implementation: use this one, whatever is preferred.

    Raises:
      NotImplementedError: the implementation asked for cannot serve this case.
      ValueError: there is no such implementation.
    """
    platform = target_platform()
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(
                f"implementation={implementation!r} is unknown; give one of "
                f"{tuple(implementations)}"
            )
        _log_choice(operation, implementation, platform, "asked for")
        return implementations[implementation](**arguments)
    refused = []
    for name in preferred.get(platform, ()):
        try:
            out = implementations[name](**arguments)
        except NotImplementedError as error:
            refused.append(f"{name} cannot: {error}")
        else:
            _log_choice(operation, name, platform, "; ".join(refused) or "the first choice")
            return out
    _log_choice(operation, "xla", platform, "; ".join(refused) or "the only choice")
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


@functools.cache
def _log_choice(operation: str, name: str, platform: str, reason: str) -> None:
    _logger.info("%s: %s on %s (%s)", operation, name, platform, reason)
