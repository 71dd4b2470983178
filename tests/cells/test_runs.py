"""Tasks whose rows stay in their slots give the same bits as tasks that gather and scatter."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.cells import Cell, CellRuntime, Graph, Repeat
from jaxserve.cells.layout import TRASH_SLOT, ZERO_SLOT, CellLayout
from jaxserve.cells.models import GRU, CellModel, Embedded
from jaxserve.cells.programs import sources_of, stay_in_place
from jaxserve.cells.values import ValueSpec
from tests.cells.shipped import model_of
from tests.common.tiers import some

HIDDEN, VOCAB = 20, 11
STATE, NUMBER = ValueSpec((HIDDEN,), np.dtype(np.float32)), ValueSpec((), np.dtype(np.int32))


class _Mixing(nnx.Module):
    """It reads `context` in each step; `x` is the state `h` of the step before."""

    def __init__(self, rngs: nnx.Rngs):
        self.mix = nnx.Linear(3 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, context, x, h, limit):
        new = jnp.tanh(self.mix(jnp.concatenate([context, x, h], axis=-1)))
        return {"h": new, "is_far": new.sum(-1) > limit, "other": h + x}


def _mixing_model() -> CellModel:
    inputs = {"context": STATE, "x": STATE, "h": STATE, "limit": ValueSpec((), STATE.dtype)}
    cell = Cell(_Mixing(nnx.Rngs(0)), inputs, batch_sizes=(4,))
    loop = Repeat(cell, {"h": "h"}, lambda outputs: outputs["is_far"], emits=["h"])
    carried = {"context": "other", "x": "h", "h": "h"}

    def unfold(tokens) -> Graph:
        given = np.linspace(-1, 1, HIDDEN, dtype=np.float32) * len(tokens)
        chain = cell.chain(
            {"limit": np.array(tokens, np.float32)}, carried, context=given, x=given, h=0.0
        )
        end = loop(context=chain["h"], x=given, h=0.5, limit=len(tokens) / 2, max_steps=9)
        return Graph({"h": end["h"], "other": end["other"], "steps": end.steps("h")})

    return CellModel((cell, loop), unfold)


@pytest.mark.parametrize(
    "name", some(["lstm", "gru", "stacked", "mixing", "seq2seq", "beam_search"], 0, 4)
)
def test_bits_do_not_depend_on_runs(name):
    """One task a call, which gathers and scatters, gives what many tasks a call give."""
    shape = {"vocab": VOCAB, "embed": HIDDEN, "hidden": HIDDEN, "sizes": (1, 4)}
    model = _mixing_model() if name == "mixing" else model_of(name, **shape)
    random = np.random.default_rng(0)
    inputs = [random.integers(0, VOCAB, num).tolist() for num in (7, 2, 12, 1, 9, 6, 8)]
    found = []
    for num_tasks in (1, 16):
        options = {"max_tasks_to_submit": num_tasks, "warmup": False, "progress": False}
        with CellRuntime(model.cells, model.unfold, **options) as rt:
            found.append(rt.generate(inputs))
    for one, many in zip(*found, strict=True):
        assert one.finish_reason == many.finish_reason != "error"
        assert one.values.keys() == many.values.keys()
        for key, value in one.values.items():
            assert value.tobytes() == many[key].tobytes()


def test_which_tasks_of_a_chain_stay():
    """A run ends where a row begins, leaves, moves, or reads another value."""
    cell = Cell(
        Embedded(GRU(4, HIDDEN, rngs=nnx.Rngs(0)), VOCAB, rngs=nnx.Rngs(0)),
        {"token": NUMBER, "h": STATE},
    )
    layout = CellLayout([cell])
    (t,) = layout.types
    sources = sources_of(t)
    assert sources == (-1, 0)
    padding = [ZERO_SLOT, ZERO_SLOT, TRASH_SLOT, 0]
    rows = (
        [[-1, ZERO_SLOT, 5, 1], padding],
        [[-1, 5, 5, 2], padding],  # stays
        [[-1, 5, 5, 3], [-1, ZERO_SLOT, 6, 3]],  # a row begins
        [[-1, 5, 5, 3], [-1, 6, 6, 3]],  # stays
        [[-1, 6, 6, 3], [-1, 5, 5, 3]],  # they change places
        [[-1, 6, 7, 3], [-1, 5, 5, 3]],  # one writes elsewhere
        [[-1, 7, 7, 3], padding],  # one leaves
        [[2, 7, 7, 3], padding],  # a token that another node has computed
        [[2, 7, 7, 3], padding],  # stays: the same token
        [[3, 7, 7, 3], padding],  # another one
    )
    found = stay_in_place(jnp.asarray(rows, jnp.int32), t, layout, sources)
    assert np.flatnonzero(found).tolist() == [1, 3, 8]


def test_which_tasks_of_a_loop_stay():
    """The first step of a loop begins a run; an input that its own output replaces ends it."""
    cell = _mixing_model().cells[1]
    layout = CellLayout([cell])
    (t,) = layout.types
    sources = sources_of(t)
    assert sources == (-1, -1, 0, -1)
    reads = [[4, 5, 6, -1], [4, 5, 7, -1]]  # context, x, h and limit
    first = [*reads[0], 7, 8, 9, 2 * 3 + 1, 0]  # h, is_far, other, the flag, and a word
    later = [*reads[1], 7, 8, 9, 2 * 3, 0]
    replaced = [4, 7, 7, -1, *later[4:]]
    rows = ([first], [later], [later], [first], [later], [replaced], [replaced])
    found = stay_in_place(jnp.asarray(rows, jnp.int32), t, layout, sources)
    assert np.flatnonzero(found).tolist() == [1, 2, 4]
