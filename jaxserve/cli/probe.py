"""`jaxserve predictor probe`, which trains and describes probes of remaining lengths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, final

import typer

from jaxserve.cli import options as opt
from jaxserve.cli.predictor import (
    SETTINGS,
    Epochs,
    HeldOut,
    LearningRate,
    NumBuckets,
    Seed,
    cannot_write,
    check_output,
    check_parts,
    describe,
    predictor_app,
    sizes,
)

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.models.store import LoadedModel
    from jaxserve.predictor import LengthProbe, Readings, TrainingHistory
    from jaxserve.workload.answers import FinishedAnswer

probe_app = typer.Typer(
    help="Train and describe probes, which read remaining lengths off the model's activations.",
    no_args_is_help=True,
)
predictor_app.add_typer(probe_app, name="probe")

# Numbers of generated tokens for which figures are shown. Readings are at whole intervals.
ELAPSED = (0, 16, 32, 64, 128, 256, 512)


@final
@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """Settings of a probe's training, which are options, and stored with it."""

    data: Annotated[
        str,
        typer.Argument(
            help="Answers with their tokens: a file written by --record, or JSON lines like "
            '{"prompt_token_ids": [5, 6], "token_ids": [7, 8, 2], "conversation": "id"}.'
        ),
    ]
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model that generated the answers.")
    ] = opt.DEFAULT_MODEL
    load: opt.Load = "auto"
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer", help="Number of layers before the activations it reads. [default: half]"
        ),
    ] = None
    interval: Annotated[
        int, typer.Option("--interval", help="Number of tokens between readings.")
    ] = 16
    hidden_size: Annotated[
        int, typer.Option("--hidden-size", help="Units of the head; 0 for a linear one.")
    ] = 256
    max_length: Annotated[
        int, typer.Option("--max-length", help="Remaining length that longer ones count as.")
    ] = 1024
    buckets: Annotated[
        str, typer.Option("--buckets", help="Kind of buckets: log, equal or quantile.")
    ] = "log"
    num_buckets: NumBuckets = 12
    max_answers: Annotated[
        int | None, typer.Option("--max-answers", help="Use the first N answers. [default: all]")
    ] = None
    held_out: HeldOut = 0.15
    epochs: Epochs = 30
    batch_size: Annotated[int, typer.Option("--batch-size", help="Readings per step.")] = 256
    learning_rate: LearningRate = 1e-3
    seed: Seed = 0


@final
@dataclass(frozen=True, kw_only=True)
class TrainedProbe:
    """A trained probe; `answers` and `readings` have parts for training, calibration and test."""

    loaded: LoadedModel
    probe: LengthProbe
    history: TrainingHistory
    answers: Sequence[Sequence[FinishedAnswer]]
    readings: Sequence[Readings]


def train_probe_on(settings: ProbeSettings, *, progress: bool) -> TrainedProbe:
    """Read the activations along the answers, and train a probe on them."""
    from flax import nnx

    from jaxserve.execution.compilation import start_jax
    from jaxserve.execution.sizes import platform_defaults
    from jaxserve.models.activations import read_along
    from jaxserve.models.store import load_model
    from jaxserve.predictor import LengthBuckets, ProbeConfig, TrainingConfig, train_probe

    answers = _split_answers(settings)
    start_jax()
    loaded = load_model(
        settings.model,
        dtype=platform_defaults().dtype,
        load=cast(Any, settings.load),
        progress=progress,
    )
    model: Any = nnx.merge(loaded.graphdef, loaded.params)
    layer = settings.layer or max(1, loaded.config.num_layers // 2)
    readings = [
        read_along(model, part, layer=layer, interval=settings.interval, progress=progress)
        for part in answers
    ]
    learned, held_out, _ = readings
    with opt.refusals():
        probe, history = train_probe(
            ProbeConfig(
                layer=layer, width=loaded.config.hidden_size, hidden_size=settings.hidden_size
            ),
            LengthBuckets.of(
                settings.buckets,
                learned.remaining.tolist(),
                settings.max_length,
                settings.num_buckets,
            ),
            learned,
            held_out,
            TrainingConfig(
                batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
                num_epochs=settings.epochs,
                patience=4,
                seed=settings.seed,
            ),
            interval=settings.interval,
            progress=progress,
        )
    return TrainedProbe(
        loaded=loaded, probe=probe, history=history, answers=answers, readings=readings
    )


def _split_answers(settings: ProbeSettings) -> list[list[FinishedAnswer]]:
    from jaxserve.predictor.data import split_in_three
    from jaxserve.workload.answers import read_finished

    answers = read_finished(settings.data)[: settings.max_answers]
    with opt.refusals():
        parts = split_in_three(answers, held_out=settings.held_out, seed=settings.seed)
    check_parts(parts, "answers")
    return list(parts)


@probe_app.command("train")
@opt.flat()
def train(
    *,
    settings: ProbeSettings,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the probe.")],
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Train a probe on answers of the model that it will read, and test it on other answers.

    All answers of a conversation are in one part of the split; answers without a conversation are
    grouped by their prompts.
    """
    with opt.exit_codes(ends_at_once=True):
        _prepare(output)
        from jaxserve.predictor.probe_training import compare_remaining

        done = train_probe_on(settings, progress=not quiet)
        done.probe.save(output)
        (output / SETTINGS).write_text(json.dumps(asdict(settings)) + "\n", encoding="utf-8")
        figures = [vars(f) for f in compare_remaining(done.probe, done.readings[2], ELAPSED)]
        if as_json:
            refinement = done.probe.refinement
            typer.echo(
                json.dumps(
                    {
                        **sizes(done.answers),
                        "figures": figures,
                        "belief_weight": refinement.belief_weight,
                        "reading_weight": refinement.reading_weight,
                        "history": asdict(done.history),
                    }
                )
            )
            return
        opt.show_wide(table_of(figures))
        typer.echo(f"tested on {len(done.answers[2])} answers that were not used for training")


@probe_app.command("show")
def show(folder: Annotated[Path, typer.Argument(help="A trained probe.")]) -> None:
    """Describe a probe: the layer that it reads, its buckets, and the weights of its readings."""
    with opt.exit_codes(), opt.refusals():
        from jaxserve.predictor import LengthProbe

        probe = LengthProbe.load(folder)
        refinement = probe.refinement
        about: dict[str, Any] = {
            "reads": f"after layer {probe.layer}, {probe.width} wide",
            "parameters": sum(value.size for value in probe.params.values()),
            "buckets up to": ", ".join(map(str, probe.buckets.edges[1:])),
            "tokens between readings": refinement.interval,
            "temperature": f"{refinement.temperature:.3f}",
            "weight of estimates": refinement.belief_weight,
            "weight of readings": refinement.reading_weight,
        }
        if (folder / SETTINGS).is_file():
            kept = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            about |= {f"trained: {key}": value for key, value in kept.items()}
        describe(about)


def table_of(figures: Sequence[dict[str, Any]]) -> Table:
    """Return a table of errors in tokens and shares of right buckets, one row per predictor."""
    from rich.table import Table

    at = list(dict.fromkeys(each["elapsed"] for each in figures))
    table = Table(
        "error in tokens (right bucket) after",
        *("all" if elapsed is None else f"{elapsed}" for elapsed in at),
        box=None,
        header_style="bold",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(each["name"] for each in figures):
        own = {each["elapsed"]: each for each in figures if each["name"] == name}
        table.add_row(
            name, *(f"{own[e]['error_tokens']:.1f} ({own[e]['accuracy']:.0%})" for e in at)
        )
    return table


def _prepare(output: Path) -> None:
    """Create the output folder; raise InvalidConfigError if it cannot be used."""
    check_output(output, marker="probe.json", kind="probe")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(error) from error
