"""Gated cells: every implementation agrees with the reference, row by row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import Product, RowsAt, build, gated_cell
from jaxserve.kernels.gated_cell.shapes import TEST_SHAPES, GatedShape, make_inputs
from jaxserve.kernels.gated_cell.triton import tile_of
from tests.common.closeness import assert_close
from tests.common.tiers import some

# Compiled as a whole, once for all calls of the same shapes.
_gated_cell = jax.jit(gated_cell, static_argnames=("kind", "implementation"))

ALLOWED = {"float32": 1e-5, "bfloat16": 1e-2}


@pytest.mark.parametrize("implementation", ["xla", "triton_interpreted"])
@pytest.mark.parametrize("shape", some(TEST_SHAPES), ids=str)
def test_agrees_with_the_reference(shape, implementation):
    """New states are those of the reference; rows that the task does not read are NaN."""
    inputs = _poisoned(make_inputs(shape, seed=1))
    wanted = gated_cell(shape.kind, **inputs, implementation="reference")
    got = _gated_cell(shape.kind, **inputs, implementation=implementation)
    assert len(got) == len(wanted)
    for new, right in zip(got, wanted, strict=True):
        assert (new.shape, new.dtype) == ((shape.batch, shape.hidden), right.dtype)
        assert_close(new, right, ALLOWED[shape.dtype])


CPU_SHAPES = [s for s in TEST_SHAPES if s.kind != "gru" and s.dtype == "float32"]


@pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("has_added", [False, True])
@pytest.mark.parametrize("shape", some(CPU_SHAPES), ids=str)
def test_the_kernel_of_cpus(shape, has_added):
    """It agrees with the reference, and a row alone has the bits that it has beside others."""
    inputs = _poisoned(make_inputs(shape, seed=1))
    if has_added:
        (product,) = inputs["products"]
        rows = np.random.default_rng(2).normal(size=(shape.batch, product.bias.shape[0]))
        added = RowsAt(jnp.asarray(rows, jnp.float32))
        inputs["products"] = (dataclasses.replace(product, added=added),)
    wanted = gated_cell(shape.kind, **inputs, implementation="reference")
    got = _gated_cell(shape.kind, **inputs, implementation="cpu")
    for new, right in zip(got, wanted, strict=True):
        assert_close(new, right)
    last = shape.batch - 1
    alone = _gated_cell(
        shape.kind, **_with_rows(inputs, lambda rows: _one_row(rows, last)), implementation="cpu"
    )
    for new, one in zip(got, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(new)[last:], np.asarray(one))


@pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("num_equal", some([3, 2, 100]))
@pytest.mark.parametrize("shape", some(CPU_SHAPES), ids=str)
def test_equal_rows_at_the_end(shape, num_equal):
    """The kernel of CPUs computes them once; each has the states that it has alone."""
    inputs = make_inputs(shape, seed=3)
    first = max(0, shape.batch - num_equal)

    def repeated(rows: RowsAt) -> RowsAt:
        index = jnp.arange(rows.shape[0]) if rows.index is None else rows.index
        return RowsAt(rows.values, index.at[first:].set(index[first]).astype(jnp.int32))

    given = _with_rows(inputs, repeated)
    wanted = gated_cell(shape.kind, **given, implementation="reference")
    got = _gated_cell(shape.kind, **given, implementation="cpu")
    for new, right in zip(got, wanted, strict=True):
        assert_close(new, right)
    distinct = _gated_cell(shape.kind, **inputs, implementation="cpu")
    for new, one in zip(got, distinct, strict=True):
        np.testing.assert_array_equal(np.asarray(new)[: first + 1], np.asarray(one)[: first + 1])


def _one_row(rows: RowsAt, number: int) -> RowsAt:
    index = jnp.arange(rows.shape[0]) if rows.index is None else rows.index
    return RowsAt(rows.values, index[number : number + 1].astype(jnp.int32))


@pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("shape", some(CPU_SHAPES[:3]), ids=str)
def test_gradients_and_numbers_out_of_range_are_those_of_xla(shape):
    """Cells can be trained, and a wrong number of a row changes no other row."""
    inputs = make_inputs(shape, seed=1)
    wrong = {name: list(value) for name, value in inputs.items()}
    first = wrong["carried"][0] if wrong["carried"] else wrong["products"][0].rows[0]
    index = np.zeros(shape.batch, np.int32) if first.index is None else np.array(first.index)
    index[0] = first.values.shape[0] + 7
    bad = RowsAt(first.values, jnp.asarray(index))
    if wrong["carried"]:
        wrong["carried"][0] = bad
    else:
        (product,) = wrong["products"]
        wrong["products"] = [dataclasses.replace(product, rows=(bad, *product.rows[1:]))]
    ours, xla = (_gated_cell(shape.kind, **wrong, implementation=name) for name in ("cpu", "xla"))
    for one, other in zip(ours, xla, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

    def loss(weight: jax.Array, name: str) -> jax.Array:
        (product,) = inputs["products"]
        changed = [dataclasses.replace(product, weight=weight)]
        out = gated_cell(shape.kind, changed, inputs["carried"], implementation=name)
        return sum(jnp.sum(jnp.sin(each)) for each in out)

    weight = inputs["products"][0].weight
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    one, other = (gradient(weight, name) for name in ("cpu", "xla"))
    assert_close(one, other)


@pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")
def test_tanh_near_zero_and_far_from_it():
    """Small, large and infinite gates have the states of the reference, and NaN stays NaN."""
    gates = jnp.asarray([0.0, 1e-6, 1e-3, 0.6, 0.7, 3.0, 50.0, 200.0, jnp.inf, jnp.nan])
    weight, bias = jnp.zeros((1, 40)), jnp.zeros(40)
    for sign in (1, -1):
        added = RowsAt(jnp.tile(sign * gates, 4)[None])
        product = Product((RowsAt(jnp.ones((1, 1))),), weight, bias, added)
        given = {"products": [product], "carried": [RowsAt(jnp.ones((1, 10)))]}
        ours, xla = (_gated_cell("lstm", **given, implementation=name) for name in ("cpu", "xla"))
        for one, other in zip(ours, xla, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-30)


@pytest.mark.release
def test_random_shapes():
    """Batches, hidden sizes and widths that fill no tile, of every kind."""
    random = np.random.default_rng(7)
    for kind in ("lstm", "gru", "tree_leaf", "tree_internal") * 2:
        batch, hidden, width = (int(random.integers(1, most)) for most in (40, 50, 50))
        shape = GatedShape(kind=kind, batch=batch, hidden=hidden, width=width, num_slots=batch + 3)
        inputs = make_inputs(shape, seed=batch)
        wanted = gated_cell(kind, **inputs, implementation="reference")
        got = _gated_cell(kind, **inputs, implementation="triton_interpreted")
        for new, right in zip(got, wanted, strict=True):
            assert_close(new, right)


def test_bits_do_not_depend_on_other_rows():
    """A row has the same bits beside any other rows, in batches of one size."""
    inputs = make_inputs(TEST_SHAPES[0], seed=3)

    def turned(rows: RowsAt) -> RowsAt:
        return dataclasses.replace(rows, index=jnp.roll(rows.index, 1))

    others = _with_rows(inputs, turned)
    first, second = (
        _gated_cell("lstm", **given, implementation="triton_interpreted")
        for given in (inputs, others)
    )
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.roll(np.asarray(other), -1, axis=0))


def test_arrays_stand_for_all_of_their_rows():
    """An operand without an index is read in its order."""
    shape = TEST_SHAPES[0]
    inputs = make_inputs(shape, seed=5)
    gathered = _with_rows(inputs, lambda rows: RowsAt(rows.gathered()))
    wanted, got = (
        _gated_cell("lstm", **given, implementation="triton_interpreted")
        for given in (inputs, gathered)
    )
    for new, right in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(right))


def test_moved_bytes_by_hand():
    """An LSTM of 2 with embeddings of 3: 48 weights and biases, and 9 numbers of each of 5 rows."""
    shape = GatedShape(kind="lstm", batch=5, hidden=2, width=3)
    assert shape.moved_bytes == 4 * ((3 + 2 + 1) * 4 * 2 + 5 * (3 + 2 + 2 + 2 * 2))
    gru = GatedShape(kind="gru", batch=5, hidden=2, width=3, dtype="bfloat16")
    assert gru.moved_bytes == 2 * ((3 + 1) * 6 + (2 + 1) * 6 + 5 * (3 + 2 + 2))


def test_tiles_fill_a_gpu():
    """Few rows have narrow tiles, so that a GPU has many programs."""
    assert (tile_of(1, 1024, 4).rows, tile_of(1, 1024, 4).columns) == (16, 16)
    assert (tile_of(512, 1024, 4).rows, tile_of(512, 1024, 4).columns) == (64, 32)
    assert tile_of(64, 1024, 2).inner == 64


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused():
    """Unknown kinds and contradictory shapes raise; the kernel leaves other cases to XLA."""
    inputs = make_inputs(TEST_SHAPES[0], seed=0)
    (product,), (c,) = inputs["products"], inputs["carried"]
    with pytest.raises(ValueError, match="unknown"):
        gated_cell("rnn", [product], [c])
    with pytest.raises(ValueError, match="1 carried states"):
        gated_cell("lstm", [product], [])
    narrow = Product(product.rows, product.weight[1:], product.bias)
    with pytest.raises(ValueError, match="one hidden size"):
        gated_cell("lstm", [narrow], [c])
    gru = make_inputs(TEST_SHAPES[2], seed=0)
    with pytest.raises(NotImplementedError, match="not gru"):
        gated_cell("gru", **gru, implementation="cpu")
    with pytest.raises(NotImplementedError, match="not for cpu"):
        gated_cell("lstm", [product], [c], implementation="triton")
    half = Product(product.rows, product.weight.astype("bfloat16"), product.bias)
    with pytest.raises(NotImplementedError, match="it serves one of"):
        gated_cell("lstm", [half], [c], implementation="triton_interpreted")


def _poisoned(inputs):
    """Return operands whose arrays are NaN in the rows that no operand reads."""
    used: dict[int, set[int]] = {}
    rows = [rows for product in inputs["products"] for rows in product.rows] + [*inputs["carried"]]
    for one in rows:
        used.setdefault(id(one.values), set()).update(np.asarray(one.index).tolist())

    def poison(one: RowsAt) -> RowsAt:
        is_used = np.zeros((len(one.values), 1), bool)
        is_used[sorted(used[id(one.values)])] = True
        values = np.asarray(one.values)
        poisoned = np.where(is_used, values, np.asarray(np.nan, values.dtype))
        return RowsAt(jnp.asarray(poisoned), one.index)

    return _with_rows(inputs, poison)


def _with_rows(inputs, change):
    """Return operands with changed `RowsAt`, and the same weights."""
    return jax.tree.map(
        lambda leaf: change(leaf) if isinstance(leaf, RowsAt) else leaf,
        inputs,
        is_leaf=lambda leaf: isinstance(leaf, RowsAt),
    )
