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
from typing import Any, TypeVar, final

from benchmarks.common import environment
from jaxserve.core.errors import InvalidConfigError, JaxserveError

T = TypeVar("T")
Run = Callable[[argparse.Namespace], dict[str, Any]]
# A flag or the name of an argument, and what `ArgumentParser.add_argument` gets with it.
Option = tuple[str, dict[str, Any]]


def option(
    flag: str, default: Any, text: str, parse: Callable[[str], Any] | None = None, **more: Any
) -> Option:
    """Return one option of a command.

    Args:
      flag: "--name"; a name without dashes is an argument that may be left out.
      default: False for a switch. A number is parsed as its type.
      text: the help.
      parse: makes the value from a text.
      more: further arguments of `ArgumentParser.add_argument`.
    """
    if default is False:
        return flag, {"action": "store_true", "help": text, **more}
    if parse is None and isinstance(default, int | float):
        parse = type(default)
    if not flag.startswith("-"):
        more.setdefault("nargs", "?")
    return flag, {"default": default, "help": text, "type": parse, **more}


# Parts of a `summary` that are figures of single runs.
_OF_RUNS = ("runs", "range")


def nothing_failed(result: Any) -> bool:
    """Return whether no part of a result lists failures (`failed`, `num_failed`, an `error`).

    Single runs are not searched: their medians are.
    """
    if isinstance(result, list):
        return all(map(nothing_failed, result))
    if not isinstance(result, dict):
        return True
    if result.get("failed") or result.get("num_failed") or isinstance(result.get("error"), str):
        return False
    return all(nothing_failed(value) for name, value in result.items() if name not in _OF_RUNS)


_OUTPUT = option("--output", None, "also write the object here", Path)
_BUDGET = option("--budget", None, "seconds after which no measurement begins", float)


@final
@dataclass(frozen=True)
class Benchmark:
    """A command: `python -m MODULE`; a call runs it.

    Attributes:
      about: the docstring of its module, which names it: "What it is: `python -m MODULE`. ...".
      run: measures, and returns the figures. The result, which is printed as one JSON object, also
        has the kind, the arguments, and the facts of `environment.describe`.
      options: those of the command. Every benchmark also has `--output`.
      kind: the `benchmark` of the result, by which `benchmarks.figures` chooses its table.
      is_whole: whether the exit code of a result is 0.
      has_budget: whether it fills a `Record`, which is the whole result, and so has `--budget`.
    """

    about: str | None
    run: Run
    options: Iterable[Option]
    kind: str
    is_whole: Callable[[dict[str, Any]], bool] = nothing_failed
    has_budget: bool = False

    def parser(self) -> argparse.ArgumentParser:
        summary, _, rest = (self.about or "").partition(": `")
        command, _, details = rest.partition("`")
        parser = argparse.ArgumentParser(
            prog=" ".join(command.split()[:3]),
            description=f"{summary}{details} One JSON object on stdout, progress and tables on "
            "stderr; docs/benchmarks.md says where each figure is described.",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        always = (_BUDGET, _OUTPUT) if self.has_budget else (_OUTPUT,)
        for flag, settings in (*always, *self.options):
            parser.add_argument(flag, **settings)
        return parser

    def __call__(self, arguments: list[str] | None = None) -> int:
        """Run, print and write the result.

        Returns:
          The exit code: 0; 1 for a result that is not `is_whole`; 2 for invalid options, with the
          error on stderr.
        """
        options = self.parser().parse_args(arguments)
        try:
            if (repeats := getattr(options, "repeats", 1)) < 1:
                raise InvalidConfigError(f"--repeats is {repeats}; it must be at least 1")
            result = self.run(options)
        except JaxserveError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
        if not self.has_budget:
            result = whole_result(self.kind, options, result)
        print(json.dumps(result))
        if options.output is not None:
            write_whole(options.output, result)
        from benchmarks.figures.tables import show_result

        show_result(result)
        return 0 if self.is_whole(result) else 1


def whole_result(
    kind: str, options: argparse.Namespace, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Return figures with their kind, the arguments, and where and of what they were measured.

    Facts that the figures have themselves are kept.
    """
    about: dict[str, Any] = {"benchmark": kind, "arguments": arguments_of(options)}
    if hasattr(options, "repeats"):
        about["repeats"] = options.repeats
    facts = {} if "device" in figures else environment.describe()
    return {**about, **figures, **facts}


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options for the result; files and folders without their paths."""
    given = {name: value for name, value in vars(options).items() if name != "output"}
    if given.get("predictor"):
        given["predictor"] = Path(given["predictor"])
    return {name: without_folder(value) for name, value in given.items()}


def without_folder(value: Any) -> Any:
    """Return the name of a file or folder, also of "kind:/folder/file"; other values unchanged."""
    if isinstance(value, Path):
        return value.name
    kind, colon, file = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{kind}{colon}{Path(file).name}" if file.startswith(("/", "~", ".")) else value


N = TypeVar("N", int, float)


def numbers(text: str, option: str, kind: type[N] = float) -> list[N]:
    """Return an option's finite numbers above 0, separated by commas.

    Raises:
      InvalidConfigError: the text has anything else.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < float("inf") for each in found):
        what = "whole numbers above 0, as 1,32" if kind is int else "numbers above 0, as 0.5,1,2"
        raise InvalidConfigError(f"{option} {text!r}: pass {what}")
    return found


def whole_numbers(text: str, option: str) -> list[int]:
    """Return the same if all of them are whole."""
    return numbers(text, option, int)


def sizes_of(text: str, option: str, example: str) -> list[int]:
    """Return an option's whole numbers, joined by "x" and as many as the example has.

    Raises:
      InvalidConfigError: the text has anything else.
    """
    parts = text.split("x")
    if len(parts) != example.count("x") + 1 or not all(map(str.isdecimal, parts)):
        raise InvalidConfigError(f"{option} {text!r}: pass whole numbers, as {example}")
    return [int(part) for part in parts]


def some_of(text: str, option: str, known: Iterable[str]) -> list[str]:
    """Return an option's names, separated by commas.

    Raises:
      InvalidConfigError: a name is not known.
    """
    names, known = text.split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        raise InvalidConfigError(
            f"{option} {text!r}: {unknown} are unknown; pass some of {','.join(known)}"
        )
    return names


def of_options(kind: type[T], options: argparse.Namespace, **given: Any) -> T:
    """Return a dataclass whose fields are the options of their names, except those given."""
    names = vars(kind)["__dataclass_fields__"].keys() & vars(options).keys()
    return kind(**{name: getattr(options, name) for name in names} | given)


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

    @classmethod
    def of(cls, kind: str, options: argparse.Namespace, /, **about: Any) -> Record:
        """Return the record of a benchmark's run, which begins as `whole_result` does."""
        return cls(options.output, options.budget, **whole_result(kind, options, about))

    def allows(self, name: str) -> bool:
        """Return whether the budget allows a measurement to begin; if not, it is skipped."""
        if self._end_s is None or time.monotonic() < self._end_s:
            return True
        self.result["skipped"].append(name)
        self.save()
        return False

    def add(self, kind: str, name: str, measure: Callable[[], Any]) -> Any | None:
        """Append what `measure` returns to the list of a kind, if the budget allows.

        An error is recorded and does not end the run.

        Returns:
          The figures; None if the measurement failed or was skipped.
        """
        if not self.allows(name):
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
