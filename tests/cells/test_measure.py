"""Batch sizes follow from measured times."""

from __future__ import annotations

import pytest

from jaxserve.cells import CellRuntime
from jaxserve.cells.measure import sized, sizes_that_pay
from jaxserve.core.errors import InvalidCellError
from tests.cells import modules
from tests.cells.models.alone import evaluate


@pytest.mark.parametrize(
    "seconds, sizes",
    [
        ({4: 1.0}, [4]),
        ({4: 1.0, 8: 1.8, 16: 3.5, 32: 5.0}, [4, 8]),
        ({4: 1.0, 8: 1.0, 16: 1.1}, [4, 8, 16]),
    ],
)
def test_batches_grow_while_rows_become_cheaper(seconds, sizes):
    """By a tenth with each size; what a larger one would save does not matter."""
    assert sizes_that_pay(seconds, 0.1) == sizes


@pytest.mark.release
def test_sized_cells_serve_the_nodes_of_the_others():
    """They have more sizes, and are of the same type."""
    cells = modules.cells()
    chosen = [cells["embed"], cells["merge"]]
    larger = sized(chosen, largest=8)
    for cell, given in zip(larger, chosen, strict=True):
        assert cell.batch_sizes in {(1, 4), (1, 4, 8)} and given.batch_sizes == (1, 4)
    with CellRuntime(larger, lambda tree: modules.tree_graph(cells, tree), warmup=False) as rt:
        expected = evaluate(modules.tree_graph(cells, (1, (2, 3))))["h"]
        assert modules.distance(rt.generate([(1, (2, 3))])[0]["h"], expected) < 1e-5
    with pytest.raises(InvalidCellError, match="increasing"):
        chosen[0].resized((4, 2))
