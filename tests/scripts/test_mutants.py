"""The mutants fit the sources, and what pytest says of them is read right."""

from __future__ import annotations

import pytest

from scripts.mutants import ROOT, read_mutants, verdict_of

pytestmark = pytest.mark.fast

MUTANTS = read_mutants()
# Room -> the folder of its sources; of a file, the first room counts.
ROOMS = {
    "sampling": "jaxserve/steps/sampling/",
    "steps": "jaxserve/steps/",
    "scheduling": "jaxserve/scheduling/",
    "memory": "jaxserve/memory/",
    "engine": "jaxserve/engine/",
    "kernels": "pallas_kernels/",
    "models": "jaxserve/models/",
    "server": "jaxserve/server/",
    "cells": "jaxserve/cells/",
    "planning": "jaxserve/planning/",
    "predictor": "predictor/",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_sources(mutant):
    """Its text occurs once in one line, the file compiles with the fault, and its tests exist."""
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    changed = mutant.applied(source)
    assert changed != source and "\n" not in mutant.old + mutant.new
    if mutant.path.endswith(".py"):
        compile(changed, mutant.path, "exec")
    assert mutant.tests and all((ROOT / path).exists() for path in mutant.tests)
    assert mutant.what.endswith(".")


def test_every_room_has_mutants():
    """There are 60 or more, of different names, and at least four in each room."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    rooms = [next(r for r, path in ROOMS.items() if m.path.startswith(path)) for m in MUTANTS]
    assert all(rooms.count(room) >= 4 for room in ROOMS)


@pytest.mark.parametrize(
    ("returncode", "output", "verdict"),
    [
        (0, "3 passed", (False, "")),
        (5, "3 deselected", (False, "")),
        (1, "FAILED tests/a.py::test_b - x\n", (True, "tests/a.py::test_b")),
        (2, "ERROR tests/a.py - NameError\n", (True, "tests/a.py")),
        (4, "ImportError while loading conftest '/x/tests/conftest.py'.", (True, "at import")),
        (-11, "Fatal Python error: Segmentation fault", (True, "killed by SIGSEGV")),
    ],
)
def test_exit_codes_of_pytest(returncode, output, verdict):
    """A failed, broken or crashed run catches a mutant; a run without tests does not."""
    assert verdict_of(returncode, output) == verdict


@pytest.mark.parametrize("returncode", [2, 3, 4, -9])
def test_a_run_that_says_nothing_is_an_error(returncode):
    """An interrupted run, an internal error or a wrong argument does not count as caught."""
    with pytest.raises(RuntimeError, match=f"ended with {returncode}"):
        verdict_of(returncode, "no tests ran")
