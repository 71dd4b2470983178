"""Every implementation of paged attention agrees with the dense reference."""

from __future__ import annotations

import dataclasses
import itertools
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import Rows, kv_write, paged_attention, quantize
from jaxserve.kernels.paged_attention import Launches, Plan, Tiling
from jaxserve.kernels.paged_attention.shapes import TEST_SHAPES, AttentionShape, make_inputs
from tests.common.closeness import assert_close
from tests.common.instructions import has_bfloat16_products
from tests.common.tiers import some

OPTIONS = {
    "plain": {},
    "window": dict(sliding_window=6),
    "soft_cap": dict(soft_cap=1.5, scale=0.7),
    "alibi": dict(alibi=True),
    "sinks": dict(sinks=True),
    "all": dict(sliding_window=19, soft_cap=2.0, alibi=True, sinks=True),
}


QUANTIZED = ("int8", "float8_e4m3fn")

# Compiled as a whole, once for all calls of the same shapes and options.
_attend = jax.jit(
    paged_attention,
    static_argnames=(
        *("layer", "scale", "sliding_window", "soft_cap"),
        *("max_query_length", "implementation"),
    ),
)
_quantize = jax.jit(quantize, static_argnames="dtype")


@pytest.fixture(params=["xla", "cpu", "triton_interpreted"])
def attention(request):
    """`paged_attention` of each implementation that is compared with the reference."""
    return partial(_attend, implementation=request.param)


@pytest.fixture(params=["xla", "cpu"])
def compiled_attention(request):
    """The implementations that run compiled on this machine."""
    return partial(_attend, implementation=request.param)


def _options(name: str, shape: AttentionShape) -> dict:
    options = dict(OPTIONS[name])
    if options.pop("alibi", False):
        options["alibi_slopes"] = jnp.linspace(0.05, 0.4, shape.num_heads)
    if options.pop("sinks", False):
        options["sinks"] = jnp.linspace(-3.0, 4.0, shape.num_heads)
    return options


def _check(attention, inputs, layer=1, max_query_length=None, **options) -> None:
    """Compare the rows' tokens in relative norm; other tokens must be finite."""
    q, k_pages, v_pages, rows = inputs
    work = _plan(q, k_pages, rows, max_query_length)
    given = (q, k_pages, v_pages, layer, rows)
    options = dict(max_query_length=max_query_length, plan=work, **options)
    got = np.asarray(attention(*given, **options))
    wanted = np.asarray(paged_attention(*given, **options, implementation="reference"))
    owned = np.zeros(len(q), bool)
    of_rows = np.asarray(rows.query_start), np.asarray(rows.query_length)
    for start, length in zip(*of_rows, strict=True):
        owned[start : start + length] = True
    assert_close(got[owned], wanted[owned], 2e-6)
    assert np.isfinite(got).all()


# Of the shapes, "decode" merges parts of a softmax whose maxima differ.
@pytest.mark.parametrize("shape", some(TEST_SHAPES, 1), ids=lambda shape: shape.name)
def test_agrees_with_the_reference(attention, shape):
    """Ragged batches agree in the mixed form, with every option at once."""
    _check(attention, make_inputs(shape, seed=1, padding=5), **_options("all", shape))


@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_alone(compiled_attention, options):
    """Each option alone agrees, in the mixed form and in the decode form."""
    attend = compiled_attention
    _check(attend, make_inputs(_shape("mixed"), seed=1), **_options(options, _shape("mixed")))
    shape = _shape("decode")
    _check(attend, _decode_inputs(shape, seed=2), max_query_length=1, **_options(options, shape))


@pytest.mark.parametrize("seed", some(range(4)))
def test_random_ragged_batches(attention, seed):
    """Random rows, contexts, pages and options agree; the seed is the test's name."""
    random = np.random.default_rng(seed)
    kv_heads = int(random.integers(1, 4))
    rows = []
    for _ in range(random.integers(1, 7)):
        queries = int(random.choice([0, 1, 1, random.integers(2, 90)]))
        rows.append((queries, queries + int(random.integers(0, 300)) * bool(queries)))
    if not any(queries for queries, _ in rows):
        rows.append((2, 3))
    shape = AttentionShape(
        name="random",
        num_heads=kv_heads * int(random.integers(1, 5)),
        num_kv_heads=kv_heads,
        head_dim=int(random.choice([8, 16, 40, 64])),
        page_size=int(random.choice([1, 8, 32])),
        rows=tuple(rows),
    )
    name = str(random.choice(list(OPTIONS)))
    _check(attention, make_inputs(shape, seed, padding=3), **_options(name, shape))


@pytest.mark.parametrize("sink", some([-1e9, -200.0, 200.0, 1e9], 0, 3))
def test_sinks_may_be_far_from_the_logits(attention, sink):
    """A low sink changes nothing, and a high one leaves zeros; neither overflows."""
    q, k_pages, v_pages, rows = _decode_inputs(_shape("decode"), seed=3)
    work = _plan(q, k_pages, rows, 1)
    attend = partial(attention, q, k_pages, v_pages, 1, rows, max_query_length=1, plan=work)
    is_used = np.asarray(rows.query_length) > 0
    got = np.asarray(attend(sinks=jnp.full(q.shape[1], sink)))[is_used]
    wanted = np.asarray(attend())[is_used] if sink < 0 else np.zeros_like(got)
    np.testing.assert_allclose(got, wanted, atol=1e-30)


@pytest.mark.parametrize("max_query_length", some([None, 1]))
@pytest.mark.parametrize("poison", some([np.nan, np.inf]))
def test_garbage_outside_the_context_is_never_seen(attention, poison, max_query_length):
    """NaN in the null page, unused pages and page tails does not change the output."""
    if max_query_length == 1:
        q, k_pages, v_pages, rows = _decode_inputs(_shape("decode"), seed=3)
    else:
        q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=3)
    held = _held(rows, k_pages)
    poisoned = (jnp.where(held, pages, poison) for pages in (k_pages, v_pages))
    _check(attention, (q, *poisoned, rows), max_query_length=max_query_length)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_what_is_before_a_window_is_never_seen(implementation):
    """Pages before it may be those of another sequence, whose values are not finite."""
    q, *pages, rows = make_inputs(_shape("mixed"), seed=3)
    held = _held(rows, pages[0], window=5)
    work = _plan(q, pages[0], rows, None)
    attend = partial(_attend, plan=work, sliding_window=5, implementation=implementation)
    got = attend(q, *(jnp.where(held, each, np.nan) for each in pages), 1, rows)
    np.testing.assert_array_equal(got, attend(q, *pages, 1, rows))


def test_one_row_with_not_a_number_leaves_the_others_alone(attention):
    """A sequence with NaN among its values does not affect the rest of the batch."""
    q, k_pages, v_pages, rows = _decode_inputs(_shape("decode"), seed=4)
    work = _plan(q, k_pages, rows, 1)
    run = partial(attention, layer=0, rows=rows, max_query_length=1, plan=work)
    wanted = run(q, k_pages, v_pages)
    victim = int(rows.page_table[3, 0])
    got = run(q, k_pages.at[:, victim].set(jnp.nan), v_pages.at[:, victim].set(jnp.nan))
    assert np.isnan(got[3]).all()
    np.testing.assert_allclose(got[:3], wanted[:3], rtol=1e-6)


def test_several_rows_share_one_page_table(attention):
    """A recomputed leading range and a new prompt of one sequence attend to each other's keys."""
    shape = dataclasses.replace(_shape("prefill"), rows=((0, 40), (0, 40), (0, 40)))
    _, k_pages, v_pages, rows = make_inputs(shape, seed=5)
    rows = Rows(
        query_start=jnp.asarray([0, 6, 17], jnp.int32),
        query_length=jnp.asarray([6, 11, 1], jnp.int32),
        first_position=jnp.asarray([2, 28, 20], jnp.int32),
        context_length=jnp.asarray([40, 40, 40], jnp.int32),
        page_table=jnp.tile(rows.page_table[1:2], (3, 1)),
    )
    q = jax.random.normal(jax.random.key(0), (20, shape.num_heads, shape.head_dim))
    _check(attention, (q, k_pages, v_pages, rows))


def test_bfloat16_is_computed_in_float32():
    """bfloat16 queries and pages give the float32 answer, rounded once."""
    q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=6)
    half = [x.astype(jnp.bfloat16) for x in (q, k_pages, v_pages)]
    got = _attend(*half, 1, rows)
    wanted = _attend(*(x.astype(jnp.float32) for x in half), 1, rows)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("options", some(OPTIONS))
@pytest.mark.parametrize("name", ["mixed", "decode", "prefill"])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_float32_queries_of_pages_in_bfloat16(compiled_attention, name, options, head_dim):
    """The pages' numbers are widened exactly, so that the answer is that of float32 pages.

    The kernel rounds scaled queries where the processor multiplies pairs of bfloat16 numbers.
    """
    shape = dataclasses.replace(_shape(name), head_dim=head_dim)
    q, *pages, rows = make_inputs(shape, seed=6)
    half = [x.astype(jnp.bfloat16) for x in pages]
    options = {"scale": 0.125, **_options(options, shape)}
    attend = partial(compiled_attention, layer=1, rows=rows, **options)
    got = attend(q, *half)
    assert got.dtype == jnp.float32
    is_kernel = compiled_attention.keywords["implementation"] == "cpu"
    if is_kernel and head_dim == 64 and has_bfloat16_products():
        rounded = (q * options["scale"]).astype(jnp.bfloat16)
        q = rounded.astype(jnp.float32) / options["scale"]
    wanted = attend(q, *(x.astype(jnp.float32) for x in half))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_query_has_the_same_bits_in_a_prompt_and_alone(dtype):
    """The kernel for CPUs transposes the keys of many queries, and not those of few."""
    shape = dataclasses.replace(_shape("chunk"), head_dim=64, rows=((150, 163),))
    q, *pages, rows = make_inputs(shape, seed=21)
    attend = partial(_attend, layer=1, implementation="cpu")
    pages = [x.astype(dtype) for x in pages]
    whole = np.asarray(attend(q, *pages, rows=rows))
    for query in (0, 70, 149):
        at = rows.first_position + query
        alone = dataclasses.replace(
            rows,
            query_length=jnp.ones_like(at),
            first_position=at,
            context_length=at + 1,
        )
        got = attend(q[query : query + 1], *pages, rows=alone, max_query_length=1)
        np.testing.assert_array_equal(got[0], whole[query])


def test_layer_may_be_traced(compiled_attention):
    """A traced layer index reads the same layer as a static one."""
    q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=7)
    static = compiled_attention(q, k_pages, v_pages, 1, rows)
    traced = jax.jit(partial(paged_attention, **compiled_attention.keywords))(
        q, k_pages, v_pages, jnp.int32(1), rows
    )
    np.testing.assert_allclose(static, traced, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("max_query_length", some([None, 1]))
def test_the_cache_is_not_copied(compiled_attention, max_query_length):
    """With donated pages, writing and attention need far less memory than the cache itself."""
    shape = AttentionShape(
        name="large_cache",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=32,
        rows=((1, 300),) * 4,
    )
    q, k_pages, v_pages, rows = _decode_inputs(shape, seed=8)
    k_pages, v_pages = (jnp.tile(x, (1, 100, 1, 1, 1)) for x in (k_pages, v_pages))
    new = jnp.zeros((len(q), 2, 64))
    where = jnp.zeros(len(q), jnp.int32)

    def step(k_pages, v_pages):
        k_pages = kv_write(k_pages, 1, new, where, where)
        v_pages = kv_write(v_pages, 1, new, where, where)
        out = compiled_attention(q, k_pages, v_pages, 1, rows, max_query_length=max_query_length)
        return out, k_pages, v_pages

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(k_pages, v_pages).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < k_pages.nbytes / 4


@pytest.mark.parametrize(
    ("implementation", "dtype", "decode"),
    some(
        [
            *(
                ("cpu", dtype, decode)
                for dtype in (None, *QUANTIZED, "bfloat16")
                for decode in (False, True)
            ),
            *(("triton_interpreted", None, decode) for decode in (False, True)),
        ],
        0,
        6,
        8,
    ),
)
def test_a_row_has_the_same_bits_in_any_batch(implementation, dtype, decode):
    """Other rows of the batch, and the split of its work, do not change a row's bits.

    A row is alone where the others are unused, and in a batch of its own. The interpreter is
    compiled for each shape, so that there only the first row has such a batch.
    """
    shape = dataclasses.replace(_shape("chunk"), head_dim=64, rows=((1, 200), (1, 7), (1, 130)))
    if not decode:
        shape = dataclasses.replace(shape, rows=((40, 200), (7, 7), (130, 130)))
    q, k_pages, v_pages, rows = make_inputs(shape, seed=10)
    longest = 1 if decode else None
    run = partial(_attend, layer=1, implementation=implementation, max_query_length=longest)
    if dtype == "bfloat16":
        k_pages, v_pages = (x.astype(dtype) for x in (k_pages, v_pages))
    elif dtype is not None:
        (k_pages, k_scales), (v_pages, v_scales) = (_quantize(x, dtype) for x in (k_pages, v_pages))
        run = partial(run, k_scales=k_scales, v_scales=v_scales)

    def attended(q: jax.Array, rows: Rows) -> np.ndarray:
        work = _plan(q, k_pages, rows, longest)
        return np.asarray(run(q, k_pages, v_pages, rows=rows, plan=work))

    together = attended(q, rows)
    starts = np.asarray(rows.query_start)
    for row, (queries, _) in enumerate(shape.rows):
        own = slice(starts[row], starts[row] + queries)
        lengths = jnp.where(jnp.arange(len(shape.rows)) == row, rows.query_length, 0)
        got = attended(q, dataclasses.replace(rows, query_length=lengths))
        np.testing.assert_array_equal(got[own], together[own])
        if implementation == "cpu" or row == 0:
            alone = jax.tree.map(lambda x, row=row: x[row : row + 1], rows)
            alone = dataclasses.replace(alone, query_start=jnp.zeros(1, jnp.int32))
            np.testing.assert_array_equal(attended(q[own], alone), together[own])


@pytest.mark.parametrize("options", some(["plain", "all"], 1))
@pytest.mark.parametrize("dtype", [None, *QUANTIZED])
def test_a_thread_with_many_rows_changes_no_bit(dtype, options):
    """The C++ kernel then computes the KV heads of a row together, and reads no garbage."""
    count = 4 * (os.cpu_count() or 1) + 3
    contexts = np.random.default_rng(20).integers(1, 200, count)
    shape = AttentionShape(
        name="many",
        num_heads=9,
        num_kv_heads=3,
        head_dim=32,
        page_size=8,
        rows=tuple((1, int(context)) for context in contexts),
    )
    q, k_pages, v_pages, rows = _decode_inputs(shape, seed=20)
    held = _held(rows, k_pages)
    scales = {}
    if dtype is not None:
        (k_pages, k_scales), (v_pages, v_scales) = (_quantize(x, dtype) for x in (k_pages, v_pages))
        scales = {
            name: jnp.where(held[..., 0], each, jnp.nan)
            for name, each in (("k_scales", k_scales), ("v_scales", v_scales))
        }
    else:
        k_pages, v_pages = (jnp.where(held, pages, jnp.nan) for pages in (k_pages, v_pages))
    attend = partial(_attend, implementation="cpu")
    options = {**scales, **_options(options, shape)}
    _check(attend, (q, k_pages, v_pages, rows), max_query_length=1, **options)
    run = partial(attend, max_query_length=1, layer=1, **options)
    together = np.asarray(run(q, k_pages, v_pages, rows=rows))
    for row in (0, count // 2, count - 1):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], rows)
        alone = dataclasses.replace(alone, query_start=jnp.zeros(1, jnp.int32))
        got = np.asarray(run(q[row : row + 1], k_pages, v_pages, rows=alone))
        np.testing.assert_array_equal(got, together[row : row + 1])


@pytest.mark.parametrize(
    ("field", "added", "message"),
    [
        ("page_table", 10_000, "page id out of range"),
        ("page_table", -10_000, "page id out of range"),
        ("query_start", 60, "queries out of range"),
        ("query_start", -1, "queries out of range"),
        ("query_start", np.asarray([0, 0, 0, -3, 0]), "shares queries"),
        ("query_length", -13, "queries out of range"),
        ("first_position", -100, "positions out of range"),
        ("first_position", 2**31 - 60, "positions out of range"),
        ("context_length", np.asarray([0, 0, 0, 0, 10_000]), "past the end of the page table"),
    ],
)
def test_rows_outside_the_cache_fail_the_call(field, added, message):
    """The compiled kernel checks rows before it reads or writes: it raises, not crashes."""
    q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=11)
    if field == "context_length":
        rows = dataclasses.replace(rows, first_position=rows.first_position + 10_000)
    rows = dataclasses.replace(rows, **{field: getattr(rows, field) + added})
    with pytest.raises(Exception, match=message):
        paged_attention(q, k_pages, v_pages, 0, rows, implementation="cpu").block_until_ready()


@pytest.mark.parametrize("window", [None, 2, 6])
@pytest.mark.parametrize("context", some([-(2**31), -7, 0, 3], 1))
def test_a_context_that_ends_before_the_queries(compiled_attention, context, window):
    """Queries past the context attend to the rest of it; their output is 0 if there is none."""
    q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=12)
    rows = dataclasses.replace(rows, context_length=jnp.minimum(rows.context_length, context))
    given = (q, k_pages, v_pages, 1, rows)
    wanted = paged_attention(*given, sliding_window=window, implementation="reference")
    got = compiled_attention(*given, sliding_window=window)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    some(
        itertools.product(QUANTIZED, ["reference", "xla", "cpu", "triton_interpreted"]),
        0,
        1,
        2,
        3,
        6,
    ),
)
def test_quantized_pages_are_multiplied_by_their_scales(implementation, dtype):
    """With a scale per token and head, the answer is that of the restored pages."""
    q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=13)
    (k, k_scales), (v, v_scales) = (_quantize(pages, dtype) for pages in (k_pages, v_pages))
    assert k.dtype == dtype and k_scales.shape == k_pages.shape[:4]
    restored = (
        k.astype(jnp.float32) * k_scales[..., None],
        v.astype(jnp.float32) * v_scales[..., None],
    )
    assert_close(restored[0], k_pages, 0.04)
    wanted = paged_attention(q, *restored, 1, rows, implementation="reference")
    attend = paged_attention if implementation == "reference" else _attend
    got = attend(
        q,
        k,
        v,
        1,
        rows,
        k_scales=k_scales,
        v_scales=v_scales,
        plan=_plan(q, k_pages, rows),
        implementation=implementation,
    )
    assert_close(got, wanted, 2e-6)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", some(TEST_SHAPES), ids=lambda shape: shape.name)
def test_quantized_pages_on_the_cpu(shape, dtype):
    """Ragged batches of all kinds of heads and pages agree, with every option; NaN is not read."""
    q, k_pages, v_pages, rows = make_inputs(shape, seed=16, padding=5)
    (k, k_scales), (v, v_scales) = (_quantize(pages, dtype) for pages in (k_pages, v_pages))
    held = _held(rows, k)[..., 0]
    scales = dict(
        k_scales=jnp.where(held, k_scales, jnp.nan), v_scales=jnp.where(held, v_scales, jnp.nan)
    )
    attend = partial(_attend, implementation="cpu")
    _check(attend, (q, k, v, rows), **scales, **_options("all", shape))


@pytest.mark.release
def test_one_scale_that_is_not_a_number_leaves_the_other_rows_alone(attention):
    """The row itself is NaN, which 8 bits cannot represent without the scale."""
    q, k_pages, v_pages, rows = _decode_inputs(_shape("decode"), seed=17)
    (k, k_scales), (v, v_scales) = (_quantize(pages, "int8") for pages in (k_pages, v_pages))
    work = _plan(q, k, rows, 1)
    run = partial(attention, q, k, v, 0, rows, max_query_length=1, plan=work, k_scales=k_scales)
    wanted = run(v_scales=v_scales)
    got = run(v_scales=v_scales.at[:, int(rows.page_table[3, 0])].set(jnp.nan))
    assert np.isnan(got[3]).all()
    np.testing.assert_allclose(got[:3], wanted[:3], rtol=1e-6)


@pytest.mark.parametrize("width", some([264, 256]))
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_number_of_eight_bits_is_read_as_it_is(dtype, width):
    """The C++ kernel reads them in vectors of either width; a token attends only to itself."""
    numbers = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype))
    numbers = np.resize(numbers[np.isfinite(numbers.astype(np.float32))], width)
    pages = jnp.zeros((1, 2, 1, 1, width), dtype).at[0, 1, 0, 0].set(numbers)
    one = jnp.ones(1, jnp.int32)
    out = paged_attention(
        jnp.zeros((1, 1, width)),
        pages,
        pages,
        0,
        Rows(one - 1, one, one - 1, one, page_table=one[None]),
        k_scales=jnp.ones((1, 2, 1, 1)),
        v_scales=jnp.ones((1, 2, 1, 1)),
        implementation="cpu",
    )
    np.testing.assert_array_equal(out[0, 0], numbers.astype(np.float32))


@pytest.mark.release
def test_the_cpu_kernel_refuses_other_pages():
    """8 bits without scales, floats with scales, and float16 go to XLA, with a reason."""
    q, k_pages, v_pages, rows = make_inputs(_shape("decode"), seed=18)
    scales = dict.fromkeys(("k_scales", "v_scales"), k_pages[..., 0])
    for dtype, options in (("int8", {}), ("float32", scales), ("float16", {})):
        pages = [x.astype(dtype) for x in (k_pages, v_pages)]
        attend = partial(_attend, q, *pages, 0, rows, **options)
        with pytest.raises(NotImplementedError, match=f"float32 .* not float32 with {dtype}"):
            attend(implementation="cpu")
        np.testing.assert_array_equal(attend(), attend(implementation="xla"))


@pytest.mark.release
def test_a_row_that_shrank_since_the_plan():
    """Work items of ended rows or longer contexts, and empty work items, do no harm."""
    q, k_pages, v_pages, rows = _decode_inputs(_shape("decode"), seed=14)
    longer = dataclasses.replace(
        rows,
        query_length=jnp.ones_like(rows.query_length),
        first_position=rows.first_position + 5,
        context_length=rows.context_length + 5,
    )
    work = _plan(q, k_pages, longer, 1)
    live = np.asarray(rows.query_length) > 0  # the output of others is undefined, but finite
    shorter = dataclasses.replace(rows, context_length=rows.context_length - 5)
    for now in (rows, shorter):
        given = (q, k_pages, v_pages, 1, now)
        options = dict(max_query_length=1, plan=work)
        got = _attend(*given, **options, implementation="triton_interpreted")
        wanted = paged_attention(*given, **options, implementation="reference")
        assert np.isfinite(got).all() and not live.all()
        np.testing.assert_allclose(got[live], wanted[live], atol=2e-6)


def test_a_plan_of_other_heads_is_refused():
    """A plan for other heads raises an error; without a plan the refusal names what is missing."""
    q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=15)
    attend = partial(
        paged_attention, q, k_pages, v_pages, 0, rows, implementation="triton_interpreted"
    )
    with pytest.raises(NotImplementedError, match="a plan of the batch"):
        attend()
    with pytest.raises(ValueError, match="4 KV heads in groups of 1"):
        attend(plan=_plan(q, q[None, :, :, None], rows))


@pytest.mark.usefixtures("unchecked_shapes")
def test_contradictory_shapes_are_refused():
    """Inconsistent shapes and unknown implementations raise errors that say so."""
    q, k_pages, v_pages, rows = make_inputs(_shape("mixed"), seed=9)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        paged_attention(q[:, :3], k_pages, v_pages, 0, rows)
    with pytest.raises(ValueError, match="one token per row"):
        paged_attention(q, k_pages, v_pages, 0, rows, max_query_length=1)
    with pytest.raises(ValueError, match="unknown"):
        paged_attention(q, k_pages, v_pages, 0, rows, implementation="cuda")
    with pytest.raises(ValueError, match="empty pages"):
        paged_attention(q, k_pages[:, :, :, :0], v_pages[:, :, :, :0], 0, rows)
    with pytest.raises(ValueError, match="alibi_slopes"):
        paged_attention(q, k_pages, v_pages, 0, rows, alibi_slopes=jnp.ones(3))
    with pytest.raises(ValueError, match="sinks"):
        paged_attention(q, k_pages, v_pages, 0, rows, sinks=jnp.ones(3))
    with pytest.raises(ValueError, match="four times"):
        short = dataclasses.replace(rows, context_length=rows.context_length[:-1])
        paged_attention(q, k_pages, v_pages, 0, short)
    scales = k_pages[..., 0]
    with pytest.raises(ValueError, match="pass both or none"):
        paged_attention(q, k_pages, v_pages, 0, rows, k_scales=scales)
    with pytest.raises(ValueError, match="one per token and head"):
        paged_attention(q, k_pages, v_pages, 0, rows, k_scales=scales[0], v_scales=scales[0])


def _plan(q, k_pages, rows: Rows, max_query_length: int | None = None) -> Plan:
    """Return work items for a device so small that these batches have every kind of item."""
    tiling = Tiling(
        kv_heads=k_pages.shape[2],
        group=q.shape[1] // k_pages.shape[2],
        split_rows=16,
        tile_rows=16,
        split_keys=32,
        launches=Launches(block_keys=16),
        split_programs=6,
        tile_programs=6,
    )
    context = rows.page_table.shape[1] * k_pages.shape[3]
    return rows.plan(
        tiling, num_tokens=len(q), max_context=context, is_decode=max_query_length == 1
    )


def _shape(name: str) -> AttentionShape:
    return next(shape for shape in TEST_SHAPES if shape.name == name)


def _decode_inputs(shape: AttentionShape, seed: int):
    """Return inputs in the decode form: token i is row i, including unused rows' tokens."""
    q, k_pages, v_pages, rows = make_inputs(shape, seed)
    starts = jnp.arange(len(shape.rows), dtype=jnp.int32)
    q = jax.random.normal(jax.random.key(seed), (len(shape.rows), *q.shape[1:]))
    return q, k_pages, v_pages, dataclasses.replace(rows, query_start=starts)


def _held(rows: Rows, pages: jax.Array, window: int | None = None) -> jax.Array:
    """Return the places that the rows' queries see, bool [1, pages, 1, page_size, 1]."""
    page_size = pages.shape[3]
    held = np.zeros((pages.shape[1], page_size), bool)
    of_rows = rows.page_table, rows.first_position, rows.context_length
    for table, first, context in zip(*map(np.asarray, of_rows), strict=True):
        position = np.arange(0 if window is None else max(0, first - window + 1), context)
        held[table[position // page_size], position % page_size] = True
    return jnp.asarray(held)[None, :, None, :, None]
