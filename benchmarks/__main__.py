"""Lists all benchmarks, one a line: `python -m benchmarks`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent
# Scripts that another benchmark starts with a separate file.
_SCRIPTS = ("offline/peers/", "cells/peers/", "http/peers/", "planning/host_time.py")


def main() -> int:
    """Print every command with its summary; return the exit code."""
    table = Table("command", "", box=None, header_style="bold", title_justify="left")
    for name, summary in commands():
        table.add_row(f"python -m {name}", summary)
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)
    console.print("Each has --help; docs/benchmarks.md says how to measure.", highlight=False)
    return 0


def commands() -> Iterator[tuple[str, str]]:
    """Yield the name of each runnable module, and the first words of its docstring.

    Modules are read, not imported: some need packages that are not installed.
    """
    found = {}
    for path in FOLDER.rglob("*.py"):
        where = path.relative_to(FOLDER).as_posix()
        text = path.read_text(encoding="utf-8")
        if path == Path(__file__) or where.startswith(_SCRIPTS) or "__name__ ==" not in text:
            continue
        parts = path.relative_to(FOLDER.parent).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__main__")
        found[name] = (ast.get_docstring(ast.parse(text)) or "").partition(": `python")[0]
    yield from sorted(found.items())


if __name__ == "__main__":
    sys.exit(main())
