"""The plans of graphs that are one chain or one tree, without a pass over their nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from jaxserve.cells.blocks import Chain, Tree
from jaxserve.cells.cell_graph import chain_graph, tree_graph
from jaxserve.cells.graph_plan import FIRST_SLOT, TRASH, WORDS, ZEROS, GraphPlan, WantedValues
from jaxserve.cells.layout import Layout, TypeLayout


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
        stride=layout.stride,
        codes=codes,
        types=np.full(num, t.index, np.int32),
        num_slots=num_slots,
        loops=(),
        wanted=wanted,
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


def plan_of_a_tree(
    layout: Layout, leaf: TypeLayout, pair: TypeLayout, tree: Tree, wanted: WantedValues
) -> GraphPlan:
    """Return the plan of a graph that is one tree, whose leaves have small constants alone.

    As with `plan_slots`, the outputs of a pair take the slots of its left node.
    """
    num, first = tree.num_leaves, layout.first_output
    outputs = [pair.cell.output_index[name] for name in tree.outputs]
    slots = list(range(num))  # of each node: the leaf whose slots it takes
    for left, _ in tree.pairs.tolist():
        slots.append(slots[left])
    slot = np.array(slots, np.int32)
    # Each output that pairs take has a slot of each leaf; another one that is returned, one.
    root = (tree.num_nodes - 1) * layout.stride
    sizes = dict.fromkeys(outputs, num)
    for value, _ in wanted:
        sizes.setdefault(value - root, 1)
    num_slots, code_of = _slots(layout, pair, sizes)
    codes = np.full((tree.num_nodes, layout.first_word), TRASH, np.int32)
    codes[:num, : leaf.num_inputs] = WORDS
    taken = [code_of[output] for output in outputs]
    codes[num:, : pair.num_inputs] = slot[tree.pairs][:, tree.sides] + np.array(taken, np.int32)
    for output, size in sizes.items():
        code, column = code_of[output], first + output
        if size == 1 and output not in outputs:
            codes[-1, column] = code
            continue
        of_leaf = first + tree.leaf.output_index[list(pair.cell.outputs)[output]]
        codes[:num, of_leaf] = slot[:num] + code
        codes[num:, column] = slot[num:] + code
    types = np.full(tree.num_nodes, pair.index)
    types[:num] = leaf.index
    return GraphPlan(
        graph=tree_graph(leaf.index, pair.index, tree.pairs),
        num_nodes=tree.num_nodes,
        stride=layout.stride,
        codes=codes,
        types=types,
        num_slots=num_slots,
        loops=(),
        wanted=wanted,
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
