"""What the commands share that train, measure and describe predictors and probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from rich.table import Table

# Beside what was trained: on what, and how, so that others can repeat it.
SETTINGS = "training.json"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, not a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
HeldOut = Annotated[
    float,
    typer.Option("--held-out", help="Share kept for calibration, and as much for the test."),
]
NumBuckets = Annotated[int, typer.Option("--num-buckets", help="How many.")]
Epochs = Annotated[int, typer.Option("--epochs", help="At most; it stops early.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="The highest.")]
Seed = Annotated[int, typer.Option("--seed", help="Of draw, split and training.")]


def check_output(output: Path, *, marker: str, kind: str) -> None:
    """Refuse, before training, a folder that what is trained cannot be written to.

    Args:
      marker: a file that says a folder holds an earlier one, which may be replaced.
      kind: what is trained, for the message.
    """
    if output.exists() and not output.is_dir():
        raise InvalidConfigError(f"--output {output} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / marker).is_file():
        raise InvalidConfigError(
            f"--output {output} holds something that is no {kind}; name another folder"
        )


def cannot_write(error: OSError) -> InvalidConfigError:
    return InvalidConfigError(f"cannot write --output: {error}; name a folder that can be written")


def check_parts(parts: Sequence[Sequence[Any]], what: str) -> None:
    """Refuse a split that leaves nothing to train on, to calibrate by, or to test on."""
    if not all(parts):
        raise InvalidConfigError(
            f"{sum(map(len, parts))} {what} leave {', '.join(str(len(p)) for p in parts)} for "
            "training, calibration and test; give more, or another --held-out"
        )


def sizes(parts: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Of the three parts, by what each is for."""
    return dict(zip(("trained_on", "calibrated_on", "tested_on"), map(len, parts), strict=True))


def show_wide(table: Table) -> None:
    """Print a table with room for its columns, however narrow the terminal says it is."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def describe(about: Mapping[str, Any]) -> None:
    """A line a fact."""
    for key, value in about.items():
        typer.echo(f"{key:<26} {value}")
