"""Cells check that their modules fit their inputs and outputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.cells import Cell, Repeat
from jaxserve.core.errors import InvalidCellError, InvalidGraphError
from tests.cells import modules
from tests.cells.modules import SIZE, STATE, TOKEN

MODULE = modules.Embed(nnx.Rngs(0))


class Odd(nnx.Module):
    """A module that returns whatever it is told to."""

    def __init__(self, result):
        self.result = nnx.data(result)

    def __call__(self, x):
        return self.result(x) if callable(self.result) else self.result


class Wrapped(nnx.Module):
    """A module of one layer."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return {"y": self.layer(x)}


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


def test_structures_are_refused():
    """Each input and output is one array; the error says to name the parts."""
    pair: Any = (STATE, STATE)
    with pytest.raises(InvalidCellError, match="input 'x' is a tuple.*such as h and c"):
        Cell(Odd(lambda x: {"x": x[0]}), {"x": pair})
    with pytest.raises(InvalidCellError, match="output 'x' is a tuple"):
        Cell(MODULE, {"token": TOKEN}, {"x": pair})


@pytest.mark.parametrize("layer", ["dropout", "norm"])
def test_a_module_must_not_change_its_state(layer: str):
    """The error says so, and what to do; then the module is taken."""
    rngs = nnx.Rngs(0)
    layers = {"dropout": nnx.Dropout(0.5, rngs=rngs), "norm": nnx.BatchNorm(SIZE, rngs=rngs)}
    module = Wrapped(layers[layer])
    with pytest.raises(InvalidCellError, match=r"changes its own state.*module\.eval\(\)"):
        Cell(module, {"x": STATE})
    module.eval()
    assert list(Cell(module, {"x": STATE}).outputs) == ["y"]


@pytest.mark.parametrize(
    "result, message",
    [
        (lambda x: x, "return a dict"),
        (lambda x: {"y": jnp.zeros(2)}, "leading batch axis"),
        (lambda x: {"y": (x, x)}, "output 'y' is a tuple"),
    ],
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
