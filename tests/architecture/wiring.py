"""Checks of the use of objects: by what they declare, not by their class or private names."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from tests.architecture.sources import Source

# Names of the classes whose objects declare their features; see `probes`.
_PROBED = ("Executor", "Engine", "Scheduler", "Replica", "Runtime", "Fleet")


def private_reaches(sources: Iterable[Source], allowed: Collection[str] = ()) -> list[str]:
    """Return private names of other objects and modules that are read, called, patched or imported.

    A private name starts with one underscore. Names that also end in one (`_repr_png_`) are
    protocols. Private names of `self` and `cls` pass, and so do those of an object of the method's
    class if the class declares the name.

    Args:
      allowed: "path name" of each exception.
    """
    return [
        f"{source.at(node)} reaches into {name}"
        for source in sources
        for node, name in _reaches(source)
        if f"{source.path} {name.rpartition('.')[2]}" not in allowed
    ]


def _reaches(source: Source) -> Iterator[tuple[ast.AST, str]]:
    own = _names_on_self(source)
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not is_self and node.attr not in own:
                yield node, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from ((node, f"{node.module}.{name}") for name in names if _is_private(name))
        elif isinstance(node, ast.Call):
            # getattr(x, "_y"), setattr, delattr, patch.object and monkeypatch.setattr.
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("getattr", "hasattr", "setattr", "delattr", "object", "setitem"):
                for argument in node.args[:2]:
                    is_text = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                    name = argument.value.rpartition(".")[2] if is_text else ""
                    if _is_private(name):
                        yield node, f"{ast.unparse(node.args[0])}.{name}"


def _is_private(name: str) -> bool:
    is_public = name in ("_", "_replace", "_asdict", "_fields")  # the last are a named tuple's
    return name.startswith("_") and not (name.endswith("_") or is_public)


def _names_on_self(source: Source) -> set[str]:
    """Return the private attributes that classes assign on self, and their private methods."""
    names = set()
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef):
                    names.add(inner.name)
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                        names.add(inner.attr)
    return names


def probes(sources: Iterable[Source], allowed: Collection[str] = ()) -> list[str]:
    """Return each `isinstance` of an executor, engine or service of ours, and each `hasattr`.

    An executor declares its features (`jaxserve.execution.executor`). `hasattr` of a Python
    protocol (`__iter__`) tests a user's value, and passes.

    Args:
      allowed: "path name" of each exception.
    """
    found = []
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "isinstance":
                names = [ast.unparse(one).rpartition(".")[2] for one in _alternatives(node.args[1])]
                asked = [name for name in names if name.endswith(_PROBED)]
            elif node.func.id == "hasattr":
                asked = [str(ast.literal_eval(node.args[1]))]
                asked = [name for name in asked if not name.startswith("__")]
            else:
                continue
            found += [
                f"{source.at(node)} asks {ast.unparse(node)}"
                for name in asked
                if f"{source.path} {name}" not in allowed
            ]
    return found


def patches(sources: Iterable[Source], allowed: Collection[str] = ()) -> list[str]:
    """Return the attributes that a test replaces with `monkeypatch`, a mock or `setattr`.

    A test may set environment variables, the working directory and `sys.modules`, which are a
    program's surroundings.

    Args:
      allowed: "path name" of each exception.
    """
    found = []
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            ends = (".setattr", ".delattr", ".patch", "patch.object", "patch.dict")
            if called.endswith(ends) or called in ("setattr", "delattr"):
                texts = [
                    argument.value.rpartition(".")[2]
                    for argument in node.args[:2]
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                ]
                name = texts[0] if texts else "?"
                if f"{source.path} {name}" not in allowed:
                    found.append(f"{source.at(node)} patches {ast.unparse(node.args[0])}.{name}")
    return found


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Tuple):
        return node.elts
    if isinstance(node, ast.BinOp):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return [node]
