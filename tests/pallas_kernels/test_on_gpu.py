"""The compiled kernels on a real GPU, in every configuration; skipped without a GPU."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import (
    gated_cell,
    grouped_matmul,
    paged_attention,
    quantize,
    rotate_and_write,
    row_maximum,
)
from jaxserve.kernels.fused_matmul import row_shapes
from jaxserve.kernels.fused_matmul import shapes as fused_shapes
from jaxserve.kernels.gated_cell import shapes as cell_shapes
from jaxserve.kernels.grouped_matmul import shapes as grouped_shapes
from jaxserve.kernels.kv_write import shapes as write_shapes
from jaxserve.kernels.page_copy import shapes as copy_shapes
from jaxserve.kernels.paged_attention import Plan, Rows, planned_tiling
from jaxserve.kernels.paged_attention.configurations import (
    CONFIGURATIONS,
    INVARIANT_CONFIGURATIONS,
    MOSAIC_CONFIGURATIONS,
    Configuration,
)
from jaxserve.kernels.paged_attention.shapes import AttentionShape, make_inputs
from jaxserve.kernels.pointwise import shapes as pointwise_shapes
from jaxserve.kernels.quantised_matmul import shapes as product_shapes
from tests.common.closeness import assert_close
from tests.common.tiers import some

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")

# Relative norm of the error against XLA in float32.
ALLOWED = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
CONTEXTS = (1, 63, 64, 65, 511, 513, 700, 1500, 2047, 3000)


@pytest.mark.parametrize(
    "configuration",
    [
        each
        for kind in (CONFIGURATIONS, INVARIANT_CONFIGURATIONS, MOSAIC_CONFIGURATIONS)
        for each in some(kind, *range(0, len(kind), 5))
    ],
    ids=str,
)
def test_agrees_with_float32(configuration):
    """Ragged batches of short and long rows agree; values that must not be read are NaN."""
    q, k_pages, v_pages, rows, options = _inputs(configuration)
    longest = 1 if configuration.is_decode else None
    attend = partial(paged_attention, max_query_length=longest, **options)
    work = _plan(configuration, q, rows)
    got = jax.jit(partial(attend, implementation=configuration.kind), static_argnums=3)(
        q, k_pages, v_pages, 1, rows, plan=work
    )
    # The default on GPUs is TF32, whose error exceeds the tolerance for float32.
    with jax.default_matmul_precision("highest"):
        wanted = attend(q.astype(jnp.float32), k_pages, v_pages, 1, rows, implementation="xla")
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert_close(got, wanted, ALLOWED[configuration.dtype])


@pytest.mark.parametrize(
    "configuration",
    (*CONFIGURATIONS[:2], *INVARIANT_CONFIGURATIONS[:2], *MOSAIC_CONFIGURATIONS[:2]),
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_batch(configuration):
    """The bits are the same alone, split over the whole GPU, and in a batch without splits."""
    q, k_pages, v_pages, rows, options = _inputs(configuration)
    longest = 1 if configuration.is_decode else None
    run = jax.jit(
        partial(
            paged_attention,
            max_query_length=longest,
            layer=1,
            implementation=configuration.kind,
            **options,
        )
    )
    crowd = jax.tree.map(lambda x: jnp.concatenate([x] * 40), rows)
    starts = jnp.concatenate([rows.query_start + i * len(q) for i in range(40)])
    crowd = dataclasses.replace(crowd, query_start=starts)
    many = jnp.concatenate([q] * 40)
    together = np.asarray(
        run(many, k_pages, v_pages, rows=crowd, plan=_plan(configuration, many, crowd))
    )
    for row, start in enumerate(np.asarray(rows.query_start)):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], rows)
        own = q[start : start + int(one.query_length[0])]
        one = dataclasses.replace(one, query_start=jnp.zeros(1, jnp.int32))
        got = run(own, k_pages, v_pages, rows=one, plan=_plan(configuration, own, one))
        np.testing.assert_array_equal(np.asarray(got), together[start : start + len(own)])


@pytest.mark.parametrize("configuration", INVARIANT_CONFIGURATIONS, ids=str)
def test_invariant_attention_keeps_the_bits_of_a_query_in_any_chunk(configuration):
    """A query has the same bits in a long chunk, in a short one, and as a decoded token."""
    configuration = dataclasses.replace(configuration, is_decode=False)
    q, k_pages, v_pages, rows, options = _inputs(configuration)
    attend = partial(paged_attention, layer=1, implementation=configuration.kind, **options)
    chunk, decode = jax.jit(attend), jax.jit(partial(attend, max_query_length=1))
    whole = np.asarray(
        chunk(q, k_pages, v_pages, rows=rows, plan=_plan(configuration, q, rows)), np.float32
    )
    alone = dataclasses.replace(configuration, is_decode=True)
    random = np.random.default_rng(0)
    for row in (1, 4, 9):  # the long ones
        start, length = int(rows.query_start[row]), int(rows.query_length[row])
        # Few lengths, since each is compiled.
        for kind, run, count in ((configuration, chunk, 21), (alone, decode, 1)):
            begin = int(random.integers(length - count + 1))
            first = int(rows.first_position[row]) + begin
            one = Rows(
                query_start=jnp.zeros(1, jnp.int32),
                query_length=jnp.full(1, count, jnp.int32),
                first_position=jnp.full(1, first, jnp.int32),
                context_length=jnp.full(1, first + count, jnp.int32),
                page_table=rows.page_table[row : row + 1],
            )
            place = slice(start + begin, start + begin + count)
            got = run(q[place], k_pages, v_pages, rows=one, plan=_plan(kind, q[place], one))
            np.testing.assert_array_equal(np.asarray(got, np.float32), whole[place])


@pytest.mark.parametrize("configuration", row_shapes.CONFIGURATIONS, ids=str)
def test_invariant_products_keep_the_bits_of_a_row(configuration):
    """A row has the same bits in batches of random sizes and places; products are right."""
    function, _ = configuration.call()
    inputs = row_shapes.make_inputs(configuration, seed=0)
    run = jax.jit(function)
    got = run(**inputs)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs)
    weight = wide["weight"].T if configuration.is_transposed else wide["weight"]
    with jax.default_matmul_precision("highest"):
        wanted = jnp.tensordot(wide["x"], weight, 1) + wide.get("bias", 0.0)
    if configuration.is_gated:
        wanted = jax.nn.silu(wanted[:, 0]) * wanted[:, 1]
    assert_close(got, wanted + wide.get("residual", 0.0), ALLOWED[configuration.dtype])
    random = np.random.default_rng(0)
    of_rows = {"x", "residual"} & set(inputs)
    for size in (1, 2, *random.integers(3, 700, 3)):
        index = jnp.asarray(random.integers(configuration.tokens, size=size))
        some = inputs | {name: inputs[name][index] for name in of_rows}
        assert jnp.array_equal(run(**some), got[index]), size


@pytest.mark.parametrize("configuration", pointwise_shapes.CONFIGURATIONS, ids=str)
def test_invariant_norms_keep_the_bits_of_a_row(configuration):
    """A row has the same bits in batches of random sizes and places; norms agree with XLA's."""
    function, _ = configuration.call()
    inputs = pointwise_shapes.make_inputs(configuration, seed=0)
    run, right = jax.jit(function), jax.jit(partial(function, implementation="xla"))
    got = run(**inputs)
    assert_close(got, right(**inputs), ALLOWED[configuration.dtype])
    random = np.random.default_rng(0)
    for size in (1, 2, *random.integers(3, 700, 3)):
        index = jnp.asarray(random.integers(configuration.rows, size=size))
        assert jnp.array_equal(run(**inputs | {"x": inputs["x"][index]}), got[index]), size


@pytest.mark.parametrize("shape", write_shapes.GPU_SHAPES, ids=str)
def test_writes_agree_with_xla(shape):
    """Queries, pages and scales agree, except the null page, which gets the padding."""
    inputs = write_shapes.make_inputs(shape, seed=0, padding=3)
    got, wanted = (
        jax.jit(partial(rotate_and_write, implementation=name))(**inputs, layer=1)
        for name in ("triton", "xla")
    )
    allowed = {**ALLOWED, "int8": 1e-2, "float8_e4m3fn": 4e-2}
    assert_close(got[0], wanted[0], allowed[shape.dtype])
    for new, right in zip(got[1:], wanted[1:], strict=True):
        if right is not None:
            assert_close(new[:, 1:], right[:, 1:], allowed[shape.page_dtype])


@pytest.mark.parametrize("configuration", copy_shapes.CONFIGURATIONS, ids=str)
def test_copies_agree_with_xla(configuration):
    """Every bit of every page agrees; one target is past the end."""
    function, names = configuration.call()
    shape = configuration.shape
    order = np.random.default_rng(0).permutation(shape.num_pages).astype(np.int32)
    target = order[shape.count : 2 * shape.count]
    target[0] = shape.num_pages

    def whole_numbers(seed: int, *size: int) -> jax.Array:
        return jax.random.randint(jax.random.key(seed), size, -100, 100, "int8").astype(shape.dtype)

    given = {
        "pages": whole_numbers(0, *shape.array),
        "source": order[: shape.count],
        "target": target,
        "values": whole_numbers(1, shape.layers, shape.count, *shape.page),
    }
    arguments = {name: given[name] for name in names}
    got, wanted = (
        jax.jit(partial(function, implementation=name))(**arguments) for name in ("triton", "xla")
    )
    assert jnp.array_equal(got, wanted)


@pytest.mark.parametrize("shape", cell_shapes.GPU_SHAPES, ids=str)
def test_gated_cells_agree_with_xla(shape):
    """New states agree with XLA's, both in JAX's highest precision."""
    inputs = cell_shapes.make_inputs(shape, seed=0)
    with jax.default_matmul_precision("highest"):
        got, wanted = (
            jax.jit(partial(gated_cell, shape.kind, implementation=name))(**inputs)
            for name in ("triton", "xla")
        )
    for new, right in zip(got, wanted, strict=True):
        assert_close(new, right, ALLOWED[shape.dtype])


@pytest.mark.parametrize("configuration", product_shapes.CONFIGURATIONS, ids=str)
def test_products_agree_with_float32_in_any_batch(configuration):
    """Products agree with XLA's, and a row has the same bits alone and among many."""
    function, _ = configuration.call()
    inputs = product_shapes.make_inputs(configuration, seed=0)
    x, weight = inputs["x"], inputs["weight"]
    product = jax.jit(partial(function, implementation="triton"))
    got = product(x, weight)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(partial(function, implementation="xla"))(x.astype(jnp.float32), weight)
    assert_close(got, wanted, ALLOWED[configuration.shape.dtype])
    many = jnp.concatenate([x[-1:]] * 5 + [x] * -(-200 // len(x)))
    assert jnp.array_equal(product(many, weight)[4 : 5 + len(x)], jnp.concatenate([got[-1:], got]))


@pytest.mark.parametrize("configuration", fused_shapes.CONFIGURATIONS, ids=str)
def test_fused_products_agree_with_float32(configuration):
    """Products with norm, bias, gate and residual agree with their parts in float32."""
    function, _ = configuration.call()
    inputs = fused_shapes.make_inputs(configuration, seed=0)
    got = jax.jit(partial(function, implementation="triton"))(**inputs)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(partial(function, implementation="xla"))(**wide)
    assert_close(got, wanted, ALLOWED["bfloat16"])


@pytest.mark.parametrize("shape", grouped_shapes.CONFIGURATIONS, ids=str)
def test_groups_agree_with_float32(shape):
    """Skewed groups, some of them empty, agree; tokens after the last group get zeros."""
    sizes = grouped_shapes.random_sizes(shape, seed=0)
    inputs = grouped_shapes.make_inputs(shape, sizes)
    got = jax.jit(partial(grouped_matmul, implementation="triton"))(**inputs)
    begin = 0
    for matrix, end in enumerate(np.cumsum(sizes)):
        x, weight = (
            each.astype(jnp.float32) for each in (inputs["x"][begin:end], inputs["weight"][matrix])
        )
        if len(x):
            wanted = jnp.dot(x, weight, precision="highest")
            assert_close(got[begin:end], wanted, ALLOWED[shape.dtype])
        begin = end
    assert not got[begin:].any()


@pytest.mark.parametrize("shape", grouped_shapes.INVARIANT_CONFIGURATIONS, ids=str)
def test_invariant_groups_keep_the_bits_of_a_row(shape):
    """A token has the same bits in fewer tokens, at another place of a group of another size."""
    run = jax.jit(shape.call()[0])
    sizes = grouped_shapes.random_sizes(shape, seed=0)
    inputs = grouped_shapes.make_inputs(shape, sizes)
    whole = run(**inputs)
    matrix = np.repeat(np.arange(shape.matrices + 1), [*sizes, shape.tokens - sizes.sum()])
    random = np.random.default_rng(0)
    for count in (1, 2, *random.integers(3, shape.tokens, 3)):
        chosen = np.sort(random.choice(shape.tokens, count, replace=False))
        own = np.bincount(matrix[chosen], minlength=shape.matrices + 1)[:-1]
        got = run(inputs["x"][chosen], inputs["weight"], jnp.asarray(own, jnp.int32))
        assert jnp.array_equal(got, whole[chosen]), count


def test_maxima_of_rows_are_exact():
    """The likeliest tokens are those of XLA, of one row and of many."""
    for rows in (1, 64):
        x = jax.random.normal(jax.random.key(rows), (rows, 128256))
        got, wanted = (
            jax.jit(partial(row_maximum, implementation=name))(x) for name in ("triton", "xla")
        )
        assert all(map(jnp.array_equal, got, wanted))


def _inputs(configuration: Configuration):
    lengths = [1] * 10 if configuration.is_decode else [1, 63, 2, 1, 300, 7, 1, 40, 5, 1000]
    shape = AttentionShape(
        name="ragged",
        num_heads=configuration.kv_heads * configuration.group,
        num_kv_heads=configuration.kv_heads,
        head_dim=configuration.head_dim,
        page_size=configuration.page_size,
        rows=tuple(
            (min(length, context), context)
            for length, context in zip(lengths, CONTEXTS, strict=True)
        ),
    )
    q, k_pages, v_pages, rows = make_inputs(shape, seed=0)
    held = np.zeros((k_pages.shape[1], shape.page_size), bool)
    for table, context in zip(np.asarray(rows.page_table), CONTEXTS, strict=True):
        position = np.arange(context)
        held[table[position // shape.page_size], position % shape.page_size] = True
    options = dict(configuration.options)
    if options.pop("has_sinks", False):
        options["sinks"] = jnp.linspace(-2.0, 3.0, shape.num_heads)
    if options.pop("has_alibi", False):
        options["alibi_slopes"] = jnp.linspace(0.01, 0.2, shape.num_heads)
    if configuration.page_dtype == configuration.dtype:
        mask = jnp.asarray(held)[None, :, None, :, None]
        k_pages, v_pages = (
            jnp.where(mask, x, np.nan).astype(configuration.dtype) for x in (k_pages, v_pages)
        )
    else:
        k_pages, options["k_scales"] = quantize(k_pages, configuration.page_dtype)
        v_pages, options["v_scales"] = quantize(v_pages, configuration.page_dtype)
    return q.astype(configuration.dtype), k_pages, v_pages, rows, options


def _plan(configuration: Configuration, q: jax.Array, rows: Rows) -> Plan:
    tiling = planned_tiling(
        jax.devices()[0],
        configuration.kind,
        dtype=configuration.dtype,
        page_dtype=configuration.page_dtype,
        kv_heads=configuration.kv_heads,
        group=configuration.group,
        head_dim=configuration.head_dim,
        chunk_invariant=configuration.chunk_invariant,
    )
    assert tiling is not None
    return rows.plan(
        tiling, num_tokens=len(q), max_context=max(CONTEXTS), is_decode=configuration.is_decode
    )
