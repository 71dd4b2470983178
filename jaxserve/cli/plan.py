"""`jaxserve plan`: the schedules with the most throughput under latency bounds."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.opening import open_service
from jaxserve.cli.options import AsJson, show_wide
from jaxserve.core.assets import cache_errors, cache_folder
from jaxserve.core.errors import InvalidConfigError, InvalidProfileError

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.core.config import EngineConfig
    from jaxserve.models.config import DecoderConfig
    from jaxserve.planning import GroupTimes, StepTimes
    from jaxserve.planning.layers import LayerOrigin
    from jaxserve.planning.schedules import Deployment, LatencyBounds, Schedule, TaskLengths
    from jaxserve.planning.schedules.frontier import Frontier, ScheduleOutcome, ScheduleSearch
    from jaxserve.runtime import Runtime

Times = TypeVar("Times", "StepTimes", "GroupTimes")

_SCHEDULE = "Schedule"
_SIMULATED = "Simulated cluster"

# Options of an engine, which measured layers do not have.
_ENGINE = ("load", "kv_memory", "groups")
# Options of this machine, which a simulated cluster does not have.
_MACHINE = (
    *_ENGINE,
    *("profile", "measure_again", "dtype", "kv_dtype", "quantize", "quantize_embeddings"),
    *("max_slots", "max_context", "tensor_parallel"),
)


def _option(*names: str, text: str, panel: str = _SCHEDULE, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def plan(
    context: typer.Context,
    latency_bound: Annotated[
        list[float] | None,
        _option(
            "--latency-bound",
            "-b",
            text="Seconds that an answer of the 99th-percentile length may take; may be given "
            "several times. [default: none]",
            show_default=False,
        ),
    ] = None,
    first_token_bound: Annotated[
        float, _option("--first-token-bound", text="Seconds to the first token.")
    ] = math.inf,
    token_bound: Annotated[
        float, _option("--token-bound", text="Seconds per output token, on average.")
    ] = math.inf,
    task: Annotated[
        str | None, _option("--task", text="Lengths of a task of ExeGPT: S, T, G, C1 or C2.")
    ] = None,
    lengths: Annotated[
        Path | None,
        _option(
            "--lengths",
            text="Lengths from a file: one written by --record, or pairs of prompt and output "
            "tokens as CSV or JSON.",
        ),
    ] = None,
    num_bounds: Annotated[
        int, _option("--num-bounds", text="Bounds to search for on the frontier, at most.")
    ] = 16,
    picture: Annotated[
        Path | None, _option("--picture", text="Draw the frontier in this PNG, SVG or PDF file.")
    ] = None,
    as_json: AsJson = False,
    policies: Annotated[
        str | None,
        _option(
            "--policies",
            text="Families of schedules to choose from, separated by commas: rra and continuous; "
            "with --layers and --cluster also waa, and with --groups waa alone. [default: all of "
            "them]",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        _option(
            "--cluster",
            text="Plan for a cluster of these devices by their rooflines: A40, A100, H100, H200. "
            "--model is then one of ExeGPT's, such as OPT-13B.",
            panel=_SIMULATED,
        ),
    ] = None,
    devices: Annotated[
        int | None,
        _option("--devices", text="Devices of the cluster. [default: all of it]", panel=_SIMULATED),
    ] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    load: opt.Load = "auto",
    dtype: opt.DType = None,
    kv_memory: opt.KvMemory = None,
    kv_dtype: opt.KvDType = None,
    quantize: opt.Quantize = None,
    quantize_embeddings: opt.QuantizeEmbeddings = None,
    max_slots: opt.MaxSlots = None,
    max_context: opt.MaxContext = None,
    tensor_parallel: opt.TensorParallel = 1,
    groups: Annotated[
        str | None,
        _option(
            "--groups",
            text="Plan WAA for two groups of devices: devices for prompts / devices for answers, "
            "e.g. 1/1.",
            panel="Runtime",
        ),
    ] = None,
    layers: Annotated[
        bool,
        _option(
            "--layers",
            text="Plan for this machine's devices by the measured parts of a layer, for every "
            "policy, with stages and tensor parallelism. Reads no weights.",
            panel="Runtime",
        ),
    ] = False,
    profile: Annotated[
        Path | None,
        _option(
            "--profile",
            text="Step times that `StepTimes.save` or, with --groups, `GroupTimes.save` wrote; or "
            "measured layers. [default: those in the cache folder]",
            panel="Runtime",
        ),
    ] = None,
    measure_again: Annotated[
        bool,
        _option(
            "--measure-again",
            text="Measure even if the cache folder has a profile.",
            panel="Runtime",
        ),
    ] = False,
    quiet: opt.Quiet = False,
) -> None:
    """Find the schedules with the most throughput under latency bounds.

    It prints the frontier of throughput and latency, the schedule that is chosen for each bound,
    and what its neighbours would give. What is measured is kept in the cache folder.
    """
    with opt.exit_codes():
        _check_picture(picture)
        from jaxserve.planning.schedules import LatencyBounds
        from jaxserve.planning.schedules.schedule import check_num_bounds

        # Options that are not allowed are refused before anything is measured.
        check_num_bounds(num_bounds)
        task_lengths, what = _lengths(task, lengths)
        families = None if policies is None else tuple(policies.split(","))
        asked = latency_bound or [math.inf]
        fixed = LatencyBounds(first_token_s=first_token_bound, token_s=token_bound)
        for bound_s in asked:
            replace(fixed, latency_s=bound_s)
        if cluster is not None and layers:
            raise InvalidConfigError("--cluster and --layers cannot be combined; pass one of them")
        if layers and tensor_parallel != 1:
            raise InvalidConfigError(
                "--layers chooses the degree of tensor parallelism; omit --tensor-parallel"
            )
        if cluster is not None:
            _refuse(context, _MACHINE, "--cluster, which plans by rooflines")
        if layers:
            _refuse(context, _ENGINE, "--layers, which loads no weights and has no engine")
        if profile is not None:
            _refuse(context, ("measure_again",), "--profile, which names the times to use")
        if cluster is not None:
            schedules, where = on_cluster(model, cluster, devices, task_lengths, families)
        elif layers:
            schedules, where = on_layers(
                task_lengths,
                families,
                profile,
                measure_again=measure_again,
                model=model,
                quiet=quiet,
                num_devices=devices,
                dtype=dtype,
                kv_dtype=kv_dtype,
                quantize=quantize,
                quantize_embeddings=quantize_embeddings,
                max_slots=max_slots,
                max_context=max_context,
            )
        elif devices is not None:
            raise InvalidConfigError(f"--devices {devices} needs --cluster or --layers; pass one")
        else:
            on_devices = on_engine if groups is None else partial(on_groups, groups=groups)
            schedules, where = on_devices(
                task_lengths,
                families,
                profile,
                measure_again=measure_again,
                model=model,
                quiet=quiet,
                load=load,
                dtype=dtype,
                kv_memory=kv_memory,
                kv_dtype=kv_dtype,
                quantize=quantize,
                quantize_embeddings=quantize_embeddings,
                max_slots=max_slots,
                max_context=max_context,
                tensor_parallel=tensor_parallel,
            )
        about = {
            "model": model,
            "devices": where,
            "lengths": what,
            "mean_input_tokens": task_lengths.inputs.mean,
            "mean_output_tokens": task_lengths.outputs.mean,
            "long_output_tokens": task_lengths.outputs.percentile(task_lengths.level),
        }
        _show(schedules, fixed, asked, about, num_bounds, picture, as_json=as_json, quiet=quiet)


def _refuse(context: typer.Context, names: Sequence[str], by: str) -> None:
    """Refuse the given options of these names, which have no effect with another option."""
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name != "DEFAULT"
    ]
    if given:
        raise InvalidConfigError(
            f"{', '.join(given)} would have no effect with {by}; omit one or the other"
        )


def _show(
    schedules: ScheduleSearch,
    fixed: Any,
    asked: Sequence[float],
    about: dict[str, Any],
    num_bounds: int,
    picture: Path | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from jaxserve.planning.schedules.frontier import frontier_of, neighbours_of

    chosen = {bound_s: schedules.best(replace(fixed, latency_s=bound_s)) for bound_s in asked}
    frontier = frontier_of(
        schedules, num_bounds=num_bounds, asked=asked, bounds=fixed, progress=not quiet
    )
    neighbours = {bound_s: neighbours_of(schedules, outcome) for bound_s, outcome in chosen.items()}
    if picture is not None:
        from jaxserve.report.frontier import draw_frontier

        title = f"{about['model']} on {about['devices']}, {about['lengths']}"
        with _writing(picture):
            draw_frontier(frontier, chosen, title=title).figure.savefig(picture, dpi=150)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    **about,
                    "chosen": [
                        {
                            "latency_bound_s": bound_s if math.isfinite(bound_s) else None,
                            **outcome.figures(),
                            "neighbours": {
                                name: other.figures() for name, other in neighbours[bound_s].items()
                            },
                        }
                        for bound_s, outcome in chosen.items()
                    ],
                    "frontier": [
                        {"latency_bound_s": bound_s, **outcome.figures()}
                        for bound_s, outcome in frontier.points
                    ],
                }
            )
        )
        return
    typer.echo(summary(about))
    show_wide(frontier_table(frontier, chosen))
    for bound_s, outcome in chosen.items():
        bounds = replace(fixed, latency_s=bound_s)
        show_wide(neighbours_table(bounds, outcome, neighbours[bound_s]))
    if picture is not None:
        typer.echo(f"drawn in {picture}")


def _lengths(task: str | None, path: Path | None) -> tuple[TaskLengths, str]:
    """Return the lengths that the options give, and a description of them."""
    from jaxserve.planning.schedules import TaskLengths, lengths_of
    from jaxserve.workload.answers import read_lengths
    from jaxserve.workload.tasks import TASKS

    if (task is None) == (path is None):
        raise InvalidConfigError("pass lengths in exactly one way: --task or --lengths")
    if path is not None:
        pairs = read_lengths(path)
        return lengths_of(pairs), f"{len(pairs)} answers of {path.name}"
    if task not in TASKS:
        raise InvalidConfigError(f"--task {task!r} is unknown; pass one of {', '.join(TASKS)}")
    return TaskLengths.of_task(TASKS[task]), f"task {task}"


def _check_picture(picture: Path | None) -> None:
    if picture is None:
        return
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidConfigError(
            f"--picture {picture} is not allowed; pass a file that ends in .png, .svg or .pdf"
        )
    with _writing(picture):
        if not picture.parent.is_dir():
            raise FileNotFoundError(f"the folder {picture.parent} does not exist")


@contextmanager
def _writing(picture: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfigError(
            f"cannot write --picture {picture}: {error}; name a file in a writable folder"
        ) from error


def on_cluster(
    model: str,
    name: str,
    num_devices: int | None,
    lengths: TaskLengths,
    families: tuple[str, ...] | None,
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of a model on a simulated cluster."""
    from jaxserve.planning.schedules import CLUSTERS, MODELS, roofline_deployment
    from jaxserve.planning.schedules.frontier import ClusterSearch
    from jaxserve.planning.schedules.search import CLUSTER_FAMILIES

    if name not in CLUSTERS:
        raise InvalidConfigError(
            f"--cluster {name!r} is unknown; pass one of {', '.join(CLUSTERS)}"
        )
    if model not in MODELS:
        raise InvalidConfigError(
            f"--model {model!r} has no shape for --cluster; pass one of {', '.join(MODELS)}"
        )
    shape, cluster = MODELS[model], CLUSTERS[name]
    if num_devices is not None:
        cluster = cluster.of(num_devices)
    deployment = roofline_deployment(shape, cluster)
    schedules = ClusterSearch(deployment, lengths, families or CLUSTER_FAMILIES)
    return schedules, f"{cluster.num_devices} {name} (rooflines)"


def on_layers(
    lengths: TaskLengths, families: tuple[str, ...] | None, profile: Path | None, **settings: Any
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of this machine's devices, by measured layers."""
    import jax

    from jaxserve.core.host import cpu_name
    from jaxserve.planning.schedules.frontier import ClusterSearch
    from jaxserve.planning.schedules.schedule import check_families
    from jaxserve.planning.schedules.search import CLUSTER_FAMILIES

    families = families or CLUSTER_FAMILIES
    check_families(families, CLUSTER_FAMILIES)
    deployment = layer_deployment(profile, lengths, **settings)
    where = f"{deployment.cluster.num_devices} {jax.devices()[0].device_kind} ({cpu_name()})"
    return ClusterSearch(deployment, lengths, families), f"{where}, by layers"


def on_engine(
    lengths: TaskLengths, families: tuple[str, ...] | None, profile: Path | None, **settings: Any
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of one engine on this machine, under policy `auto`."""
    from jaxserve.planning.schedules.families import FAMILIES
    from jaxserve.planning.schedules.frontier import FamiliesSearch
    from jaxserve.planning.schedules.schedule import check_families

    families = FAMILIES if families is None else tuple(families)
    check_families(families, FAMILIES)
    times, config = step_times(profile, lengths, **settings)
    device = times.origin.device
    where = f"{device['count']} {device['kind']} ({device['host_cpu']})"
    return FamiliesSearch(times, config, lengths, families=families), where


def on_groups(
    lengths: TaskLengths, families: tuple[str, ...] | None, profile: Path | None, **settings: Any
) -> tuple[ScheduleSearch, str]:
    """Return the schedules of two groups of this machine's devices."""
    from jaxserve.planning.schedules.frontier import GroupsSearch
    from jaxserve.planning.schedules.schedule import check_families

    check_families(families or ("waa",), ("waa",))
    times, config = group_times(profile, lengths, **settings)
    device = times.groups[0].origin.device
    where = f"{settings['groups']} {device['kind']} ({device['host_cpu']})"
    return GroupsSearch(times, config, lengths), where


def step_times(
    given: Path | None,
    lengths: TaskLengths,
    *,
    measure_again: bool,
    model: str,
    quiet: bool,
    **settings: Any,
) -> tuple[StepTimes, EngineConfig]:
    """Return the step times of a model's engine, and the engine's configuration.

    They are read from the file `given` (of `StepTimes.save`), or from the cache folder, or else
    measured and kept there. The requests' `lengths` must fit in the engine's context; `settings`
    are arguments of `opening.open_service`.
    """
    with _opened(model, quiet, settings, warmup=False) as rt:
        lengths.check_fits(rt.config)
        if given is not None:
            return rt.load_step_times(given), rt.config
        found = None if measure_again else rt.find_step_times(_profiles())
        if found is not None:
            return found, rt.config
    # Executables are compiled before they are timed.
    with _opened(model, quiet, settings, warmup=True) as rt:
        return _kept(rt.measure_step_times()), rt.config


def group_times(
    given: Path | None,
    lengths: TaskLengths,
    *,
    measure_again: bool,
    model: str,
    quiet: bool,
    **settings: Any,
) -> tuple[GroupTimes, EngineConfig]:
    """Return the step times of a model's two groups of devices; see `step_times`."""
    settings = {**settings, "policy": "exegpt_waa_c"}
    with _opened(model, quiet, settings, warmup=False) as rt:
        lengths.check_fits(rt.config)
        if given is not None:
            return rt.load_group_times(given), rt.config
        found = None if measure_again else rt.find_group_times(_profiles())
        if found is not None:
            return found, rt.config
    with _opened(model, quiet, settings, warmup=True) as rt:
        return _kept(rt.measure_group_times()), rt.config


def _opened(model: str, quiet: bool, settings: dict[str, Any], *, warmup: bool) -> Runtime:
    return cast("Runtime", open_service(model, quiet=quiet, warmup=warmup, **settings))


def _kept(times: Times) -> Times:
    from jaxserve.planning.step_times import keep_times

    with cache_errors("keeping step times"):
        keep_times(_profiles(), times)
    return times


def _profiles() -> Path:
    return cache_folder() / "profiles"


def layer_deployment(
    given: Path | None,
    lengths: TaskLengths,
    *,
    measure_again: bool,
    model: str,
    quiet: bool,
    num_devices: int | None,
    dtype: str | None,
    kv_dtype: str | None,
    quantize: str | None,
    quantize_embeddings: str | None,
    max_slots: int | None,
    max_context: int | None,
) -> Deployment:
    """Return a model on this machine's devices (all by default), by measured layers.

    It reads no weights. The profile is read from the complete file `given`, or from the cache
    folder, and what it lacks is measured.
    """
    import jax

    from jaxserve.core.options import parse_dtype
    from jaxserve.execution.compilation import start_jax
    from jaxserve.execution.sizes import platform_defaults
    from jaxserve.planning.layers import (
        LayerBench,
        LayerOrigin,
        LayerProfile,
        LayerSizes,
        free_bytes_of,
        layers_deployment,
        measure_layers,
    )

    config = replace(
        _model_config(model, quiet), dtype=parse_dtype(dtype) or platform_defaults().dtype
    )
    lengths.check_context(config.max_position_embeddings)
    start_jax()
    devices = jax.devices()
    num = len(devices) if num_devices is None else num_devices
    if not 1 <= num <= len(devices):
        raise InvalidConfigError(
            f"--devices {num} is not allowed; this machine has {len(devices)}. XLA_FLAGS="
            "--xla_force_host_platform_device_count=8 makes eight host devices"
        )
    sizes = LayerSizes.of(config, max_length=max_context, kv_dtype=kv_dtype)
    given_sizes: dict[str, Any] = {
        "max_batch": max_slots,
        "quantize": quantize,
        "quantize_embeddings": quantize_embeddings,
    }
    sizes = replace(sizes, **{name: x for name, x in given_sizes.items() if x is not None})
    origin = LayerOrigin.of(config, devices, sizes)
    if given is not None:
        profile = LayerProfile.load(given, expected=origin)
    else:
        path = layers_path(model, origin)
        profile = LayerProfile(origin, path=path)
        if path.is_file() and not measure_again:
            try:
                profile = LayerProfile.load(path, expected=origin)
            except InvalidProfileError as error:
                typer.echo(f"measuring again: {error}", err=True)
        bench = LayerBench(config, sizes, devices)
        if not profile.is_complete:
            with cache_errors(f"keeping {path.name}"):
                measure_layers(bench, profile, progress=not quiet)
    mean = lengths.inputs.mean
    memory_bytes = free_bytes_of(devices[:num])
    return layers_deployment(profile, config, num, memory_bytes, num_input_tokens=mean)


def layers_path(model: str, origin: LayerOrigin) -> Path:
    """Return the file in the cache folder for measured layers of an origin."""
    digest = hashlib.sha256(json.dumps(asdict(origin), sort_keys=True).encode()).hexdigest()[:16]
    return _profiles() / f"layers-{Path(model).stem}-{digest}.json"


def _model_config(model: str, quiet: bool) -> DecoderConfig:
    """Return a model's configuration, without its weights."""
    from jaxserve.models import registry
    from jaxserve.models.families import config_from_hf

    registry.resolve(model).fetch(weights=False, progress=not quiet)
    return config_from_hf(registry.show(model)["config"])


def frontier_table(frontier: Frontier, chosen: Mapping[float, ScheduleOutcome]) -> Table:
    """Return a table with a row for each point of the frontier, and marks at the chosen ones.

    The control is N_D of RRA, B_m of WAA, and B of continuous batching; on two existing groups it
    is the iterations of a decode step, N_D. Stages are as in `stages_of`; only schedules of a
    cluster have them.
    """
    from rich import box
    from rich.table import Table

    [estimate] = {outcome.estimate for _, outcome in frontier.points}
    table = Table(
        title=f"best schedule for each latency bound ({estimate})",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("")
    table.add_column("bound", justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for name in ("B_E", "control", "B_D"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("answers/s", "tokens/s", "p99 answer", "1st token", "a token"):
        table.add_column(name, justify="right", no_wrap=True)
    has_stages = any(outcome.schedule.stages for _, outcome in frontier.points)
    if has_stages:
        table.add_column("stages", overflow="fold")
    marked = [outcome.schedule for outcome in chosen.values()]
    for bound_s, outcome in frontier.points:
        schedule, estimates = outcome.schedule, outcome.estimates
        is_marked = schedule in marked
        table.add_row(
            ">" if is_marked else "",
            seconds(bound_s),
            outcome.policy.label,
            _encode_batch(outcome),
            outcome.control_text,
            f"{schedule.decode_batch:.1f}",
            f"{estimates.throughput:.4g}",
            f"{outcome.tokens_per_s:.4g}",
            seconds(float(estimates.latency_s)),
            seconds(float(estimates.first_token_s)),
            seconds(float(estimates.token_s)),
            *([stages_of(schedule)] if has_stages else []),
            style="bold green" if is_marked else None,
        )
    return table


def neighbours_table(
    bounds: LatencyBounds, chosen: ScheduleOutcome, neighbours: Mapping[str, ScheduleOutcome]
) -> Table:
    """Return a table with the schedule chosen for the bounds, and one row for each neighbour."""
    from rich import box
    from rich.table import Table

    title = f"chosen for {_bounds_of(bounds)}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("schedule")
    for name in ("B_E", chosen.control_name, "answers/s", "", "p99 answer", "1st token", "a token"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, outcome in {"chosen": chosen, **neighbours}.items():
        estimates = outcome.estimates
        change = float(estimates.throughput / chosen.estimates.throughput - 1)
        table.add_row(
            name,
            _encode_batch(outcome),
            str(outcome.control),
            f"{estimates.throughput:.4g}",
            "" if name == "chosen" else f"{change:+.1%}",
            seconds(float(estimates.latency_s)),
            seconds(float(estimates.first_token_s)),
            seconds(float(estimates.token_s)),
            remark(bounds, outcome),
            style="bold green" if name == "chosen" else None,
        )
    return table


def remark(bounds: LatencyBounds, outcome: ScheduleOutcome) -> str:
    """Return why a schedule cannot be chosen for bounds, if it cannot."""
    if not outcome.estimates.fits:
        return "not possible: memory, slots or chunk"
    return "" if bounds.met(outcome.estimates) else "misses the bound"


def _encode_batch(outcome: ScheduleOutcome) -> str:
    return "" if outcome.policy.value == "continuous" else str(outcome.schedule.encode_batch)


def stages_of(schedule: Schedule) -> str:
    """Return the stages as `--stages` takes them; WAA's groups as `--groups` does."""
    encode = [s for s in schedule.stages if s.num_encode_layers and not s.num_decode_layers]
    decode = [s for s in schedule.stages if s.num_decode_layers]
    groups = [
        _counted([f"{s.num_encode_layers}x{s.num_devices}" for s in encode]),
        _counted([f"{s.num_decode_layers}x{s.num_devices}" for s in decode]),
    ]
    return "/".join(group for group in groups if group)


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    if value < 0.1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def summary(about: Mapping[str, Any]) -> str:
    return (
        f"{about['model']} on {about['devices']}; {about['lengths']}: prompts of "
        f"{about['mean_input_tokens']:.4g} tokens and answers of {about['mean_output_tokens']:.4g} "
        f"on average, 99th percentile {about['long_output_tokens']}"
    )


def _bounds_of(bounds: LatencyBounds) -> str:
    named = {
        "bound": bounds.latency_s,
        "1st token in": bounds.first_token_s,
        "a token in": bounds.token_s,
    }
    given = [f"{name} {seconds(bound_s)}" for name, bound_s in named.items() if bound_s != math.inf]
    return ", ".join(given) or "no bound"


def _counted(names: list[str]) -> str:
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    return ",".join(name if num == 1 else f"{num}*{name}" for name, num in runs)
