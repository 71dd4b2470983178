"""The functions of cells as they are lowered for a GPU, and compiled for a CPU."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.cells.layout import CellLayout
from jaxserve.cells.programs import CellPrograms
from jaxserve.kernels.cross import targeting
from tests.cells.shipped import model_of
from tests.common.tiers import some

HIDDEN, BATCH = 64, 8
# A hidden size whose weights the CPU's kernel of gated cells refuses.
LARGE = 384
NAMES = ("stacked", "gru", "seq2seq", "beam_search", "tree")


def _layout(name: str, hidden: int = HIDDEN) -> CellLayout:
    return CellLayout(model_of(name, vocab=90, embed=hidden, hidden=hidden).cells)


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
    layout = _layout(name)
    programs = CellPrograms(layout, has_flat=False)
    for t in layout.types:
        if t.cell.name == "beams":  # it copies the states of an encoder, once
            continue
        with targeting():
            step: Any = programs.calls[t.index]
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
    layout = _layout(name, hidden)
    programs = CellPrograms(layout, has_flat=False)
    for t in layout.types:
        step: Any = programs.calls[t.index]
        text = step.lower(*_arguments(layout, programs, t.index)).compile().as_text()
        pools = rf"f32\[(?:50|50,4|200),{hidden}\]"
        assert re.search(pools, text)
        assert re.findall(rf"= {pools}\S* copy\(.*", text) == []
