"""`jaxserve plan`: the schedule with the most throughput under a latency bound, and others."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli import options as opt
from jaxserve.cli import plan_tables
from jaxserve.cli.plan_searches import on_cluster, on_engine, on_groups, on_layers
from jaxserve.cli.training import AsJson, show_wide
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from jaxserve.planning.schedules import TaskLengths
    from jaxserve.planning.schedules.frontier import ScheduleSearch

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
        from jaxserve.planning.schedules.configuration import check_num_bounds

        # What is not allowed is refused before anything is measured.
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
    """Refuse options of these names if they are given, since another one makes them idle."""
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
    """Search, and print and draw what was found."""
    from jaxserve.planning.schedules.frontier import frontier_of, neighbours_of

    chosen = {bound_s: schedules.best(replace(fixed, latency_s=bound_s)) for bound_s in asked}
    frontier = frontier_of(
        schedules, num_bounds=num_bounds, asked=asked, bounds=fixed, progress=not quiet
    )
    beside = {bound_s: neighbours_of(schedules, outcome) for bound_s, outcome in chosen.items()}
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
                                name: other.figures() for name, other in beside[bound_s].items()
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
    typer.echo(plan_tables.summary(about))
    show_wide(plan_tables.frontier_table(frontier, chosen))
    for bound_s, outcome in chosen.items():
        bounds = replace(fixed, latency_s=bound_s)
        show_wide(plan_tables.neighbours_table(bounds, outcome, beside[bound_s]))
    if picture is not None:
        typer.echo(f"drawn in {picture}")


def _lengths(task: str | None, path: Path | None) -> tuple[TaskLengths, str]:
    """Return the lengths that the options give, and what they are."""
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
