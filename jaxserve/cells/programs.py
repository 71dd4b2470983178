"""The jitted functions of cells: tasks of one type, and copies between slots and arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8

from jaxserve.cells.layout import TRASH_SLOT, ZERO_SLOT, CellLayout, TypeLayout
from jaxserve.cells.values import ValueSpec
from jaxserve.kernels import RowsAt, scatter_pages
from jaxserve.kernels.dispatch import target_platform
from jaxserve.kernels.gated_cell import Column, GatedCell, TaskColumns, gated_tasks, pack_gates
from jaxserve.kernels.put_rows import can_put_rows, put_rows

_log = logging.getLogger(__name__)


def sources_of(t: TypeLayout) -> tuple[int, ...]:
    """Return for each input the output that may become it in the next task; -1 for none.

    A loop specifies it. For other cells it is the output with the input's name, shape and dtype.
    There is none if two inputs take one output.
    """
    cell = t.cell
    found = (
        t.carry
        if t.is_loop
        else tuple(
            cell.output_index[name] if cell.outputs.get(name) == spec else -1
            for name, spec in cell.inputs.items()
        )
    )
    taken = [source for source in found if source >= 0]
    return found if len(set(taken)) == len(taken) else (-1,) * len(found)


def stay_in_place(
    rows: Int32[Array, "tasks batch width"],
    t: TypeLayout,
    layout: CellLayout,
    sources: tuple[int, ...],
) -> Bool[Array, " tasks"]:
    """Return for each task whether all its rows continue the same rows of the previous task.

    Such a row writes the slots that the previous row wrote. An input with a source reads that
    output of the previous row; any other input travels with the task, or is read from the same slot
    as before, which the row does not write. So no slot needs to be written between both. Rows of
    padding may follow each other too.

    Args:
      rows: see `CellLayout`.
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


# The bit of a row's flags that says that its outputs are finite.
FINITE = 1
# The most rows, with padding, of calls that run on the thread that submits them.
MOST_AT_ONCE = 1024
_TOKEN = ValueSpec((), np.dtype(np.int32))


@runtime_checkable
class Gated(Protocol):
    """A module that is one gated cell, which has `takes_rows`."""

    def as_gated_cell(self, *args: Any, **named: Any) -> GatedCell:
        """Return the cell of inputs, whose new states are the outputs h and c."""
        ...


@final
class GatedTasks:
    """A function that runs tasks of one type, of any sizes, one after the other, in one kernel.

    Its arguments are those of `_Tasks`, with the packed weights as the last of `params`, and:

    - `rows`: what each row reads and writes, see `CellLayout`, and in the last column the number of
      its task, which does not decrease; negative for padding.
    - `reads`: slots of the pool of states to read after the tasks; negative after the last of them.

    It returns the pools; the flags of the rows; and the values at `reads`.

    Raises:
      NotImplementedError: the type is not a gated cell whose states are in one pool; the message
        gives the reason.
    """

    def __init__(self, t: TypeLayout, layout: CellLayout, graphdef: Any, tree: Any):
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
        # Column of each token input -> the column with the token itself.
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
            held[of_states],
            tokens,
            rows,
            reads,
            packed,
            trash=TRASH_SLOT,
        )
        # XLA runs an executable in the calling thread, not on its own threads, if it counts less
        # than 1,000 operations in it, and it counts none in the kernel. One operation for each row
        # keeps the host from waiting for calls of many rows. It waits for calls of fewer rows:
        # requests that arrive meanwhile join the next call instead of waiting for another call
        # submitted ahead.
        if rows.shape[0] > MOST_AT_ONCE:
            is_finite &= jnp.uint8(FINITE)
        return tuple(held.values()), is_finite, values

    def packed(self, leaves: Sequence[Any]) -> Array:
        return pack_gates(self._cell(leaves, dict.fromkeys(self.pools)))

    def _cell(self, leaves: Sequence[Any], pools: Mapping[int, Any]) -> GatedCell:
        t = self._type
        inputs: dict[str, Any] = {}
        for number, name in enumerate(t.cell.inputs):
            column = Column(number)
            is_token = number in self._word_of
            inputs[name] = column if is_token else RowsAt(pools[t.input_pools[number]], column)
        module: Any = nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, leaves))
        return module.as_gated_cell(**inputs)


def gated_tasks_of(
    t: TypeLayout, layout: CellLayout, graphdef: Any, tree: Any, leaves: list[Any]
) -> tuple[GatedTasks, tuple[Array]] | None:
    """Return the one-kernel function of a type's tasks and its packed weights, if a kernel can."""
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
    return found, (packed,)


# Bits of the flags of a row besides `FINITE`: its loop has ended; it had ended before.
ENDED, WAS_ENDED = 2, 4
# Numbers of rows for which reads and writes of slots are compiled.
COPY_SIZES = (8, 64, 512)
# Numbers of rows of all tasks of a call for which `GatedTasks` are compiled.
FLAT_SIZES = (16, 64, 256, 1024, 4096, 16384)
# Slots that `GatedTasks` read after their tasks.
NUM_READS = 64


@final
class CellPrograms:
    """The functions of a runtime's cells, shared by its workers.

    Each attribute has one entry for each type: the leaves of its parameters (one more for
    `GatedTasks`), its jitted function, whether that is `GatedTasks` and not `_Tasks`, and the pools
    that it takes. Only a CPU runs `GatedTasks` (`has_flat`).
    """

    def __init__(self, layout: CellLayout, *, has_flat: bool):
        self.params: list[tuple[Array, ...]] = []
        self.calls: list[Callable[..., Any]] = []
        self.is_flat: list[bool] = []
        self.pools: list[tuple[int, ...]] = []
        for t in layout.types:
            cell: Any = t.cell
            graphdef, state = nnx.split(cell.module)
            leaves, tree = jax.tree.flatten(state)
            found = gated_tasks_of(t, layout, graphdef, tree, leaves) if has_flat else None
            body, packed = found or (_Tasks(t, layout, graphdef, tree), ())
            self.params.append((*leaves, *packed))
            self.calls.append(jax.jit(body, donate_argnums=1))
            self.is_flat.append(found is not None)
            self.pools.append(body.pools)
        self.read = jax.jit(_read)
        self.write = jax.jit(_set, donate_argnums=0)


@final
class _Tasks:
    """A function that runs several tasks of one type and size, one after the other.

    Its arguments are the leaves of the module's parameters; the pools of the type, in their order,
    which are donated; what the rows of each task read and write (`CellLayout`); and the number of
    tasks in `rows`, of which the rest is padding.

    It returns the pools; the flags of each task's rows; and each emitted output of all tasks.
    """

    def __init__(self, t: TypeLayout, layout: CellLayout, graphdef: Any, tree: Any):
        self.__name__ = f"tasks_of_{''.join(c if c.isalnum() else '_' for c in t.cell.name)}"
        self._type = t
        self._layout = layout
        self._graphdef = graphdef
        self._tree = tree
        done_pool = layout.done_pool if t.is_loop else None
        pools = set(t.pools) if done_pool is None else {*t.pools, done_pool}
        self.pools: tuple[int, ...] = tuple(sorted(pools))
        self._number = {pool: number for number, pool in enumerate(self.pools)}
        self._done = None if done_pool is None else self._number[done_pool]
        cell: Any = t.cell
        self._until = cell.until if t.is_loop else None
        outputs = list(cell.outputs)
        self._emits = [outputs.index(name) for name in cell.emits]
        self._takes_rows = cell.takes_rows
        self._allows_infinite = cell.allows_infinite
        self._sources = sources_of(t)

    def __call__(
        self,
        params: tuple[Array, ...],
        pools: tuple[Array, ...],
        rows: Int32[Array, "tasks batch width"],
        num_tasks: Int32[Array, ""],
    ) -> tuple[tuple[Array, ...], UInt8[Array, "tasks batch"], tuple[Array, ...]]:
        num, batch, _ = rows.shape
        specs = list(self._type.cell.outputs.values())
        emitted = tuple(
            jnp.zeros((num, batch, *specs[index].shape), specs[index].dtype)
            for index in self._emits
        )
        flags = jnp.zeros((num, batch), jnp.uint8)
        if max(self._sources) >= 0 and not self._is_fused():
            return self._runs(params, pools, rows, num_tasks, (flags, emitted))

        def body(k, state):
            pools, results = state
            task = lax.dynamic_index_in_dim(rows, k, keepdims=False).T
            inputs = self._gathered(pools, task)
            if not self._is_fused():
                # Every slot is read before any is written, so that XLA updates the pools in place.
                # A kernel has read its inputs before it returns the values that are written.
                pools, inputs = lax.optimization_barrier((pools, inputs))
            inputs |= self._rows_at(pools, task)
            before = self._before(pools, task)
            values, ended, flag = self._step(params, inputs, before)
            pools = self._scattered(pools, task, values, before, ended)
            return pools, self._with_results(results, k, flag, values)

        pools, (flags, emitted) = lax.fori_loop(0, num_tasks, body, (pools, (flags, emitted)))
        return pools, flags, emitted

    def _runs(self, params, pools, rows, num_tasks, results):
        """Run tasks; adjacent tasks with the same slots gather and scatter once."""
        t, batch = self._type, rows.shape[1]
        sources = dict(zip(t.cell.inputs, self._sources, strict=True))
        stays = stay_in_place(rows, t, self._layout, self._sources)

        def run(state):
            begin, pools, results = state
            first = lax.dynamic_index_in_dim(rows, begin, keepdims=False).T
            gathered = self._gathered(pools, first, all_inputs=True)
            pools, gathered = lax.optimization_barrier((pools, gathered))
            before = self._before(pools, first)
            of_output = {source: gathered[name] for name, source in sources.items()}
            values = [
                of_output[number]
                if number in of_output
                else jnp.zeros((batch, *spec.shape), spec.dtype)
                for number, spec in enumerate(t.cell.outputs.values())
            ]

            def goes_on(state):
                k = state[0]
                same = lax.dynamic_index_in_dim(stays, k, keepdims=False)
                return (k == begin) | ((k < num_tasks) & same)

            def step(state):
                k, values, before, results = state
                task = lax.dynamic_index_in_dim(rows, k, keepdims=False).T
                inputs = {
                    name: values[source]
                    if source >= 0
                    else self._or_words(name, gathered[name], task)
                    for name, source in sources.items()
                }
                inputs = lax.optimization_barrier(inputs)
                new, ended, flag = self._step(params, inputs, before)
                results = self._with_results(results, k, flag, new)
                if t.is_loop:  # the last step's values stay
                    new = [_where(before, *both) for both in zip(values, new, strict=True)]
                return k + 1, new, ended, results

            state = begin, values, before, results
            end, values, ended, results = lax.while_loop(goes_on, step, state)
            pools = self._scattered(pools, first, values, before, ended)
            return end, pools, results

        state = jnp.int32(0), pools, results
        _, pools, (flags, emitted) = lax.while_loop(lambda state: state[0] < num_tasks, run, state)
        return pools, flags, emitted

    def _before(self, pools, task):
        """Return for each row whether its loop had ended; None for a cell that is no loop."""
        if self._done is None:
            return None
        # Twice the slot of the flag, plus one in the first step.
        flag_slot = task[self._layout.flag]
        return (pools[self._done][flag_slot // 2] != 0) & (flag_slot % 2 == 0)

    def _step(self, params, inputs, before) -> tuple[list[Array], Array | None, Array]:
        """Return the outputs, for a loop whether each row has ended, and the flags."""
        module: Any = nnx.merge(self._graphdef, jax.tree.unflatten(self._tree, params))
        outputs = module(**inputs)
        values = [outputs[name] for name in self._type.cell.outputs]
        finite = _finite(values, len(values[0]), allows_infinite=self._allows_infinite)
        if before is None:
            return values, None, finite.astype(jnp.uint8) * FINITE
        ended = before if self._until is None else before | self._until(outputs)
        flag = (finite | before).astype(jnp.uint8) * FINITE
        flag += ended.astype(jnp.uint8) * ENDED + before.astype(jnp.uint8) * WAS_ENDED
        return values, ended, flag

    def _with_results(self, results, k, flag, values):
        flags, emitted = results
        emitted = tuple(
            lax.dynamic_update_index_in_dim(all_steps, values[index], k, 0)
            for all_steps, index in zip(emitted, self._emits, strict=True)
        )
        return lax.dynamic_update_index_in_dim(flags, flag, k, 0), emitted

    def _scattered(self, pools, task: Int32[Array, "width batch"], values, before, ended):
        """Return the pools with a task's outputs, except rows that had ended before."""
        t = self._type
        slots = task[self._layout.first_output :][: t.num_outputs]
        pools = list(pools)
        if self._done is not None:
            slots = jnp.where(before, TRASH_SLOT, slots)
            done_slots = jnp.where(before, TRASH_SLOT, task[self._layout.flag] // 2)
            pools[self._done] = _set(pools[self._done], done_slots, ended.astype(jnp.uint8))
        for pool in dict.fromkeys(t.output_pools):
            mine = [index for index, other in enumerate(t.output_pools) if other == pool]
            number = self._number[pool]
            if self._is_fused():
                given = [values[index] for index in mine]
                to = jnp.concatenate([slots[index] for index in mine])
                pools[number] = scatter_pages(
                    pools[number][None], to, jnp.concatenate(given)[None]
                )[0]
                continue
            for index in mine:
                pools[number] = _set(pools[number], slots[index], values[index])
        return tuple(pools)

    def _is_fused(self) -> bool:
        return self._takes_rows and target_platform() == "cuda"

    def _rows_at(self, pools, task) -> dict[str, RowsAt]:
        t = self._type
        return {
            name: RowsAt(pools[self._number[t.input_pools[number]]], task[number])
            for number, name in enumerate(t.cell.inputs)
            if self._is_row(number)
        }

    def _is_row(self, number: int) -> bool:
        is_served = self._takes_rows and target_platform() in ("cuda", "cpu")
        return is_served and self._type.words[number] is None

    def _gathered(self, pools, task, *, all_inputs: bool = False) -> dict[str, Array]:
        t = self._type
        found: dict[str, Array] = {}
        for number, name in enumerate(t.cell.inputs):
            if self._is_row(number) and not all_inputs:
                continue
            value = pools[self._number[t.input_pools[number]]]
            value = value.at[jnp.maximum(task[number], 0)].get(mode="promise_in_bounds")
            found[name] = self._or_words(name, value, task)
        return found

    def _or_words(self, name: str, value: Array, task: Int32[Array, "width batch"]) -> Array:
        """Return an input in which constants that travel with the task replace rows of `value`."""
        number = list(self._type.cell.inputs).index(name)
        words = self._type.words[number]
        if words is None:
            return value
        begin = self._layout.first_word
        given = task[begin + words.start : begin + words.stop]
        spec = self._type.cell.inputs[name]
        return _where(task[number] < 0, _from_words(given.T, spec), value)


def _read(pool: Array, slots: Int32[Array, " n"]) -> Array:
    return pool.at[slots].get(mode="promise_in_bounds")


def _set(pool: Array, slots: Int32[Array, " n"], values: Array) -> Array:
    if can_put_rows(pool):
        return put_rows(pool, slots, values)
    return pool.at[slots].set(values, mode="promise_in_bounds")


def _where(rows: Array, some: Array, others: Array) -> Array:
    return jnp.where(rows.reshape(-1, *[1] * (some.ndim - 1)), some, others)


def _finite(values: list[Array], batch: int, *, allows_infinite: bool) -> Array:
    finite = jnp.ones(batch, jnp.bool_)
    for value in values:
        if jnp.issubdtype(value.dtype, jnp.inexact):
            is_good = ~jnp.isnan(value) if allows_infinite else jnp.isfinite(value)
            finite &= is_good.reshape(batch, -1).all(axis=1)
    return finite


def _from_words(words: Int32[Array, "batch words"], spec: ValueSpec) -> Array:
    batch = words.shape[0]
    dtype = jnp.uint8 if spec.dtype == np.bool_ else spec.dtype
    values = lax.bitcast_convert_type(words, dtype).reshape(batch, -1)
    values = values[:, : int(np.prod(spec.shape))].reshape(batch, *spec.shape)
    return values != 0 if spec.dtype == np.bool_ else values
