"""Report the size of the tree: lines, files, splinters, names defined twice, hidden arguments.

It states no limits. `--way` also generates twice with smollm2-135m, and counts the files of which
code is executed in the second call, in all threads.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import final

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PRODUCT = ("jaxserve", "pallas_kernels", "predictor", "sharding")
# Folders to which `jaxserve` has links, and what they are imported as.
_LINKED = {
    "pallas_kernels": "jaxserve.kernels",
    "predictor": "jaxserve.predictor",
    "sharding": "jaxserve.sharding",
}
# A file with fewer lines and one importer is a splinter.
_SPLINTER_LINES = 60


@final
@dataclass(frozen=True)
class House:
    """The counts.

    Attributes:
      rooms: a package, or a folder outside the product -> its lines and files.
      splinters: files of the product with one importer and fewer than 60 lines.
      defined_twice: class names that several files of the product define.
      star_tuples: places with a call of the form `f(*(a, b))`.
      formatter_off: places where the formatter is switched off.
      way: files that execute code in a warm `Runtime.generate`; None if it was not traced.
    """

    rooms: dict[str, tuple[int, int]]
    splinters: list[str]
    defined_twice: list[str]
    star_tuples: list[str]
    formatter_off: list[str]
    way: list[str] | None

    def total(self, *, of_product: bool) -> tuple[int, int]:
        """Return the lines and files of the product, or of everything else."""
        found = [c for room, c in self.rooms.items() if is_product(room) == of_product]
        return sum(lines for lines, _ in found), sum(files for _, files in found)


def is_product(file: str) -> bool:
    return file.split("/")[0] in PRODUCT


def room_of(file: str) -> str:
    """Return the folder that a file is counted for: a package, or a subpackage of `jaxserve`."""
    parts = file.split("/")
    return "/".join(parts[: 2 if parts[0] == "jaxserve" and len(parts) > 2 else 1])


def counted(sources: dict[str, str], way: list[str] | None = None) -> House:
    """Count in the sources of Python files, by their paths from the root."""
    rooms: dict[str, tuple[int, int]] = {}
    importers: dict[str, set[str]] = defaultdict(set)
    classes: dict[str, set[str]] = defaultdict(set)
    star_tuples, formatter_off = list[str](), list[str]()
    for file, source in sources.items():
        lines, files = rooms.get(room_of(file), (0, 0))
        rooms[room_of(file)] = lines + source.count("\n"), files + 1
        formatter_off += [
            f"{file}:{i}" for i, line in enumerate(source.splitlines(), 1) if "# fmt: " in line
        ]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and is_product(file) and node.module:
                for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names)):
                    importers[name].add(file)
            elif isinstance(node, ast.ClassDef) and is_product(file):
                classes[node.name].add(file)
            elif isinstance(node, ast.Call) and any(
                isinstance(a, ast.Starred) and isinstance(a.value, ast.Tuple) for a in node.args
            ):
                star_tuples.append(f"{file}:{node.lineno}")
    return House(
        rooms,
        [f for f, s in sources.items() if _is_splinter(f, s, importers)],
        sorted(name for name, files in classes.items() if len(files) > 1),
        star_tuples,
        formatter_off,
        way,
    )


def _is_splinter(file: str, source: str, importers: dict[str, set[str]]) -> bool:
    if not is_product(file) or source.count("\n") >= _SPLINTER_LINES:
        return False
    package, _, rest = file.removesuffix(".py").replace("/", ".").partition(".")
    return len(importers[f"{_LINKED.get(package, package)}.{rest}"]) == 1


def way_of_a_call() -> list[str]:
    """Return the files of the product that execute code in a warm call of two prompts."""
    from jaxserve import Runtime, SamplingParams

    found, is_on = set[str](), False
    roots = tuple(f"{ROOT / package}/" for package in PRODUCT)

    def watch(frame: FrameType, event: str, _arg: object) -> None:
        name = frame.f_code.co_filename
        if is_on and event == "call" and name.startswith(roots):
            found.add(name)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        with Runtime.from_pretrained(
            "smollm2-135m", progress=False, max_context=512, warmup="full"
        ) as rt:
            prompts, params = ["Name two seas.", "Why is it salty?"], SamplingParams(max_tokens=24)
            for _ in range(2):
                rt.generate(prompts, params)
            is_on = True
            rt.generate(["Name three rivers.", "Why is the sky blue?"], params)
            is_on = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(str(Path(name).relative_to(ROOT)) for name in found)


def print_report(house: House, *, names: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    table = Table("room", "lines", "files", box=None)
    for room, (lines, files) in sorted(house.rooms.items()):
        table.add_row(room, f"{lines:,}", str(files))
    product = house.total(of_product=True)
    table.add_row("the product", f"{product[0]:,}", str(product[1]))
    console.print(table)
    for title, places in (
        ("files under 60 lines with one importer", house.splinters),
        ("class names defined in several files", house.defined_twice),
        ("calls with a starred tuple", house.star_tuples),
        ("switches of the formatter", house.formatter_off),
        ("files on the way of a warm generate", house.way),
    ):
        if places is not None:
            console.print(f"{title}: {len(places)}")
        if names and places:
            by_file = Counter(place.split(":")[0] for place in places)
            console.print("\n".join(f"  {f} {n if n > 1 else ''}" for f, n in by_file.items()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.house", description=__doc__)
    parser.add_argument("--way", action="store_true", help="trace a warm call of smollm2-135m")
    parser.add_argument("--names", action="store_true", help="name the files that are counted")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    options = parser.parse_args(arguments)
    listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True)
    files = [file for file in listed.splitlines() if (ROOT / file).exists()]
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    house = counted(sources, way_of_a_call() if options.way else None)
    if options.json:
        print(json.dumps(asdict(house)))
    else:
        print_report(house, names=options.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
