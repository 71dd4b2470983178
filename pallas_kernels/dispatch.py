"""The choice of an operation's implementation, made and recorded when a call is traced.

Every public operation has an argument `implementation`, which overrides the platform's choice: one
name, or several separated by commas, of which the first that can serve the call is used. The choice
is logged once. Names with "_interpreted" run a GPU kernel on any platform, for tests. An operation
raises `NotImplementedError`, with the reason, if no requested implementation can serve the case,
and `ValueError` if the shapes contradict each other or an implementation is unknown.

A kernel that cannot serve a device may show this only when XLA compiles the whole program. Its
caller traces the program again inside `compiling_alone`, which finds such kernels and refuses them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar, final

import jax
import numpy as np
from jaxtyping import Array, Bool

_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that serves an operation on arrays of certain shapes.

    Attributes:
      reason: why it was chosen, or why the preferred implementations refused.
      shapes: such as "q float32[8, 9, 64], k_pages float32[30, 257, 3, 32, 64]".
    """

    operation: str
    implementation: str
    platform: str
    reason: str
    shapes: str


# An ordered set: choice -> None.
_choices: dict[Choice, None] = {}
# The lists of the open `noted` blocks of each thread.
_noting = threading.local()
# The open `compiling_alone` block of a thread, and what makes JAX trace anew in it.
_alone = threading.local()
_anew = jax.make_user_context()
# Kernel calls that were compiled alone -> reason why it failed, or None.
_compiled: dict[Any, str | None] = {}
# Begins the refusal of a kernel that does not compile; operations whose refusal was logged.
_NOT_COMPILED = "it does not compile"
_warned: set[str] = set()
# The rows of the innermost `only_rows` block of each thread.
_tracing = threading.local()


def choices() -> tuple[Choice, ...]:
    """Return the distinct choices of this process, oldest first."""
    return tuple(_choices)


@contextmanager
def noted() -> Iterator[list[Choice]]:
    """Yield a list to which choices made inside the block, by its own thread, are added.

    A function that JAX has traced before makes no choice.
    """
    lists: list[list[Choice]] = _noting.__dict__.setdefault("lists", [])
    lists.append([])
    try:
        yield lists[-1]
    finally:
        lists.pop()


def call(
    operation: str,
    implementations: Mapping[str, Callable[..., _Result]],
    preferred: Mapping[str, Sequence[str]],
    implementation: str | None,
    **arguments,
) -> _Result:
    """Call the first preferred implementation that can serve the arguments, and return its result.

    Args:
      operation: name for the log.
      implementations: name -> function, which raises `NotImplementedError` with the reason for
        arguments that it cannot serve.
      preferred: platform -> names in order of preference. "xla" follows the last of them, and
        serves a platform that is missing.

    `implementation` and the errors are as the module says.
    """
    platform = target_platform()
    if implementation is not None:
        names, why = tuple(implementation.split(",")), "requested"
        unknown = [name for name in names if name not in implementations]
        if unknown:
            raise ValueError(
                f"implementation={implementation!r}: {unknown[0]!r} is unknown; pass one of "
                f"{tuple(implementations)}, or several separated by commas"
            )
    else:
        names, why = preferred.get(platform, ()), "the first choice"
    refused = []
    for name in names:
        try:
            _require_compiles(operation, name, implementations[name], arguments)
            out = implementations[name](**arguments)
        except NotImplementedError as error:
            if implementation == name:
                raise
            refused.append(f"{name} refused: {error}")
        else:
            record(operation, name, "; ".join(refused) or why, **arguments)
            return out
    if implementation is not None:
        raise NotImplementedError("; ".join(refused))
    record(operation, "xla", "; ".join(refused) or "the only choice", **arguments)
    return implementations["xla"](**arguments)


@contextmanager
def compiling_alone() -> Iterator[list[str]]:
    """Compile every kernel call that this thread traces inside the block alone, once a process.

    A call that does not compile is refused from then on, and the next implementation serves it. The
    list has the reasons of those inside the block. JAX traces there what it has traced before, too,
    and elsewhere uses its earlier traces until its caches are cleared.
    """
    refused: list[str] = []
    _alone.refused = refused
    try:
        with _anew(object()):
            yield refused
    finally:
        _alone.refused = None


def _require_compiles(
    operation: str, name: str, implementation: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    """Raise NotImplementedError for a call that did not compile alone.

    Inside `compiling_alone`, find that out.
    """
    refused: list[str] | None = getattr(_alone, "refused", None)
    if name == "xla" or (refused is None and not _compiled):
        return
    leaves, structure = jax.tree.flatten(arguments)
    described = tuple(
        (leaf.shape, leaf.dtype) if _is_array(leaf) else repr(leaf) for leaf in leaves
    )
    key = operation, name, target_platform(), structure, described
    if key not in _compiled:
        if refused is None:
            return
        _compiled[key] = _failure(implementation, leaves, structure)
    reason = _compiled[key]
    if reason is None:
        return
    if refused is not None:
        refused.append(reason)
    raise NotImplementedError(f"{_NOT_COMPILED}: {reason}")


def _failure(
    implementation: Callable[..., Any], leaves: Sequence[Any], structure: Any
) -> str | None:
    """Compile a call alone, on the default device; return the first line of an error.

    It does so in a thread of its own, which is inside no trace and no mesh. Pallas raises
    `NotImplementedError`, too, for what it cannot lower; that is a failure, and one of tracing is a
    refusal. Any other error of tracing is raised.
    """

    def alone(*arrays: jax.Array) -> Any:
        given = iter(arrays)
        filled = [next(given) if _is_array(leaf) else leaf for leaf in leaves]
        return implementation(**jax.tree.unflatten(structure, filled))

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves if _is_array(leaf)]

    def compiled() -> str | None:
        try:
            traced = jax.jit(alone).trace(*shapes)
        except NotImplementedError:  # which the call itself repeats
            return None
        try:
            traced.lower().compile()
        except Exception as error:  # of Pallas, XLA or ptxas
            return str(error).partition("\n")[0] or type(error).__name__
        return None

    with ThreadPoolExecutor(1) as other:
        return other.submit(compiled).result()


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def by_triton(folder: str, operation: str) -> dict[str, Callable[..., Any]]:
    """Return an operation's function in a folder's `triton.py`, compiled and interpreted, by name.

    The module is imported at the first call, as it imports Pallas, which CPUs do without.
    """

    def call_it(*given: Any, **arguments: Any) -> Any:
        return getattr(import_module(f"jaxserve.kernels.{folder}.triton"), operation)(
            *given, **arguments
        )

    return {"triton": call_it, "triton_interpreted": partial(call_it, interpret=True)}


@contextmanager
def only_rows(is_computed: Bool[Array, " tokens"] | None) -> Iterator[None]:
    """Let products of as many rows, traced in the block by its thread, leave out some of them.

    Only kernels for CPUs do; their results are zeros in the rows that are left out. None: all rows
    are computed. A function that is traced for several calls must contain the block.
    """
    before = getattr(_tracing, "is_computed", None)
    _tracing.is_computed = is_computed
    try:
        yield
    finally:
        _tracing.is_computed = before


def computed_rows(num_rows: int) -> Bool[Array, " tokens"] | None:
    """Return whether each of a product's rows is computed, as `only_rows` says; None for all."""
    is_computed = getattr(_tracing, "is_computed", None)
    return is_computed if is_computed is not None and is_computed.shape == (num_rows,) else None


def as_operand(is_computed: Bool[Array, " tokens"] | None) -> Bool[Array, " tokens"] | np.ndarray:
    """Return `computed_rows` as the kernels take it: empty for all."""
    return np.zeros(0, bool) if is_computed is None else is_computed


def target_platform() -> str:
    """Return the platform that is compiled for, such as "cpu" or "cuda".

    It is the device of the current abstract mesh (see `cross`), or else JAX's default back end.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "cuda" if platform == "gpu" else platform


def is_partitioned() -> bool:
    """Return whether XLA will partition the current trace over a mesh; False inside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return False
    manual = jax.sharding.AxisType.Manual
    return any(
        size > 1 and kind != manual
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def require_whole() -> None:
    """Raise NotImplementedError if XLA will partition the current trace."""
    if is_partitioned():
        raise NotImplementedError("XLA cannot partition it over a mesh")


def require_cpu() -> None:
    """Raise NotImplementedError unless the current trace is compiled for one CPU."""
    platform = target_platform()
    if platform != "cpu":
        raise NotImplementedError(f"it is compiled for the CPU, not for {platform}")
    require_whole()


def record(operation: str, name: str, reason: str, **arguments: Any) -> None:
    shapes = ", ".join(
        f"{argument} {value.dtype.name}{list(value.shape)}"
        for argument, value in arguments.items()
        if isinstance(value, (jax.Array, jax.ShapeDtypeStruct, np.ndarray))
    )
    platform = target_platform()
    add(Choice(operation, name, platform, reason, shapes))


def add(choice: Choice) -> None:
    """Record a choice, perhaps of an earlier process, and log it the first time."""
    for each in _noting.__dict__.get("lists", ()):
        each.append(choice)
    if choice not in _choices:
        _choices[choice] = None
        if _NOT_COMPILED in choice.reason and choice.operation not in _warned:
            _warned.add(choice.operation)
            _logger.warning(
                "%s: %s serves some calls on %s: %s",
                choice.operation,
                choice.implementation,
                choice.platform,
                choice.reason,
            )
        _logger.debug(
            "%s: %s on %s (%s), %s",
            choice.operation,
            choice.implementation,
            choice.platform,
            choice.reason,
            choice.shapes,
        )
