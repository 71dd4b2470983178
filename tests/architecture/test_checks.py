"""Each check of the architecture finds the faults that it is for, and accepts correct code."""

from __future__ import annotations

import pytest

from tests.architecture import imports, ownership, wiring
from tests.architecture.sources import made_up

pytestmark = pytest.mark.fast

ROWS = (("runtime",), ("engine",), ("memory",))
ARROWS = {"jaxserve": {"predictor"}, "predictor": set(), "tests": set()}


def test_an_import_against_the_arrows_is_found():
    """A wrong import is found in every kind of statement; the other direction passes."""
    wrong = made_up({"predictor/a.py": "def f():\n    from jaxserve.core import x\n"})
    assert imports.off_the_arrows(wrong, ARROWS) == ["predictor/a.py:2 imports jaxserve.core.x"]
    wrong = made_up({"jaxserve/core/a.py": "import tests.tiny\n"})
    assert imports.off_the_arrows(wrong, ARROWS) == ["jaxserve/core/a.py:1 imports tests.tiny"]
    fine = made_up({"jaxserve/core/a.py": "import predictor\nimport numpy\n"})
    assert imports.off_the_arrows(fine, ARROWS) == []


@pytest.mark.parametrize(
    "statement",
    [
        "from jaxserve.engine.loop import x",
        "import jaxserve.engine.loop",
        "from ..engine import loop",
        "def f():\n    from jaxserve.engine import loop",
        "if TYPE_CHECKING:\n    from jaxserve.engine import loop",
        "from jaxserve import Runtime",
    ],
)
def test_an_upward_import_is_found(statement):
    """The import is found in a function, for type checkers, and in the package's lazy names."""
    (wrong,) = imports.upward(made_up({"jaxserve/memory/a.py": statement}), ROWS)
    assert wrong.startswith("jaxserve/memory/a.py:")


def test_downward_imports_are_fine():
    """Imports from the same room, from rooms below, and of the version pass."""
    text = (
        "from jaxserve.engine import b\nimport jaxserve.memory.c\nfrom jaxserve import __version__"
    )
    assert imports.upward(made_up({"jaxserve/engine/a.py": text}), ROWS) == []


@pytest.mark.parametrize(
    "last", ["import p.a", "def f():\n    from p import a", "from .a import x"]
)
def test_a_circle_is_found(last):
    """A cycle of three modules is found, closed by any kind of import, also for type checkers."""
    sources = made_up(
        {
            "p/__init__.py": "",
            "p/a.py": "from p.b import x",
            "p/b.py": "if TYPE_CHECKING:\n    import p.c",
            "p/c.py": last,
            "p/d.py": "import p.a",
        }
    )
    assert imports.circles(sources) == ["p.a <-> p.b <-> p.c"]


def test_a_package_that_collects_its_modules_is_no_circle():
    """A package whose modules import each other by their own names passes."""
    sources = made_up(
        {
            "p/__init__.py": "from p.a import x\nfrom p.b import y",
            "p/a.py": "from p.b import y",
            "p/b.py": "",
        }
    )
    assert imports.circles(sources) == []
    sources.append(made_up({"p/b.py": "from p import x"})[0])
    assert imports.circles(sources) == ["p <-> p.a <-> p.b"]


OWNER = {
    "jaxserve/memory/knows.py": "from jaxserve.memory.cache import Cache",
    "jaxserve/memory/cache.py": (
        "class Cache:\n"
        "    disk: int\n"
        "    def __init__(self): self._size = 0\n"
        "    @property\n"
        "    def limit(self): ...\n"
        "    @limit.setter\n"
        "    def limit(self, value): ...\n"
    ),
}


def _stores(path: str, text: str, **allowed: set[str]) -> list[str]:
    text = "from jaxserve.memory.knows import x\n" + text
    sources = made_up(OWNER | {path: text})
    classes = ownership.classes_of(sources)
    stores = ownership.foreign_stores(sources, classes, allowed)
    return [store.what for store in stores]


@pytest.mark.parametrize(
    "text, what",
    [
        ("def f(cache): cache.disk = 1", "cache.disk"),
        ("def f(x): x._size += 1", "x._size"),
        ("def f(x): x.a, x.limit = 1, 2", "x.limit"),
        ("def f(x):\n    for x.disk in (): pass", "x.disk"),
        ("def f(x):\n    with x as x.disk: pass", "x.disk"),
        ("class A:\n    def f(self): del self.cache.disk", "self.cache.disk"),
        ("class A:\n    def __init__(self): self.disk = 0\ndef f(c: Cache): c.disk = 1", "c.disk"),
        ("class A:\n    disk: int\ndef f(cache): cache.disk = 1", "cache.disk"),
        ("def f():\n    cache = make()\n    cache.disk = 1", "cache.disk"),
        (
            "def f():\n    cache = Cache()\n    return lambda: g(cache)\ncache.disk = 1",
            "cache.disk",
        ),
    ],
)
def test_an_attribute_assigned_from_outside_is_found(text, what):
    """The assignment is found in every form, and under every name of the object."""
    assert _stores("jaxserve/engine/a.py", text) == [what]
    assert _stores("jaxserve/memory/a.py", text) == [what]


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self): self.disk = 1",
        "def f():\n    cache = Cache()\n    cache.disk = 1",
        "class A:\n    disk: int\ndef f(a): a.disk = 1",
        "def f(column): column.justify = 'left'",
        "def f(cache): return cache.disk",
    ],
)
def test_what_is_ones_own_may_be_assigned(text):
    """Objects made in the same function, of the same module, and of libraries pass."""
    assert _stores("jaxserve/engine/a.py", text) == []


def test_what_a_module_does_not_know_is_a_librarys():
    """An attribute of the same name in an unrelated package does not make a class the owner."""
    sources = made_up(OWNER | {"jaxserve/engine/a.py": "def f(x): x.disk = 1"})
    assert ownership.foreign_stores(sources, ownership.classes_of(sources), {}) == []


def test_a_replaced_method_is_found_where_methods_count():
    """A test that replaces a method patches it."""
    text = "from jaxserve.memory.cache import Cache\ndef f(cache): cache.read = lambda: 1"
    owner = {"jaxserve/memory/cache.py": "class Cache:\n    def read(self): ..."}
    sources = made_up(owner | {"tests/a.py": text})
    for with_methods in (False, True):
        classes = ownership.classes_of(sources, with_methods=with_methods)
        assert len(ownership.foreign_stores(sources, classes, {})) == with_methods


def test_writers_are_allowed_by_class_and_module():
    """Only the module that is named for the class may write it."""
    text = "def f(cache): cache.disk = 1"
    assert _stores("jaxserve/memory/a.py", text, Cache={"jaxserve/memory/a.py"}) == []
    assert _stores("jaxserve/memory/b.py", text, Cache={"jaxserve/memory/a.py"}) == ["cache.disk"]


def test_rooms_are_told_from_modules():
    """The same assignment is across rooms from one module, and inside the room from another."""
    text = "import jaxserve.memory.cache\ndef f(cache): cache.disk = 1"
    sources = made_up(OWNER | {"jaxserve/engine/a.py": text, "jaxserve/memory/b.py": text})
    stores = ownership.foreign_stores(sources, ownership.classes_of(sources), {})
    assert [store.source.room for store in stores] == ["engine", "memory"]
    assert [store.source.room for store in ownership.across_rooms(stores)] == ["engine"]


@pytest.mark.parametrize(
    "text",
    [
        "x._y",
        "x._y = 1",
        "x()._y()",
        "from a import _y",
        "from a._y import z",
        "getattr(x, '_y')",
        "monkeypatch.setattr(x, '_y', 1)",
        "monkeypatch.setattr('a.b._y', 1)",
        "class A:\n    def f(self): return self.x._y",
    ],
)
def test_a_private_reach_is_found(text):
    """A private name is found if it is read, written, imported or patched."""
    (found,) = wiring.private_reaches(made_up({"tests/a.py": text}))
    assert found.startswith("tests/a.py:") and found.endswith("_y")
    assert wiring.private_reaches(made_up({"tests/a.py": text}), {"tests/a.py _y"}) == []


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self): return self._y",
        "class A:\n    def __init__(self): self._y = 1\n    def __eq__(self, o): return o._y",
        "x.__dict__",
        "x._repr_png_()",
        "for _ in y: pass",
    ],
)
def test_own_private_names_are_fine(text):
    """Private names of self, of another object of the same class, and of Python pass."""
    assert wiring.private_reaches(made_up({"tests/a.py": text})) == []


@pytest.mark.parametrize(
    "text, name",
    [
        ("isinstance(x, DeviceExecutor)", "DeviceExecutor"),
        ("isinstance(x, a.b.StagedExecutor | None)", "StagedExecutor"),
        ("isinstance(x, (int, Runtime))", "Runtime"),
        ("hasattr(x, 'resize')", "resize"),
    ],
)
def test_an_object_that_is_asked_what_it_is_is_found(text, name):
    """A check of an object's class or of its attributes is found."""
    assert len(wiring.probes(made_up({"jaxserve/runtime/a.py": text}))) == 1
    allowed = {f"jaxserve/runtime/a.py {name}"}
    assert wiring.probes(made_up({"jaxserve/runtime/a.py": text}), allowed) == []


def test_values_may_be_asked_what_they_are():
    """Checks of errors and of users' values pass."""
    text = "isinstance(x, ValueError)\nhasattr(x, '__iter__')\nexecutor.can_resize"
    assert wiring.probes(made_up({"jaxserve/runtime/a.py": text})) == []


@pytest.mark.parametrize(
    "text",
    [
        "monkeypatch.setattr(x, 'y', 1)",
        "monkeypatch.setattr('a.b.y', 1)",
        "patched.delattr(x, 'y')",
        "mock.patch('a.y')",
        "mock.patch.object(x, 'y')",
        "setattr(x, 'y', 1)",
    ],
)
def test_a_patch_is_found(text):
    """A patch is found with every tool."""
    assert len(wiring.patches(made_up({"tests/a.py": text}))) == 1
    assert wiring.patches(made_up({"tests/a.py": text}), {"tests/a.py y"}) == []


def test_surroundings_may_be_set():
    """A test may set environment variables, the working directory and importable modules."""
    text = "m.setenv('A', 'b')\nm.chdir('/')\nm.setitem(sys.modules, 'ray', None)"
    assert wiring.patches(made_up({"tests/a.py": text})) == []
