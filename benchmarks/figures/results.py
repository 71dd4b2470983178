"""Result files, read with errors that name the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from benchmarks.common.repeats import Spread
from jaxserve.core.errors import InvalidConfigError


class ResultFileError(InvalidConfigError):
    """A result file that cannot be read, or lacks a field of its kind."""


@final
@dataclass(frozen=True)
class Place:
    """The result of one benchmark, or an object inside it.

    Attributes:
      data: the whole result.
      digest: of the file and its name.
      link: the address of the file as a page sees it.
      at: keys of the object in the result; none for the result itself.
    """

    path: Path
    data: dict[str, Any]
    digest: str
    link: str = ""
    at: tuple[str | int, ...] = ()

    @property
    def kind(self) -> str:
        return self.data["benchmark"]

    def above(self, depth: int) -> Place:
        """Return the object that is `depth` keys below the result and contains this one."""
        return replace(self, at=self.at[:depth])

    def inside(self, *keys: str | int) -> Place:
        return replace(self, at=(*self.at, *keys))

    def linked(self, text: str) -> str:
        return f"[{text}]({self.link})"

    def get(self, *keys: str | int) -> Any:
        """Return the value under nested keys.

        Raises:
          ResultFileError: there is no such value.
        """
        found: Any = self.data
        path = (*self.at, *keys)
        for depth, key in enumerate(path):
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                raise ResultFileError(
                    f"{self.path}: a result of kind {self.kind!r} has "
                    f"{self._named(path[: depth + 1])!r}, and this one does not; run the "
                    "benchmark again, or remove the file"
                ) from None
        return found

    def number(self, *keys: str | int) -> float:
        """Return the number under the keys.

        Raises:
          ResultFileError: there is none.
        """
        found = self.get(*keys)
        if isinstance(found, bool) or not isinstance(found, int | float):
            name = self._named((*self.at, *keys))
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
        return int(self.above(0).number("repeats"))

    def spread(self, *keys: str | int) -> Spread:
        """Return median and range of a figure over the whole runs of this object.

        Raises:
          ResultFileError: the object has no runs and the file is not one of a single run, or a run
            lacks the figure.
        """
        if "runs" in self.get():
            return Spread.of([self.number("runs", i, *keys) for i, _ in self.items("runs")])
        if self.repeats > 1:
            where = self._named(self.at) or "the file"
            raise ResultFileError(
                f"{self.path}: {where} has no runs, of which there were {self.repeats}; a table "
                "shows medians of whole runs: run the benchmark again"
            )
        return Spread.of([self.number(*keys)])

    def optional_spread(self, *keys: str | int) -> Spread | None:
        """Return the spread; None if the figure was not measured."""
        first = ("runs", 0) if "runs" in self.get() else ()
        return None if self.optional(*first, *keys) is None else self.spread(*keys)

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
        name = self._named((*self.at, *keys))
        raise ResultFileError(f"{self.path}: {name!r} is {found!r}, and should hold several")

    def each(self, paths: str) -> list[Place]:
        """Return the objects at paths of keys, such as "policies.*.points.*".

        "*" stands for every key or position, a number for a position; several paths are separated
        by spaces.
        """
        found: list[Place] = []
        for path in paths.split():
            places = [self]
            for key in path.split("."):
                own = int(key) if key.lstrip("-").isdecimal() else key
                places = [
                    place.inside(inner)
                    for place in places
                    for inner in ([name for name, _ in place.items()] if key == "*" else [own])
                ]
            found += places
        return found

    @staticmethod
    def _named(keys: Sequence[str | int]) -> str:
        return ".".join(map(str, keys))


def is_quantised(result: Place) -> bool:
    """Return whether an offline result has weights in few bits."""
    return result.data.get("quantize") is not None


def by_policy(result: Place, part: str) -> dict[str, list[Place]]:
    """Return each policy's points in one part of a result."""
    found: dict[str, list[Place]] = {}
    for point in result.each(f"{part}.*"):
        found.setdefault(point.get("policy"), []).append(point)
    return found
