"""A table of schedules whose lengths drift (figure 11 of ExeGPT)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures.markdown import caption, linked, table
from benchmarks.figures.results import Result

# Engines and parts of the answers, in the order of the columns.
_COLUMNS = (
    ("left alone", "left_alone", "from_drift"),
    ("adapted", "adapted", "from_drift"),
    ("adapted, settled", "adapted", "settled"),
    ("planned anew, settled", "planned_anew", "settled"),
)


def drift(result: Result, link: str) -> str:
    """Return answers a second and the share within the bound, by change and engine."""
    header = ["change", "to"]
    for heading, _, _ in _COLUMNS:
        header += [heading, "within"]
    arguments = result.get("arguments")
    bound_s = result.optional("bound_s")
    what = (
        f"Answers a second of RRA, and the share within "
        f"{'no bound' if bound_s is None else f'the bound of {bound_s:.1f} s'}, from the change on "
        f"({arguments['after']} answers) and of their second half"
    )
    how = f"one simulation each, seed {arguments['seed']}"
    rows = list(_rows(result, link))
    return f"{caption(result, what, link, how=how)}\n\n{table((*header, 'plans'), rows)}"


def _rows(result: Result, link: str) -> Iterator[list[str]]:
    for i, row in result.items("drifts"):
        cells = [row["changed"], f"{row['to']:g}"]
        for _, engine, part in _COLUMNS:
            at = ("drifts", i, engine, part)
            cells.append(linked(result.number(*at, "answers_per_s"), ".2f", link))
            cells.append(f"{result.number(*at, 'share_in_bound'):.1%}")
        yield [*cells, str(len(row["adapted"]["adopted"]))]
