"""Markdown tables: cells of a result, and the table of one kind of result as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from benchmarks.common.policies import BASELINES, PREDICTING, missing_baselines
from benchmarks.common.repeats import Spread
from benchmarks.figures.results import Place, ResultFileError

# A difference below this share is no loss.
_LEAST_LOSS = 0.0005

# A function of a place, or a text with fields, see `Field`.
Cell = Callable[[Place], str] | str
# A heading, and what is below it.
Column = tuple[str, Cell]
Columns = Sequence[Column] | Callable[[Place], Sequence[Column]]
# A path, see `Place.each`, or a function of the whole result.
Rows = str | Callable[[Place], Iterable[Place]]


@final
@dataclass(frozen=True, kw_only=True)
class Table:
    """The table of one result of a kind.

    Attributes:
      how: replaces the number of runs, for figures that do not come from repeated runs.
      below: sentences and further tables.
    """

    what: Cell
    rows: Rows
    columns: Columns
    how: str | Callable[[Place], str | None] | None = None
    below: Callable[[Place], Iterable[str]] = lambda _: ()

    def __call__(self, whole: Place) -> str:
        """Return the caption, the table, and the text below it."""
        how = self.how(whole) if callable(self.how) else self.how
        first = caption(whole, show_in(self.what, whole), how=how)
        return joined(first, drawn(self.columns, self.rows, whole), *self.below(whole))


class _Fields(dict[str, Any]):
    def __init__(self, place: Place):
        super().__init__()
        self._place = place

    def __missing__(self, key: str) -> Any:
        if key == "at":
            return self._place.at
        if key == "here":
            return Field(self._place, ())
        if key.startswith("above"):
            return Field(self._place.above(int(key.removeprefix("above"))), ())
        return Field(self._place, (key,))


# Units by their names in formats.
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "MB": 1e6, "GB": 1e9, "T": 1e12}
_FORMAT = re.compile(r"(@?)(~?)([^ ?]*)(?: (/?)(\w+))?(\??)")


@final
@dataclass(frozen=True)
class Field:
    """A value of a place in a text: "{figure[p50]:FORMAT}".

    "{here}" is the place itself, "{above2[figure]}" is of the object two keys below the result that
    contains it, and "{at[1]}" is a key of the place.

    The format is Python's, such as ",.0f", or "words" for an identifier, or "num" for the length of
    a list. Before it, "@" links a number to its file and "~" shows the median and the range of a
    measured figure. After it, a unit of `_UNITS` is shown, or with "/" only divides; "?" leaves out
    what was not measured.
    """

    place: Place
    keys: tuple[str | int, ...]

    def __getitem__(self, key: str | int) -> Field:
        return replace(self, keys=(*self.keys, key))

    def __format__(self, text: str) -> str:
        found = _FORMAT.fullmatch(text)
        assert found is not None, text
        links, measured, form, hidden, unit, optional = found.groups()
        if optional and not self._was_measured():
            return ""
        per, shown_unit = _UNITS.get(unit, 1.0), "" if hidden or not unit else f" {unit}"
        if measured:
            link = self.place.link if links else None
            return shown(self.spread().over(per), form, shown_unit, link)
        value = self.place.get(*self.keys)
        if form in ("words", "num"):
            return name(value) if form == "words" else str(len(value))
        if not form:
            return "" if value is None else str(value)
        text = format(self.place.number(*self.keys) / per if form[-1] in "f%eg" else value, form)
        return (self.place.linked(text) if links else text) + shown_unit

    def spread(self) -> Spread:
        """Return median and range: over the runs of the innermost object with runs, or as given."""
        found = self.place.get(*self.keys)
        if isinstance(found, dict):
            low, high = found["range"]
            return Spread(found["median"], low, high, self.place.repeats)
        runs, rest = self._runs()
        return runs.spread(*rest)

    def _runs(self) -> tuple[Place, tuple[str | int, ...]]:
        """Return the innermost object with runs, and the keys of the value in it."""
        depths = range(len(self.keys) - 1, -1, -1)
        depth = next((i for i in depths if "runs" in self.place.get(*self.keys[:i])), 0)
        return self.place.inside(*self.keys[:depth]), self.keys[depth:]

    def _was_measured(self) -> bool:
        try:
            runs, rest = self._runs()
            first = runs.inside("runs", 0) if "runs" in runs.get() else runs
            return first.get(*rest) is not None
        except ResultFileError:
            return False


def show_in(cell: Cell, place: Place) -> str:
    """Return what a cell shows of a place."""
    return cell.format_map(_Fields(place)) if isinstance(cell, str) else cell(place)


def drawn(columns: Columns, rows: Rows, whole: Place) -> str:
    """Return a table with a row for each place."""
    given = columns(whole) if callable(columns) else columns
    places = whole.each(rows) if isinstance(rows, str) else rows(whole)
    cells = [[show_in(cell, place) for _, cell in given] for place in places]
    return table([heading for heading, _ in given], cells)


def if_at(key: str | int, depth: int, cell: Cell, above: int | None = None) -> Cell:
    """Show a cell, of an object above the place if asked for, where a key of the place is this."""

    def shown_there(place: Place) -> str:
        if place.at[depth] != key:
            return ""
        return show_in(cell, place if above is None else place.above(above))

    return shown_there


def key(depth: int = -1) -> Cell:
    """Show a key of the place, the last one by default, in words."""
    return lambda place: name(str(place.at[depth]))


def name(identifier: str) -> str:
    """Return an identifier in words, as tables and charts show it."""
    return identifier.replace("_", " ")


def joined(*parts: str) -> str:
    """Return the parts that are not empty as paragraphs."""
    return "\n\n".join(filter(None, parts))


def caption(result: Place, what: str, *, how: str | None = None) -> str:
    """Return what a table shows, on which machine, from which file, and from how many runs."""
    file = result.linked(result.path.stem)
    sentence = f"{what}, on {where(result)} ({file}); {how or runs(result)}."
    note = result.data.get("note")
    return f"{sentence} {note}" if note else sentence


def runs(result: Place) -> str:
    """Return how many whole runs the figures come from."""
    if result.repeats == 1:
        return "one run"
    return f"medians of {result.repeats} whole runs (least to most)"


def where(result: Place) -> str:
    """Return the machine in words."""
    device = result.above(0).get("device")
    if isinstance(device, str):  # of PyTorch
        return device
    if device["platform"] != "cpu":
        return f"{device['count']} x {device['kind']}"
    return f"{device['host_cores']} cores of {device['host_cpu']}"


def shown(spread: Spread, form: str, unit: str = "", link: str | None = None) -> str:
    """Return median and range; the range is omitted if it rounds to the median."""
    median, low, high = (format(value, form) for value in (spread.median, spread.low, spread.high))
    text = f"{median}{unit}" if link is None else f"[{median}]({link}){unit}"
    return text if low == high == median else f"{text} ({low} to {high})"


def linked(value: float, form: str, link: str) -> str:
    """Return a number that links to the file that it comes from."""
    return f"[{value:{form}}]({link})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without the columns that are empty in every row."""
    kept = [i for i in range(len(header)) if not rows or any(row[i] for row in rows)]
    lines = [[line[i] for i in kept] for line in (header, ["---"] * len(header), *rows)]
    return "\n".join(
        "|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines
    )


def lost(
    unit: Cell,
    rows: Rows,
    figure: str,
    *,
    policy: int = -1,
    place: Cell = "",
    is_lower_better: bool = False,
    is_measured: bool = True,
) -> Callable[[Place], list[str]]:
    """Return the sentence of `losses` for a figure of every row.

    Args:
      figure: a field, such as "latency_s[p90]".
      policy: the position of the policy's name among the keys of a row.
      place: where a row was measured.
      is_measured: whether the figure comes from runs, and not from a simulation.
    """
    keys = tuple(figure.rstrip("]").split("["))

    def sentence(whole: Place) -> list[str]:
        sets: dict[str, dict[str, Spread]] = {}
        for row in whole.each(rows) if isinstance(rows, str) else rows(whole):
            own = Field(row, keys).spread() if is_measured else Spread.of([row.number(*keys)])
            sets.setdefault(show_in(place, row), {})[str(row.at[policy])] = own
        return [losses(show_in(unit, whole), sets, is_lower_better=is_lower_better)]

    return sentence


def losses(
    unit: str, sets: Mapping[str, Mapping[str, Spread]], *, is_lower_better: bool = False
) -> str:
    """Return where `s3` and `auto` are behind `vllm_like` and `s3_oracle`; "" without the former.

    Args:
      unit: of the figures, in words.
      sets: figures by policy, by where they were measured ("" for one place alone).
      is_lower_better: whether less is better, as for latencies.
    """
    policies = dict.fromkeys(policy for found in sets.values() for policy in found)
    ours = [policy for policy in PREDICTING if policy in policies]
    if not ours:
        return ""
    known = [baseline for baseline in BASELINES if baseline in policies]
    parts = [
        f"{place}: {', '.join(texts)}" if place else ", ".join(texts)
        for place, found in sets.items()
        if (texts := list(_behind(found, is_lower_better)))
    ]
    sentences = []
    if parts:
        comma = ", " if "" not in sets else ": "
        sentences.append(f"Lost in {unit}{comma}{'; '.join(parts)}.")
    elif known:
        verb = "is" if len(ours) == 1 else "are"
        names, others = " and ".join(map(name, ours)), " and ".join(map(name, known))
        sentences.append(f"Nothing lost in {unit}: {names} {verb} not behind {others}.")
    if missing := missing_baselines(policies):
        verb = "was" if len(missing) == 1 else "were"
        sentences.append(f"{' and '.join(map(name, missing))} {verb} not measured here.")
    return " ".join(sentences)


def behind_by(own: Spread, other: Spread, *, is_lower_better: bool = False) -> float | None:
    """Return the share of the other's median by which ours is worse; None if it is not."""
    share = own.median / other.median - 1 if is_lower_better else 1 - own.median / other.median
    return share if share > _LEAST_LOSS else None


def _behind(found: Mapping[str, Spread], is_lower_better: bool) -> Iterator[str]:
    """Yield, for each policy that is behind a baseline, the baselines and the shares."""
    for policy in (each for each in PREDICTING if each in found):
        texts = []
        for baseline in (each for each in BASELINES if each in found):
            own, other = found[policy], found[baseline]
            share = behind_by(own, other, is_lower_better=is_lower_better)
            if share is not None:
                form = ".0%" if share >= 0.01 else ".1%"
                touches = own.num_runs > 1 and own.overlaps(other)
                note = " (their ranges overlap)" if touches else ""
                texts.append(f"{share:{form}} behind {name(baseline)}{note}")
        if texts:
            yield f"{name(policy)} is {' and '.join(texts)}"
