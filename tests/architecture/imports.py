"""Checks of imports: modules import downward only, and not in a cycle."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from tests.architecture.sources import Import, Source, modules_named

VERSION = "jaxserve.__version__"


def off_the_arrows(sources: Iterable[Source], arrows: Mapping[str, Collection[str]]) -> list[str]:
    """Return the imports of one of our packages by another without an arrow between them.

    Args:
      arrows: for each package, the packages that it may import besides itself. A package without
        arrows (scripts, tests) may not be imported by any other.
    """
    return [
        f"{found.where} imports {found.name}"
        for source in sources
        for found in source.imports
        if found.top in arrows and found.top not in {source.package, *arrows[source.package]}
    ]


def upward(sources: Iterable[Source], rows: Sequence[Collection[str]]) -> list[str]:
    """Return the imports by a module of jaxserve from a room above its own.

    Imports for type checkers count, so types must come from below too. The lazy names of jaxserve
    itself are above all rooms, except its version.
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
    """Return the cycles of modules that import each other, directly or indirectly; one line each.

    Every import statement counts, also in functions and for type checkers. The implicit import of
    a package's `__init__` before its modules does not count.
    """
    found = _components(edges_of(sources))
    return [" <-> ".join(sorted(component)) for component in found if len(component) > 1]


def edges_of(sources: Iterable[Source]) -> dict[str, list[str]]:
    """Return the modules that each module imports directly, in any scope, for type checkers too."""
    modules = modules_named(sources)
    return {
        name: sorted({_target(found, modules) or name for found in source.imports} - {name})
        for name, source in modules.items()
    }


def known_to(module: str, edges: Mapping[str, Sequence[str]]) -> set[str]:
    """Return a module and all modules that it imports, directly or indirectly."""
    known, new = {module}, [module]
    while new:
        new = [name for name in edges.get(new.pop(), ()) if name not in known] + new
        known.update(new)
    return known


def _target(found: Import, modules: Mapping[str, Source]) -> str | None:
    """Return the module that an import reads; None for a module that is not ours."""
    if found.name == VERSION:
        return None
    if found.name in modules:
        return found.name
    parent = found.name.rpartition(".")[0]
    return parent if parent in modules else None


def _components(edges: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Return the strongly connected components (Tarjan 1972, without recursion)."""
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
