"""The functions of cells as they are lowered for a GPU, and compiled for a CPU."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.cells.layout import CellLayout
from jaxserve.cells.models import (
    GRU,
    LSTM,
    CellModel,
    Decoding,
    Embedded,
    Internal,
    Leaf,
    Predicting,
    Stacked,
    beam_search_model,
    seq2seq_model,
    sequence_model,
    tree_lstm_model,
)
from jaxserve.cells.programs import CellPrograms
from jaxserve.kernels.cross import targeting
from tests.common.tiers import some

HIDDEN, VOCAB, BATCH = 64, 90, 8
# A hidden size whose weights the CPU's kernel of gated cells refuses.
LARGE = 384
NAMES = ("stacked_lstm", "gru", "seq2seq", "beam_search", "tree_lstm")


def _model(name: str, hidden: int = HIDDEN) -> CellModel:
    rngs = nnx.Rngs(0)

    def embedded(step) -> Embedded:
        return Embedded(step, VOCAB, rngs=rngs)

    def lstm() -> LSTM:
        return LSTM(hidden, hidden, rngs=rngs)

    if name == "tree_lstm":
        leaf = Leaf(VOCAB, hidden, hidden, rngs=rngs)
        return tree_lstm_model(leaf, Internal(hidden, rngs=rngs))
    if name in ("seq2seq", "beam_search"):
        decoding = Decoding(go=0, end=1, max_steps=lambda num: num)
        parts = embedded(lstm()), Predicting(embedded(lstm()), rngs=rngs), decoding
        is_search = name == "beam_search"
        return beam_search_model(*parts, num_beams=4) if is_search else seq2seq_model(*parts)
    if name == "gru":
        return sequence_model(embedded(GRU(hidden, hidden, rngs=rngs)))
    return sequence_model(embedded(Stacked([lstm(), lstm()])))


def _arguments(layout: CellLayout, programs: CellPrograms, type: int) -> tuple[Any, ...]:
    """Return the shapes of a task function's arguments."""
    pools = [
        jax.ShapeDtypeStruct((50, *layout.pools[pool].shape), layout.pools[pool].dtype)
        for pool in programs.pools[type]
    ]
    rows = jax.ShapeDtypeStruct((3, BATCH, layout.width), jnp.dtype("int32"))
    num_tasks = jax.ShapeDtypeStruct((), jnp.dtype("int32"))
    return programs.params[type], tuple(pools), rows, num_tasks


@pytest.mark.release
@pytest.mark.parametrize("name", some(NAMES))
def test_gpus_gather_in_the_kernel(name):
    """On a GPU, no state of a pool is gathered or scattered by XLA, only by our kernels."""
    layout = CellLayout(_model(name).cells)
    programs = CellPrograms(layout, has_flat=False)
    for t in layout.types:
        if t.cell.name == "beams":  # it copies the states of an encoder, once
            continue
        with targeting():
            step: Any = programs.tasks[t.index]
            traced = step.trace(*_arguments(layout, programs, t.index))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        found = set(re.findall(r'name = "(\w+)"', text))
        chooses = {"row_maximum"} if name == "seq2seq" and t.cell.name == "decoder" else set()
        assert found == {"gated_cell", "copy_pages"} | chooses
        moved = re.findall(r'"stablehlo\.(?:gather|scatter)"\(.*', text)
        pools = rf"tensor<(50x|50x4x|200x){HIDDEN}xf32>"
        assert not any(re.search(pools, line) for line in moved)


@pytest.mark.parametrize("hidden", some([HIDDEN, LARGE]))
@pytest.mark.parametrize("name", some(NAMES))
def test_cpus_update_pools_in_place(name, hidden):
    """No operation of a compiled task copies a pool, with the kernel of gated cells or without."""
    layout = CellLayout(_model(name, hidden).cells)
    programs = CellPrograms(layout, has_flat=False)
    for t in layout.types:
        step: Any = programs.tasks[t.index]
        text = step.lower(*_arguments(layout, programs, t.index)).compile().as_text()
        pools = rf"f32\[(?:50|50,4|200),{hidden}\]"
        assert re.search(pools, text)
        assert re.findall(rf"= {pools}\S* copy\(.*", text) == []
