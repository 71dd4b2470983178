"""Options and checks that `jaxserve predictor` and `jaxserve predictor probe` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from rich.table import Table

# File beside a trained predictor or probe, with the settings of its training.
SETTINGS = "training.json"

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, not a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
HeldOut = Annotated[
    float,
    typer.Option("--held-out", help="Share of the data for calibration, and again for the test."),
]
NumBuckets = Annotated[int, typer.Option("--num-buckets", help="Number of buckets.")]
Epochs = Annotated[int, typer.Option("--epochs", help="Maximum number of epochs.")]
LearningRate = Annotated[float, typer.Option("--learning-rate", help="Highest learning rate.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of draw, split and training.")]


def check_output(output: Path, *, marker: str, kind: str) -> None:
    """Check before training that the output folder can be written to.

    Args:
      marker: a file that marks an earlier result, which may be replaced.
      kind: "predictor" or "probe", for the message.

    Raises:
      InvalidConfigError: it cannot be written to, or holds other files.
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
    """Check that no part of a split is empty.

    Args:
      parts: items for training, calibration and test.
      what: the name of the items, for the message.

    Raises:
      InvalidConfigError: a part is empty.
    """
    if not all(parts):
        raise InvalidConfigError(
            f"{sum(map(len, parts))} {what} leave {', '.join(str(len(p)) for p in parts)} for "
            "training, calibration and test; pass more, or another --held-out"
        )


def sizes(parts: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Return the sizes of the three parts, by name."""
    return dict(zip(("trained_on", "calibrated_on", "tested_on"), map(len, parts), strict=True))


def show_wide(table: Table) -> None:
    """Print a table at least 120 characters wide."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def describe(about: Mapping[str, Any]) -> None:
    """Print one line per item."""
    for key, value in about.items():
        typer.echo(f"{key:<26} {value}")
