"""How a benchmark's result leaves it: one JSON object on stdout, and in a file if asked for."""

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
    """Of a benchmark that fills a `Record`: it has `--budget` and `--output` already."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument_group("result").add_argument
    add("--budget", type=float, default=None, help="seconds after which nothing is begun")
    add("--output", type=Path, default=None, help="also write the object here")
    return parser


def nothing_failed(result: dict[str, Any]) -> bool:
    """Of a `Record`'s result, and of those that keep no account of failures."""
    return not result.get("failed")


def command(
    run: Run,
    options: argparse.Namespace,
    *,
    show_result: Callable[[dict[str, Any]], None] | None = None,
    is_whole: Callable[[dict[str, Any]], bool] = nothing_failed,
) -> int:
    """What `main` of a benchmark does: run, show the result on stderr, and let it out.

    Returns:
      The exit code: 0, 1 for a result that is not `is_whole`, 2 after saying on stderr what was
      wrong with the options.
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


def show(table: Table) -> None:
    """Print a table on stderr, whole even where that is no terminal."""
    console = Console(stderr=True)
    console.width = max(console.width, 120)
    console.print(table)


def emit(result: dict[str, Any], path: Path | None) -> None:
    """Print the result on one line; write it to `path` for people to read, if there is one."""
    print(json.dumps(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
