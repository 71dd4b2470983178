"""Python files as syntax trees, and the imports of each file."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Packages whose folders are not in that of `jaxserve`, which has links to them -> their folders.
LINKED = {
    "jaxserve.kernels": "pallas_kernels",
    "jaxserve.predictor": "predictor",
    "jaxserve.sharding": "sharding",
}


@dataclass(frozen=True)
class Import:
    """An imported dotted name.

    Attributes:
      where: "path:line" of the statement.
      at_module_level: False inside a function, where the import runs only when the function runs.
      for_type_checkers: True under `if TYPE_CHECKING`, where the import does not run.
    """

    name: str
    where: str
    at_module_level: bool
    for_type_checkers: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Source:
    """A Python file.

    Attributes:
      path: path relative to the repository, with slashes.
    """

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def module(self) -> str:
        """Return the dotted name of the module; the name of a package is that of its folder."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        return self.path.partition("/")[0]

    @property
    def room(self) -> str | None:
        """Return the room of a module of jaxserve; None for its `__init__` and other packages."""
        parts = self.path.removesuffix(".py").split("/")
        return None if parts[0] != "jaxserve" or parts[1:] == ["__init__"] else parts[1]

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', '?')}"

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Return every import in the order of the file, as absolute names."""
        return tuple(self._imports(self.tree, at_module_level=True, for_type_checkers=False))

    def _imports(self, node: ast.AST, **context: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(_by_folder(alias.name), self.at(child), **context)
            elif isinstance(child, ast.ImportFrom):
                base = self._base_of(child)
                for alias in child.names:
                    yield Import(_by_folder(f"{base}.{alias.name}"), self.at(child), **context)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for inner in child.body:
                    only = ast.Module([inner], [])
                    yield from self._imports(only, **context | {"for_type_checkers": True})
                yield from self._imports(ast.Module(child.orelse, []), **context)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from self._imports(child, **context | {"at_module_level": False})
            elif not isinstance(child, ast.expr):
                yield from self._imports(child, **context)

    def _base_of(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.path.split("/")[:-1]
        above = package[: len(package) - node.level + 1]
        return ".".join((*above, *filter(None, [node.module])))


def _by_folder(name: str) -> str:
    """Return the dotted name by the folders of the repository."""
    for package, folder in LINKED.items():
        if name == package or name.startswith(f"{package}."):
            return folder + name.removeprefix(package)
    return name


def sources_of(*folders: str) -> list[Source]:
    """Return every Python file under these folders of the repository."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    ]


def made_up(files: dict[str, str]) -> list[Source]:
    """Return sources that are not files, for tests of the checks."""
    return [Source(path, text) for path, text in files.items()]


def modules_named(sources: Iterable[Source]) -> dict[str, Source]:
    return {source.module: source for source in sources}
