"""Each check of the architecture finds the faults that it is for, and accepts correct code."""

from __future__ import annotations

import pytest

from tests.architecture import imports, ownership, wiring
from tests.architecture.sources import made_up

pytestmark = pytest.mark.fast

ROWS = (("runtime",), ("engine",), ("memory",))
ARROWS = {"jaxserve": {"predictor"}, "predictor": set(), "tests": set()}


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        (
            "predictor/a.py",
            "def f():\n    from jaxserve.core import x\n",
            ["predictor/a.py:2 imports jaxserve.core.x"],
        ),
        ("jaxserve/core/a.py", "import tests.tiny\n", ["jaxserve/core/a.py:1 imports tests.tiny"]),
        ("jaxserve/core/a.py", "import predictor\nimport numpy\n", []),
    ],
)
def test_imports_against_the_arrows(path, text, found):
    assert imports.off_the_arrows(made_up({path: text}), ARROWS) == found


@pytest.mark.parametrize(
    ("room", "statement", "num_found"),
    [
        ("memory", "from jaxserve.engine.loop import x", 1),
        ("memory", "import jaxserve.engine.loop", 1),
        ("memory", "from ..engine import loop", 1),
        ("memory", "def f():\n    from jaxserve.engine import loop", 1),
        ("memory", "if TYPE_CHECKING:\n    from jaxserve.engine import loop", 1),
        ("memory", "from jaxserve import Runtime", 1),  # a lazy name
        ("engine", "from jaxserve.engine import b\nimport jaxserve.memory.c", 0),
        ("engine", "from jaxserve import __version__", 0),
    ],
)
def test_upward_imports(room, statement, num_found):
    path = f"jaxserve/{room}/a.py"
    found = imports.upward(made_up({path: statement}), ROWS)
    assert len(found) == num_found and all(each.startswith(f"{path}:") for each in found)


@pytest.mark.parametrize(
    "last", ["import p.a", "def f():\n    from p import a", "from .a import x"]
)
def test_a_circle_is_found(last):
    """A cycle of three modules is found, closed by any kind of import, also for type checkers."""
    files = {"p/__init__.py": "", "p/a.py": "from p.b import x", "p/c.py": last}
    files |= {"p/b.py": "if TYPE_CHECKING:\n    import p.c", "p/d.py": "import p.a"}
    assert imports.circles(made_up(files)) == ["p.a <-> p.b <-> p.c"]


def test_a_package_that_collects_its_modules_is_no_circle():
    """A package whose modules import each other by their own names passes."""
    collects = "from p.a import x\nfrom p.b import y"
    files = {"p/__init__.py": collects, "p/a.py": "from p.b import y", "p/b.py": ""}
    assert imports.circles(made_up(files)) == []
    files["p/b.py"] = "from p import x"
    assert imports.circles(made_up(files)) == ["p <-> p.a <-> p.b"]


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
        "    def read(self): ..."
    ),
}
_KNOWS = "from jaxserve.memory.knows import x\n"


def _stores(path: str, text: str, *, with_methods: bool = False, **allowed: set[str]) -> list[str]:
    sources = made_up(OWNER | {path: text})
    classes = ownership.classes_of(sources, with_methods=with_methods)
    stores = ownership.foreign_stores(sources, classes, allowed)
    return [store.what for store in stores]


@pytest.mark.parametrize(
    ("text", "found"),
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
        # Objects made in the same function, of the same module, and of libraries.
        ("class A:\n    def f(self): self.disk = 1", None),
        ("def f():\n    cache = Cache()\n    cache.disk = 1", None),
        ("class A:\n    disk: int\ndef f(a): a.disk = 1", None),
        ("def f(column): column.justify = 'left'", None),
        ("def f(cache): return cache.disk", None),
    ],
)
def test_attributes_assigned_from_outside(text, found):
    """The assignment is found in every form, and under every name of the object."""
    for room in ("engine", "memory"):
        assert _stores(f"jaxserve/{room}/a.py", _KNOWS + text) == [found] * (found is not None)


def test_what_a_module_does_not_know_is_a_librarys():
    """An attribute of the same name in an unrelated package does not make a class the owner."""
    assert _stores("jaxserve/engine/a.py", "def f(x): x.disk = 1") == []


def test_a_replaced_method_is_found_where_methods_count():
    """A test that replaces a method patches it."""
    text = _KNOWS + "def f(cache): cache.read = lambda: 1"
    assert _stores("tests/a.py", text) == []
    assert _stores("tests/a.py", text, with_methods=True) == ["cache.read"]


def test_writers_are_allowed_by_class_and_module():
    """Only the module that is named for the class may write it."""
    text = _KNOWS + "def f(cache): cache.disk = 1"
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
    ("check", "text", "name"),
    [
        (wiring.private_reaches, "x._y", "_y"),
        (wiring.private_reaches, "x._y = 1", "_y"),
        (wiring.private_reaches, "x()._y()", "_y"),
        (wiring.private_reaches, "from a import _y", "_y"),
        (wiring.private_reaches, "from a._y import z", "_y"),
        (wiring.private_reaches, "getattr(x, '_y')", "_y"),
        (wiring.private_reaches, "monkeypatch.setattr(x, '_y', 1)", "_y"),
        (wiring.private_reaches, "monkeypatch.setattr('a.b._y', 1)", "_y"),
        (wiring.private_reaches, "class A:\n    def f(self): return self.x._y", "_y"),
        (wiring.probes, "isinstance(x, DeviceExecutor)", "DeviceExecutor"),
        (wiring.probes, "isinstance(x, a.b.StagedExecutor | None)", "StagedExecutor"),
        (wiring.probes, "isinstance(x, (int, Runtime))", "Runtime"),
        (wiring.probes, "hasattr(x, 'resize')", "resize"),
        (wiring.patches, "monkeypatch.setattr(x, 'y', 1)", "y"),
        (wiring.patches, "monkeypatch.setattr('a.b.y', 1)", "y"),
        (wiring.patches, "patched.delattr(x, 'y')", "y"),
        (wiring.patches, "mock.patch('a.y')", "y"),
        (wiring.patches, "mock.patch.object(x, 'y')", "y"),
        (wiring.patches, "setattr(x, 'y', 1)", "y"),
    ],
)
def test_objects_that_are_not_used_by_what_they_declare(check, text, name):
    """Private names, questions about an object's class, and patches are found, or allowed."""
    (found,) = check(made_up({"tests/a.py": text}))
    assert found.startswith("tests/a.py:")
    assert check(made_up({"tests/a.py": text}), {f"tests/a.py {name}"}) == []


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (wiring.private_reaches, "class A:\n    def f(self): return self._y"),
        (
            wiring.private_reaches,
            "class A:\n    def __init__(self): self._y = 1\n    def __eq__(self, o): return o._y",
        ),
        (wiring.private_reaches, "x.__dict__\nx._repr_png_()\nfor _ in y: pass"),
        # Errors and users' values.
        (wiring.probes, "isinstance(x, ValueError)\nhasattr(x, '__iter__')\nexecutor.can_resize"),
        # A program's surroundings.
        (wiring.patches, "m.setenv('A', 'b')\nm.chdir('/')\nm.setitem(sys.modules, 'ray', None)"),
    ],
)
def test_what_may_be_done_with_objects(check, text):
    assert check(made_up({"tests/a.py": text})) == []
