"""Runs of tasks whose rows stay in their slots, so that they are gathered and scattered once."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from jaxserve.cells.layout import TRASH_SLOT, ZERO_SLOT, Layout, TypeLayout


def sources_of(t: TypeLayout) -> tuple[int, ...]:
    """Return for each input the output that may become it in the next task; -1 for none.

    A loop says which ones these are. For other cells it is the output with the input's name, shape
    and dtype. There is none if two inputs take one output.
    """
    cell = t.cell
    found = t.carry if t.is_loop else tuple(
        cell.output_index[name] if cell.outputs.get(name) == spec else -1
        for name, spec in cell.inputs.items()
    )  # fmt: skip
    taken = [source for source in found if source >= 0]
    return found if len(set(taken)) == len(taken) else (-1,) * len(found)


def stay_in_place(
    rows: Int32[Array, "tasks batch width"], t: TypeLayout, layout: Layout, sources: tuple[int, ...]
) -> Bool[Array, " tasks"]:
    """Return for each task whether all its rows go on from the same rows of the task before it.

    Such a row writes the slots that the row before it wrote. An input with a source reads that
    output of the row before; any other input travels with the task, or is read where it was read
    before, from a slot that the row does not write. So no slot needs to be written between both.
    Rows of padding may follow each other, too.

    Args:
      rows: see `Layout`.
      sources: see `sources_of`.
    """
    first = layout.first_output
    before, now = rows[:-1], rows[1:]
    written, writes = (one[..., first : first + t.num_outputs] for one in (before, now))
    same = (written == writes).all(-1)
    is_padding = same & (writes == TRASH_SLOT).all(-1)
    if t.is_loop:
        # Twice the slot of the flag, plus one in the first step; in padding, all are the first.
        flag = now[..., layout.flag]
        is_padding &= flag == 2 * TRASH_SLOT + 1
        same &= flag == before[..., layout.flag] // 2 * 2
    for number, source in enumerate(sources):
        slot = now[..., number]
        is_padding &= slot <= ZERO_SLOT
        if source >= 0:
            same &= slot == written[..., source]
            continue
        stays = slot == before[..., number]
        for output, pool in enumerate(t.output_pools):
            if pool == t.input_pools[number]:
                stays &= slot != written[..., output]
        same &= (slot < 0) | stays
    return jnp.concatenate([jnp.zeros(1, jnp.bool_), (same | is_padding).all(-1)])
