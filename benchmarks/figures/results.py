"""Result files, read with errors that name the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from benchmarks.common.repeats import Spread
from jaxserve.core.errors import InvalidConfigError

# Names and positions of a value in a result.
Keys = Sequence[str | int]


class ResultFileError(InvalidConfigError):
    """A result file that cannot be read, or lacks a field of its kind."""


@final
@dataclass(frozen=True)
class Result:
    """The JSON object of one benchmark, its file, and a digest of both."""

    path: Path
    data: dict[str, Any]
    digest: str

    @property
    def kind(self) -> str:
        return self.data["benchmark"]

    def get(self, *keys: str | int) -> Any:
        """Return the value under nested keys.

        Raises:
          ResultFileError: there is no such value.
        """
        found: Any = self.data
        for depth, key in enumerate(keys):
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                missing = ".".join(map(str, keys[: depth + 1]))
                raise ResultFileError(
                    f"{self.path}: a result of kind {self.kind!r} has {missing!r}, and this one "
                    "does not; run the benchmark again, or remove the file"
                ) from None
        return found

    def number(self, *keys: str | int) -> float:
        """Return the number under the keys.

        Raises:
          ResultFileError: there is none.
        """
        found = self.get(*keys)
        if isinstance(found, bool) or not isinstance(found, int | float):
            name = ".".join(map(str, keys))
            raise ResultFileError(f"{self.path}: {name!r} is {found!r}, and should be a number")
        return float(found)

    def optional(self, *keys: str | int) -> float | None:
        """Return the number under the keys; None if it was not measured."""
        try:
            return self.number(*keys)
        except ResultFileError:
            return None

    @property
    def repeats(self) -> int:
        """Whole runs that each figure comes from.

        Raises:
          ResultFileError: the file does not say so.
        """
        return int(self.number("repeats"))

    def spread(self, at: Keys, *keys: str | int) -> Spread:
        """Return median and range of a figure over the whole runs of the object `at`.

        Raises:
          ResultFileError: the object has no runs and the file is not one of a single run, or a run
            lacks the figure.
        """
        if "runs" in self.get(*at):
            runs = [(*at, "runs", i) for i, _ in self.items(*at, "runs")]
            return Spread.of([self.number(*run, *keys) for run in runs])
        if self.repeats > 1:
            where = ".".join(map(str, at)) or "the file"
            raise ResultFileError(
                f"{self.path}: {where} has no runs, of which there were {self.repeats}; a table "
                "shows medians of whole runs: run the benchmark again"
            )
        return Spread.of([self.number(*at, *keys)])

    def optional_spread(self, at: Keys, *keys: str | int) -> Spread | None:
        """Return the spread; None if the figure was not measured."""
        first = (*at, "runs", 0) if "runs" in self.get(*at) else at
        return None if self.optional(*first, *keys) is None else self.spread(at, *keys)

    @property
    def has_peers(self) -> bool:
        """Whether other engines ran in addition to ours."""
        return bool(self.data.get("compare"))

    def items(self, *keys: str | int) -> list[tuple[Any, Any]]:
        """Return names and values of an object, or positions and values of a list.

        Raises:
          ResultFileError: the value under the keys is neither.
        """
        found = self.get(*keys)
        if isinstance(found, dict):
            return list(found.items())
        if isinstance(found, list):
            return list(enumerate(found))
        name = ".".join(map(str, keys))
        raise ResultFileError(f"{self.path}: {name!r} is {found!r}, and should hold several")


def bound_name(result: Result) -> str:
    """Return the name of an offline result's bound; earlier results timed the products alone."""
    return "roofline" if "run_s" in result.get("bound") else "matrix products alone"


def is_quantised(result: Result) -> bool:
    """Return whether an offline result has weights in few bits."""
    return result.data.get("quantize") is not None


def by_policy(result: Result, part: str) -> dict[str, list[int]]:
    """Return the positions of each policy's points in one part of a result."""
    positions: dict[str, list[int]] = {}
    for i, _ in result.items(part):
        positions.setdefault(result.get(part, i, "policy"), []).append(i)
    return positions
