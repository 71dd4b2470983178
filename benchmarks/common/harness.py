"""The frame of every benchmark: options, the JSON object, tables, and results that grow."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Table

from jaxserve.core.errors import InvalidConfigError, JaxserveError

Run = Callable[[argparse.Namespace], dict[str, Any]]


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


@final
@dataclass(frozen=True)
class Benchmark:
    """A command: `python -m MODULE`.

    Attributes:
      about: the docstring of its module, which names it: "What it is: `python -m MODULE`. ...".
      run: measures, and returns the result, which is printed as one JSON object.
      add_options: adds its options. Every benchmark has `--output`.
      show: prints a table of the result on stderr; None for none.
      is_whole: whether the exit code of a result is 0.
      has_budget: whether it fills a `Record`, and so has `--budget`.
    """

    about: str | None
    run: Run
    add_options: Callable[[argparse.ArgumentParser], None]
    show: Callable[[dict[str, Any]], None] | None = None
    is_whole: Callable[[dict[str, Any]], bool] = nothing_failed
    has_budget: bool = False

    def parser(self) -> argparse.ArgumentParser:
        summary, _, rest = (self.about or "").partition(": `")
        command, _, details = rest.partition("`")
        parser = argparse.ArgumentParser(
            prog=" ".join(command.split()[:3]),
            description=f"{summary}{details}",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add = parser.add_argument_group("result").add_argument
        if self.has_budget:
            text = "seconds after which no measurement begins"
            add("--budget", type=float, default=None, help=text)
        add("--output", type=Path, default=None, help="also write the object here")
        self.add_options(parser)
        return parser

    def main(self, arguments: list[str] | None = None) -> int:
        """Run, print and write the result; return the exit code, see `command`."""
        options = self.parser().parse_args(arguments)
        return command(self.run, options, show_result=self.show, is_whole=self.is_whole)


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for the result; files and folders without their paths."""
    given = {name: value for name, value in vars(options).items() if name != "output"}
    if given.get("predictor"):
        given["predictor"] = Path(given["predictor"])
    return {name: v.name if isinstance(v, Path) else v for name, v in given.items()}


def whole_numbers(text: str, option: str) -> list[int]:
    """Return an option's numbers, whole and above 0, separated by commas.

    Raises:
      InvalidConfigError: the text has anything else.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise InvalidConfigError(f"{option} {text!r}: pass whole numbers above 0, such as 1,32")
    return found


def numbers(text: str, option: str) -> list[float]:
    """Return an option's finite numbers above 0, separated by commas.

    Raises:
      InvalidConfigError: the text has anything else.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < float("inf") for each in found):
        raise InvalidConfigError(f"{option} {text!r}: pass numbers above 0, such as 0.5,1,2")
    return found


def show(table: Table) -> None:
    """Print a table on stderr, at least 120 columns wide even where stderr is not a terminal."""
    console = Console(stderr=True)
    console.width = max(console.width, 120)
    console.print(table)


def print_table(
    rows: Iterable[Mapping[str, Any]],
    *columns: tuple[str, str | Callable[[Any], str]],
    title: str | None = None,
) -> None:
    """Print a row for each mapping on stderr.

    Args:
      columns: headings, and the cells under them: a text with fields of the row, such as
        "{latency_s[p50]:.1f}", or a function of the row.
    """
    table = Table(*(name for name, _ in columns), title=title, box=None, header_style="bold")
    for row in rows:
        cells = (
            cell.format_map(row) if isinstance(cell, str) else cell(row) for _, cell in columns
        )
        table.add_row(*cells)
    show(table)


def emit(result: dict[str, Any], path: Path | None) -> None:
    """Print the result on one line; write it indented to `path` if one is given."""
    print(json.dumps(result))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


# Characters of an error's text; compilers print pages.
_MAX_REASON = 600


@final
class Record:
    """Figures by kind; the file is written after each, so that an early end loses none.

    Args:
      path: of the file; None to write no file.
      budget_s: seconds from now after which no measurement begins; None for no limit.
      about: the first entries of the result.

    Attributes:
      result: the result so far. `failed` has reasons by name; `skipped` names the measurements for
        which no budget was left.
    """

    def __init__(self, path: Path | None, budget_s: float | None, **about: Any):
        self.result: dict[str, Any] = {**about, "failed": {}, "skipped": []}
        self._path = path
        self._end_s = None if budget_s is None else time.monotonic() + budget_s

    @property
    def is_spent(self) -> bool:
        return self._end_s is not None and time.monotonic() >= self._end_s

    def add(self, kind: str, name: str, measure: Callable[[], Any]) -> Any | None:
        """Append what `measure` returns to the list of a kind, if the budget allows.

        An error is recorded and does not end the run.

        Returns:
          The figures; None if the measurement failed or was skipped.
        """
        if self.is_spent:
            self.skip(name)
            return None
        try:
            figures = measure()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.fail(name, error)
            return None
        self.result.setdefault(kind, []).append(figures)
        self.save()
        return figures

    def skip(self, name: str) -> None:
        """Record a measurement that the budget did not allow."""
        self.result["skipped"].append(name)
        self.save()

    def fail(self, name: str, error: Exception) -> None:
        """Record why a measurement has no figures."""
        self.result["failed"][name] = reason(error)
        self.save()

    def save(self) -> None:
        """Write the file; a reader finds a complete file at any time."""
        if self._path is not None:
            write_whole(self._path, self.result)


def reason(error: Exception) -> str:
    """Return an error as one line of at most `_MAX_REASON` characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


def write_whole(path: Path, result: dict[str, Any]) -> None:
    """Write indented JSON; a reader finds either the old file or the new one, complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
