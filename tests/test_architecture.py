"""The house stays as DESIGN.md section 2 draws it: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package -> those of ours that it may import.
PACKAGES = {
    "predictor": set(),
    "pallas_kernels": set(),
    "sharding": set(),
    "jaxserve": {"predictor", "pallas_kernels", "sharding"},
}
VISITORS = ("scripts", "benchmarks", "notebooks", "tests")

# Who may know how long a measured answer will be: never a policy, but one that is called an oracle.
KNOW_FORCED_LENGTHS = {
    "core/request.py",
    "core/sampling_params.py",
    "execution/simulated.py",
    "steps/slots.py",
    "scheduling/admission/oracle.py",
    "scheduling/plan.py",
    "scheduling/scheduler.py",
    "workload/item.py",
    "workload/recorded.py",
}

# Rooms of jaxserve/, top to bottom; a module imports from its own room and from rows below.
ROWS = (
    ("__main__",),
    ("testing",),
    ("cli", "server"),
    ("fleet",),
    ("runtime",),
    ("report",),
    ("conversations",),
    ("planning",),
    ("cells",),
    ("engine",),
    ("execution",),
    ("steps",),
    ("scheduling",),
    ("memory",),
    ("models",),
    ("workload",),
    ("core",),
)
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}

CORE_DEPENDENCIES = {
    *("jax", "flax", "optax", "orbax", "numpy", "transformers", "safetensors", "tokenizers"),
    *("tqdm", "rich", "typer", "matplotlib"),
    *("jaxlib", "ml_dtypes"),  # parts of JAX
}
ARRAY_DEPENDENCIES = {"jax", "flax", "optax", "orbax", "numpy", "jaxlib", "ml_dtypes"}
THIRD_PARTY = {
    "predictor": ARRAY_DEPENDENCIES | {"safetensors", "tokenizers", "tqdm"},
    "pallas_kernels": ARRAY_DEPENDENCIES,
    "sharding": ARRAY_DEPENDENCIES,
    "jaxserve": CORE_DEPENDENCIES,
}
JAX_FREE_ROOMS = ("scheduling", "memory", "core", "workload")
JAX_PACKAGES = {"jax", "jaxlib", "flax", "optax", "orbax", "transformers", "pallas_kernels"}


@dataclass(frozen=True)
class Import:
    """One imported dotted name, where it stands, and whether it runs when the module does."""

    name: str
    where: str
    at_module_level: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def _modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imports(path: Path) -> Iterator[Import]:
    """Every import of a module, absolute names; those for type checkers alone are left out."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]

    def walk(node: ast.AST, at_module_level: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            where = f"{path.relative_to(ROOT)}:{getattr(child, 'lineno', '?')}"
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, where, at_module_level)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package[: len(package) - child.level + 1]
                    base = ".".join((*above, *filter(None, [base])))
                for alias in child.names:
                    yield Import(f"{base}.{alias.name}", where, at_module_level)
            elif _is_type_checking(child):
                for other in child.orelse:  # type: ignore[attr-defined]
                    yield from walk(other, at_module_level)
            else:
                inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, at_module_level and not inside)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def _ours() -> set[str]:
    return {*PACKAGES, *VISITORS}


def _room(module: Path) -> str | None:
    """The room of a module of jaxserve/; None for the package's own `__init__`."""
    parts = module.relative_to(ROOT / "jaxserve").with_suffix("").parts
    return None if parts == ("__init__",) else parts[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_along_the_arrows(package: str):
    """Each top-level package imports none of ours but those its arrow points to."""
    wrong = [
        f"{found.where} imports {found.name}"
        for module in _modules(package)
        for found in _imports(module)
        if found.top in _ours() - PACKAGES[package] - {package}
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_import_only_from_rows_below():
    """A module of jaxserve imports from its own room, or from rooms further down."""
    wrong = []
    for module in _modules("jaxserve"):
        room = _room(module)
        if room is None:
            continue
        for found in _imports(module):
            parts = found.name.split(".")
            # `from jaxserve import __version__` and the lazy names of jaxserve/__init__ have no
            # row; only the top of the house may reach for them.
            if parts[0] != "jaxserve":
                continue
            other = parts[1] if len(parts) > 1 and parts[1] in ROW_OF else "__main__"
            is_version = parts[1:] == ["__version__"]
            if other != room and ROW_OF[other] <= ROW_OF[room] and not is_version:
                wrong.append(f"{found.where} ({room}) imports {found.name} ({other})")
    assert not wrong, "\n".join(wrong)


def test_forced_lengths_are_hidden_from_policies():
    """Only what carries out or checks an answer's end names its forced length."""
    for module in _modules("jaxserve"):
        text = module.read_text(encoding="utf-8")
        if "forced_length" in text or "end_length" in text:
            assert str(module.relative_to(ROOT / "jaxserve")) in KNOW_FORCED_LENGTHS, module


def test_every_room_has_its_row():
    """Nothing stands in jaxserve/ that DESIGN.md does not place."""
    rooms = {_room(module) for module in _modules("jaxserve")} - {None}
    assert rooms <= set(ROW_OF)


@pytest.mark.parametrize("package", PACKAGES)
def test_third_party_imports_are_core_dependencies(package: str):
    """At module level only core dependencies are imported; extras wait until they are used."""
    allowed = THIRD_PARTY[package] | set(PACKAGES) | set(sys.stdlib_module_names)
    wrong = [
        f"{found.where} imports {found.name}"
        for module in _modules(package)
        for found in _imports(module)
        if found.at_module_level and found.top not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", JAX_FREE_ROOMS)
def test_bookkeeping_names_no_jax(room: str):
    """The rooms that promise to do without JAX import nothing that brings it along."""
    wrong = [
        f"{found.where} imports {found.name}"
        for module in _modules(f"jaxserve/{room}")
        for found in _imports(module)
        if found.top in JAX_PACKAGES
    ]
    assert not wrong, "\n".join(wrong)


def test_bookkeeping_loads_no_jax():
    """Importing every module of the JAX-free rooms leaves JAX out of the process."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in JAX_FREE_ROOMS
        for path in _modules(f"jaxserve/{room}")
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"sys.exit(', '.join(sorted({JAX_PACKAGES!r} & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"loaded: {done.stderr}"
