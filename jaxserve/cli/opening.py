"""The service that options describe: a runtime, with its mesh and adapters, or replicas on Ray."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxserve.fleet import Fleet
    from jaxserve.runtime import Runtime, Service
    from jaxserve.sharding import DeviceGroups, StagePlan


_STAGE = r"([1-9]\d*\*)?\d+(x\d+)?"
_STAGES = re.compile(f"{_STAGE}(,{_STAGE})*")


def adapters_of(given: Sequence[str]) -> dict[str, str]:
    """Return the sources of adapters by name: folders, or names on the Hub."""
    found: dict[str, str] = {}
    for text in given:
        name, _, source = text.partition("=")
        if not name or not source or name in found:
            raise InvalidConfigError(
                f"--adapter {text!r} is not allowed; pass NAME=FOLDER, or NAME=org/adapter, each "
                "name once"
            )
        found[name] = source
    return found


def room_for(
    adapters: Mapping[str, str],
    max_adapters: int | None = None,
    max_adapter_rank: int | None = None,
) -> dict[str, int]:
    """Return the options of a runtime that has room for these adapters.

    By default there is room for these alone, at the largest of their ranks (or the default rank).
    """
    from jaxserve.models.adapter_source import AdapterSource

    ranks = [AdapterSource.of(source, None).rank for source in adapters.values()]
    room = {"max_adapters": len(ranks) if max_adapters is None else max_adapters}
    if max_adapter_rank is not None or ranks:
        room["max_adapter_rank"] = max(ranks) if max_adapter_rank is None else max_adapter_rank
    return room if room["max_adapters"] else {}


def stage_plan(text: str, tensor_parallel: int, devices: Sequence[Any] | None = None) -> StagePlan:
    """Parse e.g. "20x2,2*10x1", where the second and third stage have 10 layers and a device each.

    A stage without a number of devices has `tensor_parallel`.
    """
    from jaxserve.sharding import StagePlan

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
    """
    import jax

    from jaxserve.sharding import DeviceGroups

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
    counted = [part.rpartition("*") for part in text.split(",")]
    return [stage for count, _, stage in counted for _ in range(int(count or 1))]


def _group(text: str, devices: Sequence[Any]) -> Mesh | StagePlan:
    from jaxserve.sharding import make_mesh

    if text.isdecimal():
        return make_mesh(tensor=int(text), devices=devices)
    return stage_plan(text, 1, devices)


def open_service(
    model: str, *, quiet: bool, replicas: int = 1, roles: str | None = None, **settings: object
) -> Service:
    """Open the service that the options describe. Progress bars go to stderr.

    A `Fleet` opens if there are several `replicas` or any `roles` (see `roles_of`), otherwise a
    `Runtime`. `settings` are arguments of `_open_runtime`, `Runtime.from_pretrained` or `Fleet`;
    None leaves an option at its default.
    """
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    for name in ("host_memory", "state_memory"):
        if given.get(name) == "0":
            given[name] = 0
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
    """Return the numbers of replicas of a text such as "prefill=1,decode=2"."""
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

    from jaxserve.execution.compilation import start_jax
    from jaxserve.runtime import Runtime
    from jaxserve.sharding import make_mesh

    start_jax()
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
