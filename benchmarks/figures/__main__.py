"""Result files into tables and figures: `python -m benchmarks.figures --help`.

Writes the results of README.md and of docs/results/, and docs/figures/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.common.environment import ROOT
from benchmarks.figures.charts import charts, svg
from benchmarks.figures.results import Place, ResultFileError, is_quantised
from benchmarks.figures.tables import PAGES, TABLES, peers, tables
from jaxserve.core.errors import InvalidConfigError, JaxserveError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
_IDENTIFIER = re.compile(r"jaxserve-result:[0-9a-f]{64}")


README = "README.md"
KINDS = tuple(TABLES)
FIGURES = "docs/figures"
RESULTS = "benchmarks/results"


def main(arguments: list[str] | None = None) -> int:
    """Write everything, or with --check print what would change; return the exit code."""
    options = build_parser().parse_args(arguments)
    try:
        check_commits(load(options.root / RESULTS), options.root)
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


def load(folder: Path) -> list[Place]:
    """Read every `*.json` of the folder, by kind and name.

    Raises:
      ResultFileError: a file that is not a result, or of an unknown kind.
    """
    results = [_read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(results, key=lambda result: KINDS.index(result.kind))


def _read(path: Path) -> Place:
    try:
        text = path.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise ResultFileError(f"{path} cannot be read as JSON: {error}") from error
    kind = data.get("benchmark") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise ResultFileError(
            f"{path}: 'benchmark' is {kind!r}, and should be one of {', '.join(KINDS)}; "
            "keep other files elsewhere"
        )
    return Place(path, data, hashlib.sha256(path.name.encode() + text).hexdigest())


def check_commits(results: list[Place], root: Path) -> None:
    """Refuse results of commits that are not in the checkout's history.

    A checkout without its whole history cannot check this, and says so on stderr.

    Raises:
      ResultFileError: a result of an unknown commit, or of files that differed from their commit.
    """
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        print(f"{root} has no whole history: commits of results are not checked", file=sys.stderr)
        return
    for result in results:
        commit = str(result.get("commit"))
        if _git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is None:
            raise ResultFileError(
                f"{result.path}: commit {commit!r} is not in the history of {root}; a result "
                "names a commit that others can check out: measure again on one"
            )


def _git(root: Path, *arguments: str) -> str | None:
    """Return git's output in the folder; None if git fails or is missing."""
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def update(root: Path, *, write: bool) -> list[Path]:
    """Return the files that differ from the results; with `write`, write them.

    Without `write`, figures drawn from the same result file count as equal, since other versions of
    Matplotlib draw other bytes.

    Raises:
      ResultFileError: a result file is broken, of an unknown kind, or without runs.
      InvalidConfigError: a page lacks its markers.
    """
    results = load(root / RESULTS)
    figures = {
        root / FIGURES / f"{name}.svg": (result, chart)
        for result in results
        for name, chart in charts(result).items()
    }
    stale: list[Path] = []
    for page in (README, *PAGES):
        path = root / page
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
        data = svg(partial(chart, result), identifier)
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


def render(page: str, results: list[Place], root: Path) -> str:
    """Return the text between the markers of a page.

    The README has the first comparison with other engines on each processor, with weights in the
    model's dtype; other pages have the results of their kinds.
    """
    up = "../" * page.count("/")

    results = [replace(each, link=up + each.path.relative_to(root).as_posix()) for each in results]

    def pictures(result: Place) -> list[str]:
        return [
            f"![{TABLES[result.kind][0]}: {name}]({up}{FIGURES}/{name}.svg)"
            for name in charts(result)
        ]

    parts = []
    if page == README:
        offline = [result for result in results if result.kind == "offline"]
        compared = [each for each in offline if each.has_peers and not is_quantised(each)]
        processors = {str(each.get("device", "host_cpu")): each for each in reversed(compared)}
        for result in sorted(processors.values(), key=compared.index):  # the first one of each
            parts += [peers(result), *pictures(result)]
    for kind in PAGES.get(page, ()):
        own = [result for result in results if result.kind == kind]
        if own:
            parts.append(f"## {TABLES[kind][0]}")
            for result, text in zip(own, tables(kind, own), strict=True):
                parts += [text] if text else []
                parts += pictures(result)
    shows_devices = page == README or "gpu_check" in PAGES[page]
    if shows_devices and all(result.get("device", "platform") == "cpu" for result in results):
        parts.append("Nothing was measured on a GPU yet.")
    return "\n\n".join(parts)


def _spliced(path: Path, text: str, between: str) -> str:
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise InvalidConfigError(f"{path} needs one line {BEGIN} and, below it, one line {END}")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{between}\n\n{END}{after}"


def _identifier(path: Path) -> str | None:
    if not path.exists():
        return None
    found = _IDENTIFIER.search(path.read_text(encoding="utf-8"))
    return None if found is None else found.group()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures",
        description=f"Draw every result in {RESULTS}/ under {FIGURES}/, and rewrite the tables of "
        f"{', '.join((README, *PAGES))} between their markers. Prints the files that "
        "changed.",
    )
    add = parser.add_argument
    add("--check", action="store_true", help="change nothing; exit with 1 if anything would change")
    add("--root", type=Path, default=ROOT, help="of the checkout (default: this one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
