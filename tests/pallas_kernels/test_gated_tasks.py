"""Several tasks of gated cells in one call: they give the bits of the cells one by one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import Product, RowsAt, build, gated_cell
from jaxserve.kernels.gated_cell import Column, GatedCell, TaskColumns, gated_tasks, pack_gates
from tests.common.tiers import some

pytestmark = pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")

HIDDEN, VOCAB, SLOTS, TRASH = 24, 7, 12, 1
# Columns of rows: token or left c, h, c, right h, new h, new c, word, task.
COLUMNS = TaskColumns({0: 6}, (4, 5))


def _array(random: np.random.Generator, *shape: int):
    return jnp.asarray(random.normal(size=shape) * 0.3, jnp.float32)


def _cell(kind: str, states, h, c, token, other_h, other_c, weights) -> GatedCell:
    """Return a cell of rows whose numbers are columns, or arrays."""
    table, added, weight, bias = weights
    if kind == "tree_internal":
        product = Product((RowsAt(states, h), RowsAt(states, other_h)), weight, bias)
        return GatedCell(kind, (product,), (RowsAt(states, c), RowsAt(states, other_c)))
    if kind == "tree_leaf":
        return GatedCell(kind, (Product((RowsAt(table, token),), weight, bias),), ())
    if kind == "folded":
        product = Product((RowsAt(states, h),), weight, bias, RowsAt(added, token))
    else:
        product = Product((RowsAt(table, token), RowsAt(states, h)), weight, bias)
    return GatedCell("lstm", (product,), (RowsAt(states, c),))


@pytest.mark.parametrize("kind", some(["lstm", "folded", "tree_leaf", "tree_internal"]))
def test_tasks_are_cells_one_after_the_other(kind):
    """States after three tasks, flags and reads are those of three calls of the cell."""
    random = np.random.default_rng(4)
    num_gates = {"tree_leaf": 3, "tree_internal": 5}.get(kind, 4)
    width = {"tree_leaf": 10, "folded": HIDDEN, "lstm": 10 + HIDDEN}.get(kind, 2 * HIDDEN)
    weights = (
        *(_array(random, VOCAB, 10), _array(random, VOCAB, num_gates * HIDDEN)),
        *(_array(random, width, num_gates * HIDDEN), _array(random, num_gates * HIDDEN)),
    )
    states = _array(random, SLOTS, HIDDEN)
    tokens = jnp.asarray([5, 6, 2], jnp.int32)
    rows = np.full((8, 8), -1, np.int32)
    # A chain in slots 2 and 3, beside a row that lasts one task, and a row without results.
    rows[:6] = [
        [-1, 2, 3, 6, 2, 3, 4, 0],
        [2, 4, 5, 7, 4, 5, 0, 0],
        [-1, 8, 9, 8, TRASH, TRASH, 3, 0],
        [-1, 2, 3, 4, 2, 3, 6, 1],
        [1, 2, 3, 5, 8, 3, 0, 2],
        [-1, 9, 7, 6, 7, TRASH, 1, 2],
    ]
    if kind == "tree_internal":  # its first column is a slot
        rows[:6, 0] = [10, 11, 9, 5, 4, 10]
    reads = np.array([3, 8, -1], np.int32)
    given = _cell(kind, states, Column(1), Column(2), Column(0), Column(3), Column(0), weights)
    packed = pack_gates(given)
    got, is_finite, values = gated_tasks(
        given, COLUMNS, states, tokens, rows, reads, packed, trash=TRASH
    )

    wanted = states
    for task in range(3):
        own = rows[rows[:, 7] == task]
        token = np.where(own[:, 0] < 0, own[:, 6], np.asarray(tokens)[np.maximum(own[:, 0], 0) % 3])
        index = [jnp.asarray(column) for column in (own[:, 1], own[:, 2], token, own[:, 3])]
        cell = _cell(kind, wanted, *index, jnp.asarray(np.maximum(own[:, 0], 0)), weights)
        h, c = gated_cell(cell.kind, cell.products, cell.carried, implementation="cpu")
        wanted = wanted.at[own[:, 4]].set(h).at[own[:, 5]].set(c)
    used = [slot for slot in range(SLOTS) if slot != TRASH]
    np.testing.assert_array_equal(np.asarray(got)[used], np.asarray(wanted)[used])
    np.testing.assert_array_equal(is_finite, np.ones(8, np.uint8))
    np.testing.assert_array_equal(np.asarray(values)[:2], np.asarray(wanted)[reads[:2]])


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_long_call_has_the_bits_of_short_ones(is_folded):
    """Threads share its steps, tokens are multiplied ahead, and rows stay out of their slots."""
    random = np.random.default_rng(7)
    hidden, num = 128, 120
    table = _array(random, VOCAB, (4 if is_folded else 1) * hidden)
    width = (1 if is_folded else 2) * hidden
    weight, bias = _array(random, width, 4 * hidden), _array(random, 4 * hidden)

    def cell_of(states) -> GatedCell:
        of_token, h = RowsAt(table, Column(0)), RowsAt(states, Column(1))
        rows, added = ((h,), of_token) if is_folded else ((of_token, h), None)
        return GatedCell(
            "lstm", (Product(rows, weight, bias, added),), (RowsAt(states, Column(2)),)
        )

    states = _array(random, 2 * num + 2, hidden)
    packed, reads = pack_gates(cell_of(states)), np.full(1, -1, np.int32)
    # Chains of 3 to 12 nodes: over 2^26 multiply-adds in one call, and less in each of twelve.
    slots = 2 + 2 * np.arange(num)
    rows = np.full((12 * num, 8), -1, np.int32)
    for task, own in enumerate(np.split(rows, 12)):
        alive = slots[: num - 7 * (task // 3)]
        own[: len(alive), [1, 2, 4, 5]] = np.stack([alive, alive + 1, alive, alive + 1], axis=1)
        if task == 7:  # two chains change places
            own[[0, 1]] = own[[1, 0]]
        own[:, 6], own[: len(alive), 7] = random.integers(0, VOCAB, num), task
    live = rows[rows[:, 7] >= 0]
    once, _, _ = gated_tasks(
        cell_of(states), COLUMNS, states, None, live, reads, packed, trash=TRASH
    )
    for task in range(12):
        own = live[live[:, 7] == task]
        states, _, _ = gated_tasks(
            cell_of(states), COLUMNS, states, None, own, reads, packed, trash=TRASH
        )
    assert len(live) * width * 4 * hidden > 1 << 26
    np.testing.assert_array_equal(once, states)


def test_a_lookup_has_no_product():
    """The new states are the rows of the token in two tables."""
    random = np.random.default_rng(6)
    tables = _array(random, VOCAB, HIDDEN), _array(random, VOCAB, HIDDEN)
    cell = GatedCell("lookup", (), tuple(RowsAt(table, Column(0)) for table in tables))
    rows = np.array([[-1, 0, 0, 0, 2, 3, 4, 0], [0, 0, 0, 0, 5, 2, 0, 1]], np.int32)
    reads = np.array([2, 3, 5], np.int32)
    states, tokens = jnp.zeros((SLOTS, HIDDEN)), jnp.asarray([6], jnp.int32)
    packed = pack_gates(cell)
    _, is_finite, values = gated_tasks(
        cell, COLUMNS, states, tokens, rows, reads, packed, trash=TRASH
    )
    np.testing.assert_array_equal(values, [tables[1][6], tables[1][4], tables[0][6]])
    np.testing.assert_array_equal(is_finite, [1, 1])


def test_a_row_that_is_not_finite():
    """Its flag is 0, and those of its neighbours are 1."""
    random = np.random.default_rng(5)
    weights = (
        *(_array(random, VOCAB, 10), _array(random, VOCAB, 4 * HIDDEN)),
        *(_array(random, HIDDEN, 4 * HIDDEN), _array(random, 4 * HIDDEN)),
    )
    states = _array(random, SLOTS, HIDDEN).at[4, 7].set(jnp.nan)
    rows = np.array([[-1, 2, 3, 0, 2, 3, 4, 0], [-1, 4, 5, 0, 4, 5, 1, 0]], np.int32)
    given = _cell("folded", states, Column(1), Column(2), Column(0), None, None, weights)
    reads = np.full(1, -1, np.int32)
    packed = pack_gates(given)
    _, is_finite, _ = gated_tasks(given, COLUMNS, states, None, rows, reads, packed, trash=TRASH)
    np.testing.assert_array_equal(is_finite, [1, 0])


def test_what_it_refuses():
    """Weights that do not fit L2, and other kinds, are left to XLA."""
    zeros = jnp.zeros((SLOTS, 512), jnp.float32)
    product = Product(
        (RowsAt(zeros, Column(0)),), jnp.zeros((512, 2048), jnp.float32), jnp.zeros(2048)
    )
    rows, reads = np.zeros((1, 4), np.int32), np.zeros(1, np.int32)
    packed = jnp.zeros(0)
    for kind, why in (("lstm", "weights of at most"), ("gru", "it serves")):
        cell = GatedCell(kind, (product,), (RowsAt(zeros, Column(1)),))
        with pytest.raises(NotImplementedError, match=why):
            gated_tasks(cell, COLUMNS, zeros, None, rows, reads, packed, trash=TRASH)
