"""`jaxserve predictor`, which trains, measures and describes predictors of output lengths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, final

import typer

from jaxserve.cli import options as opt
from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from jaxserve.predictor import Contender, Example, LengthPredictor


# File in the folder of a trained predictor or probe, with the settings of its training.
SETTINGS = "training.json"

HeldOut = Annotated[
    float,
    typer.Option("--held-out", help="Share of the data for calibration, and again for the test."),
]
NumBuckets = Annotated[int, typer.Option("--num-buckets", help="Number of buckets.")]
Epochs = Annotated[int, typer.Option("--epochs", help="Maximum number of epochs.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="Highest learning rate.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of draw, split and training.")]

predictor_app = typer.Typer(
    help="Train, measure and describe predictors of output lengths.", no_args_is_help=True
)

_SHOWN_MISS_RATES = (0.05, 0.1, 0.2)

Data = Annotated[
    str,
    typer.Argument(
        help="sharegpt; recorded:FILE with a file written by --record; or a file of JSON lines "
        'like {"prompt": "...", "output_length": 12, "conversation": "id"}.'
    ),
]
ServedModel = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="Model whose tokens are counted; not needed for JSON lines."
    ),
]
MaxExamples = Annotated[
    int | None, typer.Option("--max-examples", help="Number of examples to draw. [default: all]")
]


def check_output(output: Path, *, marker: str, kind: str) -> None:
    """Check before training that the output folder can be written to.

    It may replace an earlier result, which has the file `marker`; `kind` is "predictor" or "probe".
    """
    if output.exists() and not output.is_dir():
        raise InvalidConfigError(f"--output {output} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / marker).is_file():
        raise InvalidConfigError(
            f"--output {output} is not empty and holds no {kind}; name another folder"
        )


def cannot_write(error: OSError) -> InvalidConfigError:
    return InvalidConfigError(f"cannot write --output: {error}; name a folder that can be written")


def check_parts(parts: Sequence[Sequence[Any]], what: str) -> None:
    """Check that no part of a split is empty; `what` names its items in the message."""
    if not all(parts):
        raise InvalidConfigError(
            f"{sum(map(len, parts))} {what} leave {', '.join(str(len(p)) for p in parts)} for "
            "training, calibration and test; pass more, or another --held-out"
        )


def sizes(parts: Sequence[Sequence[Any]]) -> dict[str, int]:
    return dict(zip(("trained_on", "calibrated_on", "tested_on"), map(len, parts), strict=True))


def describe(about: Mapping[str, Any]) -> None:
    for key, value in about.items():
        typer.echo(f"{key:<26} {value}")


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a predictor's training, stored with it."""

    data: Data
    encoder: Annotated[
        str,
        typer.Option(
            "--encoder",
            help="minilm (22 million parameters), a Hugging Face folder of a BERT or DistilBERT "
            "model, or 22m, 66m, 110m, 340m to train from scratch.",
        ),
    ] = "minilm"
    max_length: Annotated[
        int, typer.Option("--max-length", help="Length that longer answers count as.")
    ] = 1024
    max_prompt_tokens: Annotated[
        int, typer.Option("--max-prompt-tokens", help="Longer prompts lose their middle.")
    ] = 256
    buckets: Annotated[
        str, typer.Option("--buckets", help="Kind of buckets: equal, log or quantile.")
    ] = "equal"
    num_buckets: NumBuckets = 10
    epochs: Epochs = 4
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts per step.")] = 32
    learning_rate: LearningRate = 5e-5
    max_examples: MaxExamples = None
    held_out: HeldOut = 0.1
    seed: Seed = 0
    model: ServedModel = opt.DEFAULT_MODEL

    def read(self, progress: bool) -> list[list[Example]]:
        """Return the examples for training, calibration and test."""
        from jaxserve.models.tokenizer import Tokenizer
        from jaxserve.predictor.data import clipped, split_in_three
        from jaxserve.workload.answers import read_examples

        examples = read_examples(
            self.data,
            tokenizer=partial(Tokenizer.of_model, self.model, progress=progress),
            max_examples=self.max_examples,
            seed=self.seed,
            progress=progress,
        )
        parts = split_in_three(examples, held_out=self.held_out, seed=self.seed)
        check_parts(parts, "examples")
        return [clipped(part, self.max_length) for part in parts]

    def start(self, parts: list[list[Example]], progress: bool) -> LengthPredictor:
        """Return the untrained predictor, and turn the persistent compilation cache on."""
        from jaxserve.execution.compilation import start_jax
        from jaxserve.models.registry import untrained_predictor
        from jaxserve.predictor import LengthBuckets

        start_jax()
        lengths = [example.output_length for example in parts[0]]
        return untrained_predictor(
            self.encoder,
            LengthBuckets.of(self.buckets, lengths, self.max_length, self.num_buckets),
            max_tokens=self.max_prompt_tokens,
            seed=self.seed,
            progress=progress,
        )

    def save(self, predictor: LengthPredictor, folder: Path) -> None:
        predictor.save(folder)
        (folder / SETTINGS).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


@predictor_app.command("train")
@opt.flat()
def train(
    *,
    settings: Settings,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the predictor.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue after the last epoch of an interrupted run.")
    ] = False,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Train a predictor, calibrate it, and compare it with baselines on a test set.

    All prompts of a conversation are in one part of the split. The state after every epoch is kept
    in OUTPUT.checkpoints until training is done.
    """
    with opt.exit_codes(ends_at_once=True), opt.refusals():
        from jaxserve.predictor import TrainingConfig
        from jaxserve.predictor import train as train_predictor
        from jaxserve.predictor.data import columns
        from jaxserve.predictor.evaluation import compare

        config = TrainingConfig(
            num_epochs=settings.epochs,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            seed=settings.seed,
        )
        checkpoints = _prepare(output, settings, resume)
        parts = settings.read(not quiet)
        learned, kept, test = parts
        predictor = settings.start(parts, not quiet)
        features = partial(predictor.embeddings, params=predictor.params)
        history = train_predictor(
            predictor, learned, kept, config, checkpoints=checkpoints / "epochs", progress=not quiet
        )
        predictor.calibrate(*columns(kept))
        settings.save(predictor, output)
        shutil.rmtree(checkpoints)
        done = compare(predictor.buckets, predictor.logits, features, learned, kept, test)
        _print(done, parts, as_json, history=asdict(history) | {"best_epoch": history.best_epoch})


@predictor_app.command("evaluate")
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A trained predictor.")],
    data: Annotated[
        str | None,
        typer.Argument(
            help="As for `train`. [default: the data of its training]", show_default=False
        ),
    ] = None,
    max_examples: MaxExamples = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder", help="Encoder of the linear baseline. [default: that of its training]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model whose tokens are counted.")
    ] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare a predictor with baselines, on conversations that it was not trained on.

    The split is that of its training. The predictor keeps its calibration; the baselines are
    trained and calibrated on the data given.
    """
    with opt.exit_codes(), opt.refusals():
        from dataclasses import replace

        from jaxserve.predictor import LengthPredictor
        from jaxserve.predictor.evaluation import compare

        settings = _settings_of(folder)
        if data is not None:
            settings = replace(settings, data=data, max_examples=None)
        given: dict[str, Any] = {"max_examples": max_examples, "encoder": encoder, "model": model}
        settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
        predictor = LengthPredictor.load(folder)
        parts = settings.read(not quiet)
        done = compare(
            predictor.buckets,
            predictor.logits,
            settings.start(parts, not quiet).embeddings,
            *parts,
            calibration=predictor.calibration,
        )
        _print(done, parts, as_json)


@predictor_app.command("show")
def show(folder: Annotated[Path, typer.Argument(help="A trained predictor.")]) -> None:
    """Describe a predictor: encoder, buckets, calibration and its levels."""
    with opt.exit_codes(), opt.refusals():
        import jax

        from jaxserve.predictor import LengthPredictor

        predictor = LengthPredictor.load(folder)
        num = sum(leaf.size for leaf in jax.tree.leaves(predictor.params))
        config, calibration = predictor.config, predictor.calibration
        about: dict[str, Any] = {
            "parameters": f"{num / 1e6:.1f} million",
            "encoder": f"{config.num_layers} layers of {config.hidden_size}",
            "prompt tokens": predictor.encoder.max_tokens,
            "buckets up to": ", ".join(map(str, predictor.buckets.edges[1:])),
            "calibrated": "no" if calibration is None else f"on {len(calibration.levels)} requests",
        }
        if calibration is not None:
            about["temperature"] = f"{calibration.temperature:.3f}"
            for rate in _SHOWN_MISS_RATES:
                about[f"level for {rate:.0%}"] = f"{calibration.level(rate):.4f}"
        if (folder / SETTINGS).is_file():
            about |= {f"trained: {k}": v for k, v in asdict(_settings_of(folder)).items()}
        describe(about)


def table_of(contenders: list[dict[str, Any]]) -> Table:
    """Return a table of the figures of `Contender.to_dict`, with one row per contender."""
    from rich.table import Table

    table = Table(
        "",
        "accuracy",
        "wrong by",
        "error",
        "too short",
        *(f"for {float(rate):.0%}" for rate in contenders[0]["promises"]),
        caption="error: tokens; for 10%: share of answers that outgrew reservations meant for 10%, "
        "and mean length of the reservations",
        caption_justify="left",
        box=None,
        header_style="bold",
    )
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for one in contenders:
        table.add_row(
            one["name"],
            f"{one['accuracy']:.1%}",
            f"{one['wrong_by']:.2f}",
            f"{one['error_tokens']:.1f}",
            f"{one['under_prediction']:.1%}",
            *(f"{p['missed']:.1%} ({p['reserved_tokens']:.0f})" for p in one["promises"].values()),
        )
    return table


def _print(
    done: list[Contender], parts: list[list[Example]], as_json: bool, **more: object
) -> None:
    num = sizes(parts)
    contenders = [one.to_dict() for one in done]
    if as_json:
        typer.echo(json.dumps({**num, "contenders": contenders, **more}))
        return
    opt.show_wide(table_of(contenders))
    typer.echo(f"tested on {num['tested_on']} prompts that were not used for training")


def _prepare(output: Path, settings: Settings, resume: bool) -> Path:
    """Check the output folder, and return the folder for checkpoints."""
    check_output(output, marker="predictor.json", kind="predictor")
    checkpoints = output.with_name(output.name + ".checkpoints")
    kept = checkpoints / SETTINGS
    if checkpoints.exists() and not kept.is_file():
        raise InvalidConfigError(
            f"{checkpoints} holds files other than checkpoints; pass another --output"
        )
    if not resume:
        shutil.rmtree(checkpoints, ignore_errors=True)
    elif kept.is_file() and json.loads(kept.read_text(encoding="utf-8")) != asdict(settings):
        raise InvalidConfigError(
            f"{checkpoints} is of a run with other options; pass the same ones, or omit --resume"
        )
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(settings)) + "\n", encoding="utf-8")
    except OSError as error:
        raise cannot_write(error) from error
    return checkpoints


def _settings_of(folder: Path) -> Settings:
    if not (folder / SETTINGS).is_file():
        raise InvalidConfigError(
            f"{folder} holds no {SETTINGS}; pass a folder made by `jaxserve predictor train`"
        )
    return Settings(**json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
