"""Cells check that their modules fit their inputs and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.cells import Cell, Repeat
from jaxserve.core.errors import InvalidCellError, InvalidGraphError
from tests.cells import modules
from tests.cells.modules import STATE, TOKEN

MODULE = modules.Embed(nnx.Rngs(0))


class Odd(nnx.Module):
    """A module that returns whatever it is told to."""

    def __init__(self, result):
        self.result = nnx.data(result)

    def __call__(self, x):
        return self.result(x) if callable(self.result) else self.result


def test_outputs_are_found():
    """They are derived from the module, or compared with those given."""
    assert str(Cell(MODULE, {"token": TOKEN}).outputs["x"]) == "float32[20]"
    Cell(MODULE, {"token": TOKEN}, {"x": STATE})
    with pytest.raises(InvalidCellError, match=r"int32\[\].*returns.*float32\[20\]"):
        Cell(MODULE, {"token": TOKEN}, {"x": TOKEN})


def test_inputs_must_be_those_of_the_module():
    """The module's own error is part of the message."""
    with pytest.raises(InvalidCellError, match="cell 'mine'.*unexpected keyword"):
        Cell(MODULE, {"word": TOKEN}, name="mine")


@pytest.mark.parametrize(
    "result, message",
    [(lambda x: x, "return a dict"), (lambda x: {"y": jnp.zeros(2)}, "leading batch axis")],
)
def test_results_must_be_batched_arrays(result, message):
    """A dict of arrays with a batch axis."""
    with pytest.raises(InvalidCellError, match=message):
        Cell(Odd(result), {"x": STATE})


def test_types_are_modules_with_a_signature():
    """The same module is one type; another module of the class, or other inputs, is another."""
    cell = Cell(MODULE, {"token": TOKEN})
    assert Cell(MODULE, {"token": TOKEN}, name="other").key == cell.key
    assert Cell(modules.Embed(nnx.Rngs(0)), {"token": TOKEN}).key != cell.key
    several = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert Cell(MODULE, {"token": several}).key != cell.key


def test_a_loop_must_fit_its_cell():
    """Carried, emitted and tested outputs are the cell's."""
    cell = modules.cells()["decoder"]
    with pytest.raises(InvalidCellError, match="'h': 'token'"):
        Repeat(cell, {"h": "token"})
    with pytest.raises(InvalidCellError, match="carry is empty"):
        Repeat(cell, {})
    with pytest.raises(InvalidCellError, match="no output 'word'"):
        Repeat(cell, {"h": "h"}, emits=["word"])
    with pytest.raises(InvalidCellError, match="one bool per row"):
        Repeat(cell, {"h": "h"}, lambda outputs: outputs["h"] > 0)
    with pytest.raises(InvalidGraphError, match="max_steps=0"):
        Repeat(cell, {"h": "h"})(max_steps=0, token=0, h=0.0, bias=0.0)
