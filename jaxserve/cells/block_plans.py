"""The plans of graphs that are one chain or one tree, without a pass over their nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import final

import numpy as np

from jaxserve.cells.blocks import Chain, Tree
from jaxserve.cells.cell_graph import chain_graph, tree_graph
from jaxserve.cells.graph_plan import (
    FIRST_SLOT,
    TRASH,
    WORDS,
    ZEROS,
    GraphPlan,
    Returned,
    Wanted,
    WantedValues,
)
from jaxserve.cells.layout import Layout, TypeLayout
from jaxserve.cells.tree_shape import TreeShape


def plan_of_a_chain(layout: Layout, t: TypeLayout, chain: Chain, wanted: WantedValues) -> GraphPlan:
    """Return the plan of a graph that is one chain, whose constants are small, or zeros.

    As with `plan_slots`, each output that is carried has one slot, where it stays.
    """
    num = chain.num_nodes
    returned = tuple(sorted({value - (num - 1) * layout.stride for value, _ in wanted}))
    # Of all lengths: the codes of the first node, of those within, and of the last one.
    key = "chain", t.index, chain.carry, returned, min(num, 2)
    ends = layout.plans.get(key) or layout.plans.add(
        key, _ends_of_a_chain(layout, t, chain, returned), 3
    )
    num_slots, (of_first, within, of_last) = ends
    codes = np.empty((num, layout.first_word), np.int32)
    codes[:] = within
    codes[0], codes[-1] = of_first, of_last
    return GraphPlan(
        graph=chain_graph(t.index, num),
        num_nodes=num,
        codes=codes,
        types=np.full(num, t.index, np.int32),
        num_slots=num_slots,
        loops=(),
        returned=Returned(wanted, layout.stride, ()),
    )


def _ends_of_a_chain(
    layout: Layout, t: TypeLayout, chain: Chain, returned: Sequence[int]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the number of slots of each pool, and the codes of three nodes of a chain.

    They are the first node, one within, and the last one, which is also the first of a chain of one
    node.
    """
    carry = chain.carry if chain.num_nodes > 1 else ()
    carried = [output for output in carry if output >= 0]
    num_slots, code_of = _slots(layout, t, dict.fromkeys(sorted({*carried, *returned}), 1))
    codes = np.full((3, layout.first_word), TRASH, np.int32)
    codes[:, : layout.max_inputs] = ZEROS
    codes[:, : t.num_inputs] = [ZEROS if words is None else WORDS for words in t.words]
    for number, output in enumerate(carry):
        if output >= 0:
            codes[1:, number] = code_of[output]
            codes[:-1, layout.first_output + output] = code_of[output]
    for output in returned:
        codes[-1, layout.first_output + output] = code_of[output]
    return num_slots, codes


@final
class TreesOfASize:
    """What the plans share of graphs that are one tree each, of one form and number of leaves.

    The leaves have small constants alone. As with `plan_slots`, the outputs of a pair take the
    slots of its left node.

    Args:
      outputs: name and number of each output of the root that graphs return.
    """

    def __init__(
        self,
        layout: Layout,
        leaf: TypeLayout,
        pair: TypeLayout,
        tree: Tree,
        outputs: Sequence[tuple[str, int]],
    ):
        num, first = tree.num_leaves, layout.first_output
        self._leaf, self._pair = leaf.index, pair.index
        self._sides = np.array(tree.sides)
        root = (tree.num_nodes - 1) * layout.stride
        wanted = tuple([(root + output, Wanted(name)) for name, output in outputs])
        self._returned = Returned(wanted, layout.stride, ())
        inputs = [pair.cell.output_index[name] for name in tree.outputs]
        # Each output that pairs take has a slot of each leaf; another one that is returned, one.
        sizes = dict.fromkeys(inputs, num)
        for _, output in outputs:
            sizes.setdefault(output, 1)
        self._num_slots, code_of = _slots(layout, pair, sizes)
        # The codes without those that depend on the pairs, and what is added to these.
        self._codes = np.full((tree.num_nodes, layout.first_word), TRASH, np.int32)
        self._codes[:num, : leaf.num_inputs] = WORDS
        self._of_inputs = np.array([code_of[output] for output in inputs], np.int32)
        leaves = np.arange(num)
        for output in dict.fromkeys(inputs):
            of_leaf = first + tree.leaf.output_index[list(pair.cell.outputs)[output]]
            self._codes[:num, of_leaf] = leaves + code_of[output]
        taken = sorted({*inputs})
        self._columns = np.array([first + output for output in taken])
        self._of_outputs = np.array([code_of[output] for output in taken], np.int32)
        for output in sizes:
            if output not in inputs:
                self._codes[-1, first + output] = code_of[output]
        self._types = np.full(tree.num_nodes, pair.index, np.int32)
        self._types[:num] = leaf.index

    def plan(self, shape: TreeShape) -> GraphPlan:
        """Return the plan of the graph of a tree of this size."""
        pairs, slot = shape.pairs, shape.leftmost  # each node takes the slots of this leaf
        num = len(pairs) + 1
        codes = self._codes.copy()
        codes[num:, : len(self._sides)] = slot[pairs[:, self._sides]] + self._of_inputs
        codes[num:, self._columns] = slot[num:, None] + self._of_outputs
        return GraphPlan(
            graph=tree_graph(self._leaf, self._pair, shape),
            num_nodes=len(slot),
            codes=codes,
            types=self._types,
            num_slots=self._num_slots,
            loops=(),
            returned=self._returned,
        )


def _slots(
    layout: Layout, t: TypeLayout, sizes: Mapping[int, int]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """Return the number of slots of each pool, and the code of the first slot of each output.

    Args:
      sizes: output of the type -> its slots.
    """
    num_slots = [0] * len(layout.pools)
    places: dict[int, tuple[int, int]] = {}
    for output, size in sizes.items():
        pool = t.output_pools[output]
        places[output] = pool, num_slots[pool]
        num_slots[pool] += size
    bases = list(accumulate(num_slots, initial=FIRST_SLOT))
    return tuple(num_slots), {
        output: bases[pool] + begin for output, (pool, begin) in places.items()
    }
