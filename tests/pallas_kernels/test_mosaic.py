"""The Mosaic kernels in JAX's interpreter, which detects races, agrees with the reference.

The interpreter exists since JAX 0.11; `make kernel-gate` runs these tests in an environment with
it. The interpreter models neither layouts nor alignment; compilation checks those.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import Rows, paged_attention, versions
from jaxserve.kernels.paged_attention import Launches, Plan, Tiling
from jaxserve.kernels.paged_attention.planner import Warpgroups
from jaxserve.kernels.paged_attention.shapes import AttentionShape, make_inputs
from tests.common.closeness import assert_close
from tests.common.tiers import some

pytestmark = pytest.mark.skipif(
    not versions.has_mosaic(),
    reason="the interpreter of Mosaic kernels came with JAX 0.11; make kernel-gate runs these",
)

# Relative norm of the error against float64.
ALLOWED = {"float16": 1e-3, "bfloat16": 6e-3}


@pytest.fixture(autouse=True)
def no_races():
    """Check after a test that the interpreter has found no race."""
    yield
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    assert not get_races().races_found


@pytest.mark.parametrize("seed", some(range(6)))
def test_random_ragged_batches(seed):
    """Random heads, pages, dtypes, options and rows agree; the seed is the test's name."""
    random = np.random.default_rng(seed)
    group = int(random.choice([1, 2, 3, 4, 5, 8]))
    rows = []
    for _ in range(random.integers(1, 4)):
        queries = int(random.choice([0, 1, random.integers(2, 90)]))
        rows.append((queries, queries + int(random.integers(0, 200)) * bool(queries)))
    shape = AttentionShape(
        name="random",
        num_heads=group,
        num_kv_heads=1,
        head_dim=int(random.choice([64, 128])),
        page_size=int(random.choice([16, 32, 64, 128, 256])),
        rows=(*rows, (70, 200)),
    )
    options = dict(sliding_window=int(random.integers(1, 150))) if seed % 2 else {}
    if seed % 3 == 1:
        options["soft_cap"], options["scale"] = 2.0, 0.3
    inputs = make_inputs(shape, seed, padding=3)
    _check(inputs, dtype=("bfloat16", "float16")[seed % 2], **options)


@pytest.mark.parametrize("page_size", [64, 128])
def test_two_heads_and_long_rows(page_size):
    """Items have several heads and programs; some blocks need no mask, and blocks are reused."""
    shape = AttentionShape(
        name="long",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=page_size,
        rows=((33, 700), (100, 100), (7, 300)),
    )
    _check(make_inputs(shape, 3), programs=3)


def test_a_window_within_long_rows():
    """Blocks before the window are skipped, and blocks at its edge are masked."""
    shape = AttentionShape(
        name="window", num_heads=2, num_kv_heads=1, head_dim=64, page_size=64, rows=((70, 900),)
    )
    _check(make_inputs(shape, 4), sliding_window=420)


def test_rows_that_have_gone_or_shrunk_since_the_plan():
    """Work items of rows that have ended, and of contexts that end early, do no harm."""
    shape = AttentionShape(
        name="rows", num_heads=2, num_kv_heads=1, head_dim=64, page_size=32, rows=((40, 90),) * 4
    )
    q, k_pages, v_pages, rows = make_inputs(shape, 5)
    work = _plan(q, k_pages, rows)
    now = dataclasses.replace(
        rows,
        query_length=jnp.asarray([40, 0, 9, 40], jnp.int32),
        context_length=jnp.asarray([60, 90, 90, -5], jnp.int32),
    )
    _check((q, k_pages, v_pages, now), work=work)


@pytest.mark.parametrize("seed", some(range(4)))
def test_random_decode_batches(seed):
    """Rows of one query agree, with splits that one item has and splits that several share."""
    random = np.random.default_rng(seed)
    group = int(random.choice([1, 3, 4, 8]))
    contexts = [int(random.integers(1, 60)), int(random.integers(100, 330))]
    shape = AttentionShape(
        name="decode",
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=(64, 128)[seed % 2],
        page_size=(16, 32, 64, 128)[seed % 4],
        rows=tuple((1, context) for context in contexts),
    )
    options = dict(sliding_window=int(random.integers(1, 150))) if seed == 1 else {}
    if seed == 2:
        options["soft_cap"], options["scale"] = 2.0, 0.3
    inputs = make_inputs(shape, seed)
    work = _plan(inputs[0], inputs[1], inputs[3], is_decode=True)
    assert not len(work.tiles) and work.counts[2]
    _check(inputs, dtype=("bfloat16", "float16")[seed % 2], work=work, is_decode=True, **options)


def test_decoding_rows_that_have_gone_or_shrunk_since_the_plan():
    """A plan for the last iteration of a loop serves the earlier ones, and rows that have ended."""
    shape = AttentionShape(
        name="rows", num_heads=4, num_kv_heads=1, head_dim=64, page_size=32, rows=((1, 150),) * 3
    )
    q, k_pages, v_pages, rows = make_inputs(shape, 8)
    work = _plan(q, k_pages, rows, is_decode=True)
    now = dataclasses.replace(
        rows,
        query_length=jnp.asarray([1, 0, 1], jnp.int32),
        first_position=jnp.asarray([140, 149, 20], jnp.int32),
        context_length=jnp.asarray([141, 150, 21], jnp.int32),
    )
    _check((q, k_pages, v_pages, now), work=work, is_decode=True)


def test_a_row_has_the_same_bits_in_any_batch():
    """The other rows of a batch do not change the bits of a row's output."""
    shape = AttentionShape(
        name="crowd",
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        page_size=64,
        rows=((30, 30), (70, 300), (40, 40)),
    )
    q, k_pages, v_pages, rows = make_inputs(shape, 6)
    q, k_pages, v_pages = (x.astype(jnp.bfloat16) for x in (q, k_pages, v_pages))
    together = _attend(q, k_pages, v_pages, rows, _plan(q, k_pages, rows))
    start, length = int(rows.query_start[1]), int(rows.query_length[1])
    one = jax.tree.map(lambda x: x[1:2], rows)
    one = dataclasses.replace(one, query_start=jnp.zeros(1, jnp.int32))
    own = q[start : start + length]
    alone = _attend(own, k_pages, v_pages, one, _plan(own, k_pages, one))
    np.testing.assert_array_equal(
        np.asarray(alone, np.float32), np.asarray(together, np.float32)[start : start + length]
    )


def test_what_is_refused():
    """The refusal names each case that the kernel does not serve."""
    shape = AttentionShape(
        name="small", num_heads=2, num_kv_heads=1, head_dim=64, page_size=64, rows=((30, 30),)
    )
    q, k_pages, v_pages, rows = make_inputs(shape, 7)
    q, k_pages, v_pages = (x.astype(jnp.bfloat16) for x in (q, k_pages, v_pages))
    work = _plan(q, k_pages, rows)

    def refused(reason: str, q=q, k_pages=k_pages, v_pages=v_pages, work=work, **options) -> None:
        with pytest.raises(NotImplementedError, match=reason):
            paged_attention(
                q,
                k_pages,
                v_pages,
                0,
                rows,
                plan=work,
                **{"implementation": "mosaic_interpreted", **options},
            )

    refused("not for cpu", implementation="mosaic")
    refused("a plan of the batch", work=None)
    refused("does not support ALiBi", alibi_slopes=jnp.ones(2))
    refused("no attention sinks", sinks=jnp.ones(2))
    refused("a positive scale", scale=-1.0)
    refused("sees nothing", sliding_window=0)
    refused("not float32 and bfloat16", q=q.astype(jnp.float32))
    half = (x[..., :32] for x in (q, k_pages, v_pages))
    refused("head_dim must be one of", **dict(zip(("q", "k_pages", "v_pages"), half, strict=True)))
    short = dict(k_pages=k_pages[:, :, :, :8], v_pages=v_pages[:, :, :, :8])
    refused("pages of 16 tokens or more", **short)
    tiles = dataclasses.replace(work, tiling=dataclasses.replace(work.tiling, warpgroups=None))
    refused("another kernel's", work=tiles)


def _check(
    inputs,
    *,
    dtype: str = "bfloat16",
    programs: int = 2,
    work: Plan | None = None,
    is_decode: bool = False,
    **options,
) -> None:
    """Compare the rows' tokens with the reference, in float64 on the same numbers.

    All values outside of the contexts, in unused pages and in page tails, are NaN.
    """
    q, k_pages, v_pages, rows = inputs
    q, k_pages, v_pages = (x.astype(dtype) for x in (q, k_pages, v_pages))
    page_size = k_pages.shape[3]
    held = np.zeros((k_pages.shape[1], page_size), bool)
    for table, context in zip(np.asarray(rows.page_table), rows.context_length, strict=True):
        position = np.arange(int(context))
        held[table[position // page_size], position % page_size] = True
    mask = jnp.asarray(held)[None, :, None, :, None]
    k_pages, v_pages = (jnp.where(mask, x, np.nan).astype(dtype) for x in (k_pages, v_pages))
    work = _plan(q, k_pages, rows, programs) if work is None else work
    assert work.counts[1 if is_decode else 0]
    longest = 1 if is_decode else None
    got = _attend(q, k_pages, v_pages, rows, work, max_query_length=longest, **options)
    got = np.asarray(got, np.float64)
    attend = partial(paged_attention, implementation="reference", **options)
    wide = (x.astype(jnp.float32) for x in (q, k_pages, v_pages))
    wanted = np.asarray(attend(*wide, 1, rows), np.float64)
    owned = np.zeros(len(q), bool)
    for start, length in zip(rows.query_start, rows.query_length, strict=True):
        owned[int(start) : int(start) + int(length)] = True
    assert_close(got[owned], wanted[owned], ALLOWED[dtype])
    # In a decode batch the queries of ended rows stay.
    assert is_decode or not got[~owned].any()


def _attend(q, k_pages, v_pages, rows: Rows, work: Plan, **options) -> jax.Array:
    attend = partial(paged_attention, implementation="mosaic_interpreted", **options)
    return jax.jit(attend, static_argnums=3)(q, k_pages, v_pages, 1, rows, plan=work)


def _plan(q, k_pages, rows: Rows, programs: int = 2, *, is_decode: bool = False) -> Plan:
    """Return work items for a device so small that each program has several."""
    tiling = Tiling(
        kv_heads=k_pages.shape[2],
        group=q.shape[1] // k_pages.shape[2],
        split_rows=8,
        tile_rows=128,
        split_keys=64,
        launches=Launches(block_keys=16),
        split_programs=8 if is_decode else 2,
        tile_programs=programs,
        warpgroups=Warpgroups(block_keys=128, num_stages=2),
    )
    context = rows.page_table.shape[1] * k_pages.shape[3]
    return rows.plan(tiling, num_tokens=len(q), max_context=context, is_decode=is_decode)
