"""README's tables, docs/results.md and docs/figures/ from the result files."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from benchmarks.common.environment import ROOT
from benchmarks.figures import style
from benchmarks.figures.charts import charts
from benchmarks.figures.results import KINDS, Result, load
from benchmarks.figures.tables import HEADINGS, tables
from jaxserve.core.errors import InvalidConfigError, JaxserveError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
# README shows these whole; docs/results.md shows every kind.
README_KINDS = ("offline", "policies")
_IDENTIFIER = re.compile(r"jaxserve-result:[0-9a-f]{64}")


@final
@dataclass(frozen=True)
class Page:
    """A Markdown file, the heading level of its results, and the kinds it shows."""

    path: str
    level: str
    kinds: tuple[str, ...]

    @property
    def up(self) -> str:
        """From the page's folder to the root."""
        return "../" * self.path.count("/")


PAGES = (Page("README.md", "###", README_KINDS), Page("docs/results.md", "##", KINDS))
FIGURES = "docs/figures"
RESULTS = "benchmarks/results"


def main(arguments: list[str] | None = None) -> int:
    """Write everything, or with --check say what would change; the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        stale = update(options.root, write=not options.check)
    except JaxserveError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    for path in stale:
        print(f"{path.relative_to(options.root)} {'differs' if options.check else 'written'}")
    if stale and options.check:
        print("run python -m benchmarks.figures", file=sys.stderr)
        return 1
    return 0


def update(root: Path, *, write: bool) -> list[Path]:
    """The files that differ from what the results say; with `write` they no longer do.

    Without `write`, a figure is taken to be the same if it was drawn from the same result file:
    other versions of Matplotlib draw other bytes.

    Raises:
      ResultFileError: a result file is broken, or of an unknown kind.
      InvalidConfigError: a page lacks its markers.
    """
    results = load(root / RESULTS)
    figures = {
        root / FIGURES / f"{name}.svg": (result, chart)
        for result in results
        for name, chart in charts(result).items()
    }
    stale: list[Path] = []
    for page in PAGES:
        path = root / page.path
        text = path.read_text(encoding="utf-8")
        wanted = _spliced(path, text, render(page, results, root))
        if wanted != text:
            stale.append(path)
            if write:
                path.write_text(wanted, encoding="utf-8")
    for path, (result, chart) in figures.items():
        identifier = f"jaxserve-result:{result.digest}"
        is_current = _identifier(path) == identifier
        if not write:
            stale += [] if is_current else [path]
            continue
        data = style.svg(partial(chart, result), identifier)
        if not path.exists() or path.read_bytes() != data:
            stale.append(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for path in sorted((root / FIGURES).glob("*.svg")):
        if path not in figures and _identifier(path) is not None:
            stale.append(path)
            if write:
                path.unlink()
    return stale


def render(page: Page, results: list[Result], root: Path) -> str:
    """What stands between the page's markers."""

    def link(result: Result) -> str:
        return page.up + result.path.relative_to(root).as_posix()

    parts = []
    for kind in page.kinds:
        own = [result for result in results if result.kind == kind]
        if own:
            parts.append(f"{page.level} {HEADINGS[kind]}")
            for result, text in zip(own, tables(kind, own, link), strict=True):
                parts += [text] if text else []
                parts += [
                    f"![{HEADINGS[kind]}: {name}]({page.up}{FIGURES}/{name}.svg)"
                    for name in charts(result)
                ]
    if not any(result.get("device", "platform") != "cpu" for result in results):
        parts.append("Nothing was measured on a GPU yet.")
    return "\n\n".join(parts)


def _spliced(path: Path, text: str, between: str) -> str:
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InvalidConfigError(f"{path} needs one line {BEGIN} and, below it, one line {END}")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{between}\n\n{END}{after}"


def _identifier(path: Path) -> str | None:
    """Of the result that a figure was drawn from; None for other pictures."""
    if not path.exists():
        return None
    found = _IDENTIFIER.search(path.read_text(encoding="utf-8"))
    return None if found is None else found.group()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures",
        description=f"Draw every result in {RESULTS}/ under {FIGURES}/, and rewrite the tables of "
        f"{' and '.join(page.path for page in PAGES)} between their markers. Prints the files "
        "that changed.",
    )
    add = parser.add_argument
    add("--check", action="store_true", help="change nothing; exit with 1 if anything would change")
    add("--root", type=Path, default=ROOT, help="of the checkout (default: this one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
