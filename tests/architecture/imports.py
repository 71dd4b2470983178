"""Checks of who imports whom: downward only, never in a circle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from tests.architecture.sources import Import, Source, modules_named

VERSION = "jaxserve.__version__"


def off_the_arrows(sources: Iterable[Source], arrows: Mapping[str, Collection[str]]) -> list[str]:
    """Imports of a package of ours to which no arrow points.

    Args:
      arrows: by package, the packages that it may import beside itself; what no arrow starts at
        (scripts, tests) may be imported by none.
    """
    return [
        f"{found.where} imports {found.name}"
        for source in sources
        for found in source.imports
        if found.top in arrows and found.top not in {source.package, *arrows[source.package]}
    ]


def upward(sources: Iterable[Source], rows: Sequence[Collection[str]]) -> list[str]:
    """Imports by a module of jaxserve from a room that is neither its own nor in a row below.

    Imports for type checkers count: a type is known only downward, too. The lazy names of
    jaxserve itself stand above all rooms, except its version.
    """
    row_of = {room: number for number, rooms in enumerate(rows) for room in rooms}
    wrong = []
    for source in sources:
        if source.room is None:
            continue
        for found in source.imports:
            other = _room_of(found, row_of)
            if other is None or other == source.room:
                continue
            if row_of.get(other, -1) <= row_of[source.room]:
                wrong.append(f"{found.where} ({source.room}) imports {found.name} ({other})")
    return wrong


def _room_of(found: Import, row_of: Mapping[str, int]) -> str | None:
    parts = found.name.split(".")
    if parts[0] != "jaxserve" or found.name == VERSION:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in row_of else "__main__"


def circles(sources: Iterable[Source]) -> list[str]:
    """Modules that import each other, directly or through others; one line a circle.

    Every import statement counts, also in functions and for type checkers. That a module runs its
    packages' `__init__` first does not.
    """
    found = _components(edges_of(sources))
    return [" <-> ".join(sorted(component)) for component in found if len(component) > 1]


def edges_of(sources: Iterable[Source]) -> dict[str, list[str]]:
    """The modules that each module imports, directly, in a function or for type checkers."""
    modules = modules_named(sources)
    return {
        name: sorted({_target(found, modules) or name for found in source.imports} - {name})
        for name, source in modules.items()
    }


def known_to(module: str, edges: Mapping[str, Sequence[str]]) -> set[str]:
    """A module, and all that it imports, directly or through others."""
    known, new = {module}, [module]
    while new:
        new = [name for name in edges.get(new.pop(), ()) if name not in known] + new
        known.update(new)
    return known


def _target(found: Import, modules: Mapping[str, Source]) -> str | None:
    """The module that an import reads; None for one that is not ours."""
    if found.name == VERSION:
        return None
    if found.name in modules:
        return found.name
    parent = found.name.rpartition(".")[0]
    return parent if parent in modules else None


def _components(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Strongly connected components (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in edges:
        if root in index:
            continue
        path = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while path:
            name, targets = path[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    path.append((target, iter(edges[target])))
                    break
                if target in stack:
                    low[name] = min(low[name], index[target])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[name])
                if low[name] == index[name]:
                    at = stack.index(name)
                    found.append(stack[at:])
                    del stack[at:]
    return found
