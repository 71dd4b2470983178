"""Benchmarks are in folders by what they measure; helpers are separate from commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import commands, main
from benchmarks.common.environment import ROOT

pytestmark = pytest.mark.fast

COMMANDS = {name: summary for name, summary in commands()}


def _modules() -> Iterator[tuple[str, Path]]:
    for folder in ("benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_imports_a_command():
    """Code that two commands share is a separate module."""
    packages = {name for name in COMMANDS if (ROOT / name.replace(".", "/")).is_dir()}
    modules = {f"{name}.__main__" if name in packages else name for name in COMMANDS}
    modules.remove("benchmarks.common.environment")  # a command whose functions others may use
    found = [
        (name, imported)
        for name, path in _modules()
        for imported in _imports(path)
        if imported in modules
    ]
    assert found == []


def test_commands_are_listed_with_a_line_each(capsys):
    """The list and the documentation describe every command."""
    assert main() == 0
    printed = capsys.readouterr().out
    docs = [ROOT / "docs" / "benchmarks.md", *(ROOT / "docs" / "benchmarks").glob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in docs)
    for name, summary in COMMANDS.items():
        assert f"python -m {name} " in printed
        assert 10 < len(summary) < 80 and summary in printed
        assert re.search(rf"\b{re.escape(name)}\b", text), f"{name} is not in docs/benchmarks"


def test_commands_that_documents_name_are_there():
    """Pages, scripts and messages name only commands that exist."""
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]
    sources = [
        path
        for folder in ("jaxserve", "pallas_kernels", "scripts", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for path in [*pages, *sources]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"python -m (benchmarks(?:\.\w+)+)", text):
            is_example = path.name == "adding_a_benchmark.md"
            assert name in COMMANDS or is_example, f"{path.relative_to(ROOT)} names {name}"
