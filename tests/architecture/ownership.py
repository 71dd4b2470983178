"""Checks of writes: an object's attributes are assigned only in the module of its class."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.architecture.imports import edges_of, known_to
from tests.architecture.sources import Source

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Store:
    """An attribute that is assigned, augmented or deleted on an object other than self or cls.

    Attributes:
      what: the object and the attribute as written in the source, such as "self.cache.disk".
      owners: paths of the files that define the object's possible classes.
    """

    source: Source
    line: int
    what: str
    owners: frozenset[str]

    def __str__(self) -> str:
        owners = ", ".join(sorted(self.owners))
        return f"{self.source.path}:{self.line} assigns {self.what}, of {owners}"


@dataclass(frozen=True)
class OurClass:
    """A class of this repository: its name without leading underscores, and its declarations.

    A class declares the names that its body annotates or assigns, and that its methods assign on
    self or cls.
    """

    name: str
    source: Source
    attributes: frozenset[str]


def classes_of(sources: Iterable[Source], *, with_methods: bool = False) -> tuple[OurClass, ...]:
    """Return every class in these files.

    Args:
      with_methods: count methods as declared names, so that replacing a method counts as a write.
    """
    return tuple(
        OurClass(node.name.lstrip("_"), source, frozenset(_declared(node, with_methods)))
        for source in sources
        for node in _statements(source.tree)
        if isinstance(node, ast.ClassDef)
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, and none of their expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield child
            yield from _statements(child)


def foreign_stores(
    sources: Collection[Source],
    classes: Collection[OurClass],
    allowed: Mapping[str, Collection[str]],
) -> list[Store]:
    """Return every attribute that is assigned outside of the module of its object's class.

    The object's class is one that declares the attribute. If several do, it is the class that
    annotates the object's name, or whose name the object's name spells (`sequence` is a
    `Sequence`); classes in the module itself come first, then classes in imported modules. An
    attribute that no class declares belongs to a library. An assignment to an object that the
    same function creates is part of its construction.

    Args:
      allowed: for each class, the paths of other modules that may write it.
    """
    declaring = defaultdict(list)
    for one in classes:
        for attribute in one.attributes:
            declaring[attribute].append(one)
    edges = edges_of([*sources, *(one.source for one in classes)])
    found = []
    for source in sources:
        known = known_to(source.module, edges)
        for node, functions in _with_functions(source.tree, ()):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            if is_self(node.value) or _is_made_here(node.value, functions):
                continue
            names = _names_of_class(node.value, functions)
            seen = [one for one in declaring[node.attr] if one.source.module in known]
            named = [one for one in seen if one.name in names]
            candidates = [one for one in named if one.source.path == source.path] or named or seen
            owners = frozenset(one.source.path for one in candidates)
            writers = {path for one in candidates for path in allowed.get(one.name, ())}
            if owners and source.path not in owners | writers:
                found.append(Store(source, node.lineno, ast.unparse(node), owners))
    return found


def across_rooms(stores: Iterable[Store]) -> list[Store]:
    """Return the writes to objects of another room or of another package."""
    return [
        store
        for store in stores
        if all(_place(path) != _place(store.source.path) for path in store.owners)
    ]


def _place(path: str) -> tuple[str, ...]:
    parts = path.split("/")
    return tuple(parts[:2]) if parts[0] == "jaxserve" else tuple(parts[:1])


def _declared(node: ast.ClassDef, with_methods: bool) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        elif isinstance(statement, ast.Assign):
            yield from (name.id for name in statement.targets if isinstance(name, ast.Name))
        elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = [ast.unparse(one) for one in statement.decorator_list]
            if with_methods or any(name.endswith(".setter") for name in decorators):
                yield statement.name
    for inner in ast.walk(node):
        is_store = isinstance(inner, ast.Attribute) and not isinstance(inner.ctx, ast.Load)
        if is_store and is_self(inner.value):
            yield inner.attr


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _with_functions(
    node: ast.AST, functions: tuple[_Function, ...]
) -> Iterator[tuple[ast.AST, tuple[_Function, ...]]]:
    """Yield every node below this one, with the enclosing functions, innermost first."""
    for child in ast.iter_child_nodes(node):
        yield child, functions
        inside = (child, *functions) if isinstance(child, _Function) else functions
        yield from _with_functions(child, inside)


def _is_made_here(node: ast.expr, functions: tuple[_Function, ...]) -> bool:
    """Return whether the innermost function binds the name to the result of a class's call."""
    if not isinstance(node, ast.Name) or not functions:
        return False
    for statement in ast.walk(functions[0]):
        if isinstance(statement, ast.Assign):
            targets = [name.id for name in statement.targets if isinstance(name, ast.Name)]
            if node.id in targets and _constructs(statement.value):
                return True
    return False


def _constructs(value: ast.expr) -> bool:
    """Return whether an expression calls `cls` or a name that is spelt as a class."""
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    return name == "cls" or name.lstrip("_")[:1].isupper()


def _names_of_class(node: ast.expr, functions: tuple[_Function, ...]) -> set[str]:
    """Return the possible names of an object's class, from its name and its annotation."""
    name = node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)
    names = {"".join(part.capitalize() for part in name.strip("_").split("_"))}
    for inner in (inner for function in functions for inner in ast.walk(function)):
        is_argument = isinstance(inner, ast.arg) and inner.arg == ast.unparse(node)
        is_variable = isinstance(inner, ast.AnnAssign) and ast.unparse(inner.target) == name
        if (is_argument or is_variable) and inner.annotation is not None:
            names.add(_class_in(inner.annotation))
    return names


def _class_in(annotation: ast.expr) -> str:
    """Return the class in `Class`, `module.Class`, `"Class"` or `Class | None`."""
    text = re.sub(r"['\"]|\s*\|\s*None", "", ast.unparse(annotation))
    return text.partition("[")[0].rpartition(".")[2].lstrip("_")
