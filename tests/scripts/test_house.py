"""What the report of the tree counts."""

from __future__ import annotations

import pytest

from scripts.house import counted, room_of

pytestmark = pytest.mark.fast

SOURCES = {
    "jaxserve/engine/parts.py": "class A: pass\n",
    "jaxserve/engine/engine.py": "from jaxserve.engine.parts import A\n\nclass B: pass\n"
    + "\n" * 80,
    "jaxserve/core/names.py": "class A: pass\n" + "\n" * 80,
    "sharding/mesh.py": "from jaxserve.engine import engine\n\x23 fmt: skip\nf(*(1, 2), *rest)\n",
    "tests/test_a.py": "from jaxserve.engine.engine import B\n\nclass A: pass\nf(*(1, 2))\n",
}


def test_what_is_counted():
    """Splinters and names are the product's; hidden arguments are found everywhere."""
    house = counted(SOURCES)
    assert house.rooms["jaxserve/engine"] == (84, 2)
    assert house.total(of_product=True) == (168, 4) and house.total(of_product=False) == (4, 1)
    assert house.splinters == ["jaxserve/engine/parts.py"]
    assert house.defined_twice == ["A"]
    assert house.star_tuples == ["sharding/mesh.py:3", "tests/test_a.py:4"]
    assert house.formatter_off == ["sharding/mesh.py:2"]
    assert room_of("jaxserve/version.py") == "jaxserve" and room_of("scripts/house.py") == "scripts"
