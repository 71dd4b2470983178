"""Output of a benchmark: one JSON object on stdout and, with --output, in a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve.core.errors import JaxserveError

Run = Callable[[argparse.Namespace], dict[str, Any]]


def record_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that fills a `Record`, with `--budget` and `--output`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("result").add_argument
    add("--budget", type=float, default=None, help="seconds after which no measurement begins")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


def nothing_failed(result: dict[str, Any]) -> bool:
    """Return whether a result lists no failures; a result without such a list has none."""
    return not result.get("failed")


def command(
    run: Run,
    options: argparse.Namespace,
    *,
    show_result: Callable[[dict[str, Any]], None] | None = None,
    is_whole: Callable[[dict[str, Any]], bool] = nothing_failed,
) -> int:
    """Run a benchmark, print its result, and show it on stderr: the body of every `main`.

    Returns:
      The exit code: 0; 1 for a result that is not `is_whole`; 2 for invalid options, with the
      error on stderr.
    """
    try:
        result = run(options)
    except JaxserveError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    emit(result, options.output)
    if show_result is not None:
        show_result(result)
    return 0 if is_whole(result) else 1


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for the result; of files and folders their names without the path."""
    given = {name: value for name, value in vars(options).items() if name != "output"}
    if given.get("predictor"):
        given["predictor"] = Path(given["predictor"])
    return {name: v.name if isinstance(v, Path) else v for name, v in given.items()}


def show(table: Table) -> None:
    """Print a table on stderr, at least 120 columns wide even where stderr is not a terminal."""
    console = Console(stderr=True)
    console.width = max(console.width, 120)
    console.print(table)


def emit(result: dict[str, Any], path: Path | None) -> None:
    """Print the result on one line; write it indented to `path` if one is given."""
    print(json.dumps(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
