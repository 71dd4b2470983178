"""The service that options describe: a runtime, or replicas on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from jaxserve.cli.adapters import adapters_of, room_for
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jaxserve.fleet import Fleet
    from jaxserve.runtime import Runtime, Service


def open_service(
    model: str, *, quiet: bool, replicas: int = 1, roles: str | None = None, **settings: object
) -> Service:
    """Open the service that the options describe. Progress bars go to stderr.

    Args:
      replicas: number of processes; 1 opens a `Runtime`, more open a `Fleet`.
      roles: numbers of replicas by role, see `roles_of`; they open a `Fleet`, too.
      settings: arguments of `_open_runtime`, `Runtime.from_pretrained` or `Fleet`; None leaves an
        option at its default.

    Raises:
      InvalidConfigError: an option is not allowed, or a fleet does not have it.
    """
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if given.get("host_memory") == "0":
        given["host_memory"] = 0
    if roles is not None:
        if replicas != 1:
            raise InvalidConfigError(
                f"--roles {roles} cannot be combined with --replicas {replicas}; omit --replicas"
            )
        number: Any = {"roles": roles_of(roles)}
    elif replicas == 1:
        return _open_runtime(model, quiet=quiet, **given)
    else:
        number = {"replicas": replicas}
    return _open_fleet(model, number, quiet=quiet, **given)


def roles_of(text: str) -> dict[str, int]:
    """Return the numbers of replicas of a text such as "prefill=1,decode=2".

    Raises:
      InvalidConfigError: it is not of that form, or does not name both roles once.
    """
    pairs = [part.split("=") for part in text.split(",")]
    try:
        roles = {name.strip(): int(number) for name, number in pairs}
    except ValueError:
        roles = {}
    if sorted(roles) != ["decode", "prefill"] or len(pairs) != len(roles):
        raise InvalidConfigError(
            f"--roles {text!r} is not allowed; pass numbers of both roles, such as "
            "prefill=1,decode=2"
        )
    return roles


def _open_fleet(
    model: str,
    number: dict[str, Any],
    *,
    quiet: bool,
    stages: str | None = None,
    groups: str | None = None,
    data_parallel: int = 1,
    adapter: Sequence[str] = (),
    **given: Any,
) -> Fleet:
    # This process must not start JAX's devices: the replicas need them.
    import jax

    from jaxserve.fleet import Fleet

    option = "--roles" if "roles" in number else f"--replicas {number['replicas']}"
    if stages is not None or groups is not None or data_parallel != 1:
        raise InvalidConfigError(
            f"{option} cannot be combined with --stages, --groups or --data-parallel; "
            f"pass --tensor-parallel to split each replica, or omit {option}"
        )
    if adapter:
        raise InvalidConfigError(
            f"{option} cannot be combined with --adapter: replicas on Ray load none; omit one of "
            "them"
        )
    if jax.distributed.is_initialized():
        raise InvalidConfigError(
            f"{option} cannot be combined with --num-processes: Ray starts the replicas' "
            "processes; omit one of them"
        )
    return Fleet(model, progress=not quiet, **number, **given)


def _open_runtime(
    model: str,
    *,
    quiet: bool,
    tensor_parallel: int = 1,
    stages: str | None = None,
    groups: str | None = None,
    data_parallel: int = 1,
    adapter: Sequence[str] = (),
    max_adapters: int | None = None,
    max_adapter_rank: int | None = None,
    **given: Any,
) -> Runtime:
    """Return the runtime; a process that follows serves the leader first, then exits."""
    import jax

    from jaxserve.cli.meshes import device_groups, stage_plan
    from jaxserve.runtime import Runtime
    from sharding import make_mesh

    num_processes = jax.process_count()
    try:
        if stages is not None and data_parallel != 1:
            raise ValueError("--stages and --data-parallel cannot be combined; pass one of them")
        if groups is not None and (stages is not None or data_parallel * tensor_parallel != 1):
            raise ValueError(
                "--groups says how each group is split, and cannot be combined with --stages, "
                "--tensor-parallel or --data-parallel; pass one of them"
            )
        if groups is not None:
            given["mesh"] = device_groups(groups)
        elif stages is not None:
            given["mesh"] = stage_plan(stages, tensor_parallel)
        elif (data_parallel, tensor_parallel) != (1, 1) or num_processes > 1:
            mesh = given["mesh"] = make_mesh(data=data_parallel, tensor=tensor_parallel)
            if num_processes > 1 and mesh.size != jax.device_count():
                raise ValueError(
                    f"--tensor-parallel {tensor_parallel} is not allowed: {num_processes} "
                    f"processes serve the model together, on all of their {jax.device_count()} "
                    f"devices; pass --tensor-parallel {jax.device_count()}, or start fewer "
                    "processes"
                )
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error
    is_quiet = quiet or jax.process_index() > 0
    adapters = adapters_of(adapter)
    given |= room_for(adapters, max_adapters, max_adapter_rank)
    rt = Runtime.from_pretrained(model, progress=not is_quiet, **given)
    if not rt.is_leader:
        with rt:
            rt.follow()
        raise typer.Exit
    try:
        for name, folder in adapters.items():
            rt.load_adapter(name, folder)
    except BaseException:
        rt.close()
        raise
    return rt
