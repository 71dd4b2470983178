"""The storage of values: pools of slots, and rows of the arrays that describe a task."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from jaxserve.cells.base import BaseCell
from jaxserve.cells.lru_cache import LRUCache
from jaxserve.cells.policy import CellType
from jaxserve.cells.values import ValueSpec, zeros
from jaxserve.core.errors import InvalidCellError

# Slots of every pool that hold no value: one with zeros, and one that padding writes to.
ZERO_SLOT, TRASH_SLOT = 0, 1
NUM_RESERVED_SLOTS = 2
# The slot of a value that travels with the task.
IN_TASK = -1
# Constants up to this size travel with the task; larger ones are written to slots.
_MAX_BYTES_IN_TASK = 64
# Whether a loop has ended.
DONE_SPEC = ValueSpec((), np.dtype(np.uint8))


@final
@dataclass(frozen=True)
class TypeLayout:
    """The layout of one cell type; see `CellLayout` for the columns of its nodes.

    Attributes:
      input_pools, output_pools: pool of each input and output.
      words: for each input, the range of its words; None for an input that is too large.
      carry: for each input of a loop, the output of the previous step that it takes; -1 for none.
      zeros: for each input, the array that the constant 0 becomes, see `as_constant`.
    """

    index: int
    cell: BaseCell
    input_pools: tuple[int, ...]
    output_pools: tuple[int, ...]
    words: tuple[range | None, ...]
    num_words: int
    carry: tuple[int, ...]
    zeros: tuple[np.ndarray, ...] = field(compare=False)

    @property
    def is_loop(self) -> bool:
        return self.cell.is_loop

    @property
    def num_inputs(self) -> int:
        return len(self.input_pools)

    @property
    def num_outputs(self) -> int:
        return len(self.output_pools)

    @property
    def pools(self) -> tuple[int, ...]:
        return tuple(sorted({*self.input_pools, *self.output_pools}))


@final
class CellLayout:
    """The layout of all cells of a runtime. Values of the same shape and dtype share a pool.

    A node reads and writes a row of `width` numbers: the slot of each input, from column
    `first_output` on the slot of each output, for loops the slot of the flag at `flag`, and from
    `first_word` on the words of constants. Types with fewer leave columns unused.

    Attributes:
      stride: values that each node has room for: the most outputs of a type.
      plans: `GraphPlan`s of recently used structures.
      output_pools: int64 [types, stride], the pool of each output; 0 for missing outputs.

    Raises:
      InvalidCellError: two cells of one type differ in priority, sizes or signature, or there is no
        cell.
    """

    def __init__(self, cells: Sequence[BaseCell]):
        if not cells:
            raise InvalidCellError("no cells were given; pass at least one")
        self.pools: list[ValueSpec] = []
        distinct: dict[object, BaseCell] = {}
        for cell in cells:
            known = distinct.setdefault(cell.key, cell)
            if (known.priority, known.batch_sizes) != (cell.priority, cell.batch_sizes):
                raise InvalidCellError(
                    f"cells {known.name!r} and {cell.name!r} have the same module and signature, "
                    "and different priorities or batch_sizes; pass one of them"
                )
            if (known.inputs, known.outputs) != (cell.inputs, cell.outputs):
                raise InvalidCellError(
                    f"two cells are named {cell.name!r} and have different inputs or outputs; pass "
                    "different names"
                )
        self.types = tuple(self._layout(i, cell) for i, cell in enumerate(distinct.values()))
        self.loop_types = frozenset(t.index for t in self.types if t.is_loop)
        self.index_of: Mapping[object, int] = {key: i for i, key in enumerate(distinct)}
        self.done_pool = self._pool(DONE_SPEC) if any(t.is_loop for t in self.types) else None
        self.stride = max(t.num_outputs for t in self.types)
        self.max_inputs = max(t.num_inputs for t in self.types)
        self.max_words = max(t.num_words for t in self.types)
        self.plans: LRUCache[Hashable, Any] = LRUCache(1 << 14)
        self.output_pools = np.zeros((len(self.types), self.stride), np.int64)
        for t in self.types:
            self.output_pools[t.index, : t.num_outputs] = t.output_pools
        self.first_output = self.max_inputs
        self.flag = self.first_output + self.stride
        self.first_word = self.flag + (self.done_pool is not None)
        self.width = self.first_word + self.max_words

    @property
    def cell_types(self) -> tuple[CellType, ...]:
        return tuple(
            CellType(t.cell.name, t.cell.priority, t.cell.batch_sizes, t.is_loop)
            for t in self.types
        )

    def require_names(self) -> None:
        """Raise InvalidCellError unless every type has a unique name, such as for costs by name."""
        names = [t.cell.name for t in self.types]
        shared = sorted({name for name in names if names.count(name) > 1})
        if shared:
            raise InvalidCellError(
                f"several cells are named {shared[0]!r}, and their times are kept by name; pass "
                "each a name of its own"
            )

    def _layout(self, index: int, cell: BaseCell) -> TypeLayout:
        words: list[range | None] = []
        num_words = 0
        for spec in cell.inputs.values():
            num = -(-spec.num_bytes // 4)
            if spec.num_bytes > _MAX_BYTES_IN_TASK:
                words.append(None)
                continue
            words.append(range(num_words, num_words + num))
            num_words += num
        outputs = list(cell.outputs)
        return TypeLayout(
            index=index,
            cell=cell,
            input_pools=tuple(self._pool(spec) for spec in cell.inputs.values()),
            output_pools=tuple(self._pool(spec) for spec in cell.outputs.values()),
            words=tuple(words),
            num_words=num_words,
            carry=tuple(
                outputs.index(cell.carry[name]) if name in cell.carry else -1
                for name in cell.inputs
            ),
            zeros=tuple(zeros(spec) for spec in cell.inputs.values()),
        )

    def _pool(self, spec: ValueSpec) -> int:
        if spec not in self.pools:
            self.pools.append(spec)
        return self.pools.index(spec)


def words_of_each(values: np.ndarray) -> np.ndarray:
    """Return the bytes of each small constant as int32 words, padded with zeros."""
    num, num_bytes = len(values), values[0].nbytes
    if num_bytes % 4 == 0 and values.flags.c_contiguous:
        return values.reshape(num, -1).view(np.int32)
    data = np.zeros((num, -(-num_bytes // 4) * 4), np.uint8)
    data[:, :num_bytes] = np.ascontiguousarray(values).reshape(num, -1).view(np.uint8)
    return data.view(np.int32)
