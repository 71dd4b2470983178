"""Tasks of gated cells on CPUs: a runtime runs all of a call in one kernel."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.cells import CellRuntime
from jaxserve.cells.layout import CellLayout
from jaxserve.cells.models import CellModel
from jaxserve.cells.programs import CellPrograms
from jaxserve.core.errors import NumericalError
from jaxserve.kernels import build
from jaxserve.testing import ExecutorWrapper, WrapAll
from tests.cells.models.alone import evaluate
from tests.cells.shipped import model_of

pytestmark = pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")

# States of more than 64 bytes lie in slots.
VOCAB = 13
CHAINS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 0]]
TREES = [((1, 2), (3, (4, 5))), 6, (7, 8)]


def _model(name: str) -> tuple[CellModel, list]:
    model = model_of(name, vocab=VOCAB, embed=5, hidden=20)
    return model, TREES if "tree" in name else CHAINS


@pytest.mark.parametrize("name", ["lstm", "folded_lstm", "tree", "folded_tree"])
def test_answers_are_those_of_the_modules(name):
    """Both states of every request, alone and in a mix, whatever the order of h and c is."""
    model, inputs = _model(name)
    assert all(CellPrograms(CellLayout(model.cells), has_flat=True).is_flat)
    with CellRuntime(model.cells, model.unfold, progress=False, warmup=False) as rt:
        mixed = rt.generate(inputs)
        (alone,) = rt.generate(inputs[:1])
        rt.check_integrity()
    for state in ("h", "c"):
        np.testing.assert_array_equal(alone[state], mixed[0][state])
        for given, got in zip(inputs, mixed, strict=True):
            wanted = evaluate(model.unfold(given))[state]
            np.testing.assert_allclose(got[state], wanted, rtol=1e-5, atol=1e-6)


class Watched(ExecutorWrapper):
    """An executor that notes the types of submitted tasks, and when results are collected."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.seen: list[str] = []

    def submit(self, worker: int, tasks: Any) -> list[Any]:
        self.seen.append(f"type {tasks[0].type}")
        return [WatchedHandle(handle, self.seen) for handle in self.inner.submit(worker, tasks)]


class WatchedHandle(ExecutorWrapper):
    """The handle of such a task."""

    def __init__(self, inner: Any, seen: list[str]):
        super().__init__(inner)
        self._seen = seen

    def collect(self) -> Any:
        self._seen.append("collected")
        return self.inner.collect()


def test_pairs_of_a_tree_run_before_the_results_of_its_leaves_are_collected():
    """No request waits for those. A small call runs at once, so all is then collected together."""
    model, _ = _model("tree")
    watched = WrapAll(Watched)
    with CellRuntime(model.cells, model.unfold, warmup=False, wrap_executor=watched) as rt:
        rt.generate([((1, 2), 3)], progress=False)
    assert watched.executors[0].seen == ["type 0", "type 1", "collected", "collected"]


@pytest.mark.parametrize("name", ["lstm", "tree"])
def test_eight_devices(name):
    """Values follow the nodes that take them; the bits are those of one device."""
    model, inputs = _model(name)
    inputs = inputs * 16
    several = {"devices": jax.devices()[:8], "max_tasks_to_submit": 1, "max_in_flight": 1}
    few = [cell.resized((1, 4)) for cell in model.cells]
    answers, groups = [], set()
    for cells, options in ((model.cells, {}), (few, several)):
        with CellRuntime(cells, model.unfold, progress=False, warmup=False, **options) as rt:
            answers.append(rt.generate(inputs))
            groups = {step.group for step in rt.report().steps}
            rt.check_integrity()
    assert groups == set(range(8))
    for alone, spread in zip(*answers, strict=True):
        for state in ("h", "c"):
            np.testing.assert_array_equal(spread[state], alone[state])


def test_a_result_that_is_not_finite_ends_its_request_alone():
    """Its error names the node; requests of the same tasks have the bits that they have alone."""
    model, _ = _model("lstm")
    cell: Any = model.cells[0]
    table = cell.module.table
    table[...] = table[...].at[12].set(np.nan)
    with CellRuntime(model.cells, model.unfold, progress=False, warmup=False) as rt:
        good, bad, other = rt.generate([[1, 2, 3], [4, 12, 0], [5, 6, 7, 8]])
        (alone,) = rt.generate([[5, 6, 7, 8]])
        rt.check_integrity()
    assert isinstance(bad.error, NumericalError) and "node 1 (cell 'lstm')" in str(bad.error)
    assert good.error is None and np.isfinite(good["h"]).all()
    np.testing.assert_array_equal(other["h"], alone["h"])
