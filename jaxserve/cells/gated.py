"""Tasks of gated cells on CPUs: one kernel runs all tasks of a call, see `gated_tasks`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32, UInt8

from jaxserve.cells.layout import TRASH_SLOT, Layout, TypeLayout
from jaxserve.cells.values import ValueSpec
from pallas_kernels import RowsAt
from pallas_kernels.gated_cell import Column, GatedCell, TaskColumns, gated_tasks, pack_gates

# The bit of a row's flags that says that its outputs are finite.
FINITE = 1
# The most rows, with padding, of calls that run on the thread that submits them.
MOST_AT_ONCE = 1024
_TOKEN = ValueSpec((), np.dtype(np.int32))

_log = logging.getLogger(__name__)


@runtime_checkable
class Gated(Protocol):
    """A module that is one gated cell, which has `takes_rows`."""

    def as_gated_cell(self, *args: Any, **named: Any) -> GatedCell:
        """Return the cell of inputs, whose new states are the outputs h and c."""
        ...


@final
class GatedTasks:
    """A function that runs all tasks of a call, one after the other; see `FlatTaskFunction`.

    Raises:
      NotImplementedError: the type is not a gated cell whose states lie in one pool; the message
        says why.
    """

    def __init__(self, t: TypeLayout, layout: Layout, graphdef: Any, tree: Any):
        cell: Any = t.cell
        if not (cell.takes_rows and isinstance(cell.module, Gated)):
            raise NotImplementedError("its module is not one gated cell")
        if t.is_loop:
            raise NotImplementedError("it is a loop")
        if cell.allows_infinite:
            raise NotImplementedError("its outputs may be infinite")
        if len(set(t.output_pools)) > 1 or t.num_outputs != 2:
            raise NotImplementedError("its states do not lie in one pool")
        for spec, words in zip(cell.inputs.values(), t.words, strict=True):
            if words is not None and spec != _TOKEN:
                raise NotImplementedError(f"an input {spec} travels with the task")
        self.__name__ = f"tasks_of_{''.join(c if c.isalnum() else '_' for c in t.cell.name)}"
        self._type = t
        # Column of each input of tokens -> that with the token itself.
        self._word_of = {
            number: layout.first_word + words.start
            for number, words in enumerate(t.words)
            if words is not None
        }
        outputs = [cell.output_index.get(name, -1) for name in ("h", "c")]
        if min(outputs) < 0:
            raise NotImplementedError("its outputs are not h and c")
        self._outputs = layout.first_output + outputs[0], layout.first_output + outputs[1]
        self._graphdef, self._tree = graphdef, tree
        self.pools = t.pools

    def __call__(
        self,
        params: tuple[Array, ...],
        pools: tuple[Array, ...],
        rows: Int32[Array, "num width"],
        reads: Int32[Array, " reads"],
    ) -> tuple[tuple[Array, ...], UInt8[Array, " num"], Float[Array, "reads hidden"]]:
        t, held = self._type, dict(zip(self.pools, pools, strict=True))
        *leaves, packed = params
        of_states = t.output_pools[0]
        tokens = None
        for number in self._word_of:
            tokens = held[t.input_pools[number]]
        held[of_states], is_finite, values = gated_tasks(
            self._cell(leaves, held),
            TaskColumns(self._word_of, self._outputs),
            *(held[of_states], tokens, rows, reads, packed),
            trash=TRASH_SLOT,
        )
        # XLA runs an executable in the call, and not on its own threads, if it counts less than
        # 1,000 operations in it, and it counts none in the kernel. One for each row makes the host
        # not wait for calls of many rows. It waits for those of fewer: what arrives in the meantime
        # joins the next call, and would else wait for one more that was submitted ahead.
        if rows.shape[0] > MOST_AT_ONCE:
            is_finite &= jnp.uint8(FINITE)
        return tuple(held.values()), is_finite, values

    def packed(self, leaves: Sequence[Any]) -> Array:
        """Return what follows the leaves of the module's parameters in `params`."""
        return pack_gates(self._cell(leaves, dict.fromkeys(self.pools)))

    def _cell(self, leaves: Sequence[Any], pools: Mapping[int, Any]) -> GatedCell:
        """Return the cell, whose rows are columns of tasks."""
        t = self._type
        inputs: dict[str, Any] = {}
        for number, name in enumerate(t.cell.inputs):
            column = Column(number)
            is_token = number in self._word_of
            inputs[name] = column if is_token else RowsAt(pools[t.input_pools[number]], column)
        module: Any = nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, leaves))
        return module.as_gated_cell(**inputs)


def gated_tasks_of(
    t: TypeLayout, layout: Layout, graphdef: Any, tree: Any, leaves: list[Any]
) -> tuple[GatedTasks, Array] | None:
    """Return the function that runs a type's tasks in one kernel, and what it needs beside leaves.

    None if no kernel can.
    """
    try:
        found = GatedTasks(t, layout, graphdef, tree)
        pools = tuple(
            jax.ShapeDtypeStruct((2, *layout.pools[pool].shape), layout.pools[pool].dtype)
            for pool in found.pools
        )
        rows = jax.ShapeDtypeStruct((1, layout.width + 1), "int32")
        packed = found.packed(leaves)
        reads = jax.ShapeDtypeStruct((1,), "int32")
        jax.eval_shape(found, (*leaves, packed), pools, rows, reads)
    except NotImplementedError as error:
        _log.info("cell %s runs its tasks one by one: %s", t.cell.name, error)
        return None
    return found, packed
