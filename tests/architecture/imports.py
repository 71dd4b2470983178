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
    edges = edges_of(sources)
    known = {module: known_to(module, edges) for module in edges}
    found = {frozenset(o for o in known[module] if module in known[o]) for module in edges}
    return sorted(" <-> ".join(sorted(circle)) for circle in found if len(circle) > 1)


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
        found = set(edges.get(new.pop(), ())) - known
        known |= found
        new += found
    return known


def _target(found: Import, modules: Mapping[str, Source]) -> str | None:
    """Return the module that an import reads; None for a module that is not ours."""
    if found.name == VERSION:
        return None
    if found.name in modules:
        return found.name
    parent = found.name.rpartition(".")[0]
    return parent if parent in modules else None
