"""Attention in chunks of a sequence, in rows of any length."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import Rows, paged_attention
from jaxserve.models.batch import in_chunks
from tests.common.tiers import some

CHUNK, PAGE_SIZE, HEADS, WIDTH = 12, 4, 2, 8
# (queries, context) of each row: inside a chunk, over one border or several, at borders, unused.
ROWS = ((5, 9), (7, 15), (30, 41), (1, 13), (12, 12), (1, 24), (0, 0), (2, 26))


def _inputs(rows) -> tuple[jax.Array, jax.Array, jax.Array, Rows]:
    rng = np.random.default_rng(0)
    pages_each = -(-max(context for _, context in rows) // PAGE_SIZE)
    num_pages = 1 + len(rows) * pages_each
    pages = (rng.normal(size=(2, 1, num_pages, HEADS, PAGE_SIZE, WIDTH))).astype(np.float32)
    lengths, contexts = np.array(rows, np.int32).T
    q = rng.normal(size=(max(len(rows), lengths.sum()), HEADS, WIDTH)).astype(np.float32)
    table = rng.permutation(np.arange(1, num_pages, dtype=np.int32)).reshape(len(rows), -1)
    start = np.cumsum(lengths) - lengths
    fields = (start, lengths, contexts - lengths, contexts, table)
    return jnp.asarray(q), *map(jnp.asarray, pages), Rows(*map(jnp.asarray, fields))


def _wanted(q, k_pages, v_pages, rows: Rows) -> np.ndarray:
    """Return the attention of each query over the keys of its chunk, up to its own."""
    out = np.zeros(q.shape, np.float32)
    for row, table in enumerate(np.asarray(rows.page_table)):
        keys, values = (np.asarray(x)[0, table].swapaxes(1, 2) for x in (k_pages, v_pages))
        keys, values = (x.reshape(-1, HEADS, WIDTH) for x in (keys, values))
        for i in range(int(rows.query_length[row])):
            position, token = int(rows.first_position[row]) + i, int(rows.query_start[row]) + i
            seen = slice(position // CHUNK * CHUNK, position + 1)
            logits = np.einsum("hd,shd->hs", q[token], keys[seen]) * WIDTH**-0.5
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[token] = np.einsum("hs,shd->hd", weights, values[seen])
    return out


@pytest.mark.parametrize("implementation", some(["cpu", "xla"], 0, 1))
def test_a_query_sees_its_own_chunk(implementation):
    """Rows inside a chunk, and over the borders of several."""
    q, k_pages, v_pages, rows = _inputs(ROWS)
    attend = jax.jit(partial(paged_attention, implementation=implementation))
    got = attend(q, k_pages, v_pages, 0, in_chunks(rows, CHUNK, PAGE_SIZE, len(q)))
    num_used = int(rows.query_length.sum())
    wanted = _wanted(q, k_pages, v_pages, rows)
    np.testing.assert_allclose(got[:num_used], wanted[:num_used], atol=1e-5)


def test_rows_of_a_decode_step_stay_in_their_places():
    """Row i has token i; a row at the start of a chunk sees its own key alone."""
    q, k_pages, v_pages, rows = _inputs([(1, context) for context in (1, 12, 13, 24, 25, 37)])
    own = in_chunks(rows, CHUNK, PAGE_SIZE, 1)
    assert own.page_table.shape == (6, CHUNK // PAGE_SIZE)
    got = paged_attention(
        q, k_pages, v_pages, 0, own, max_query_length=1, implementation="reference"
    )
    np.testing.assert_allclose(got, _wanted(q, k_pages, v_pages, rows), atol=1e-5)


def test_pages_that_do_not_divide_a_chunk_are_refused():
    """The error says which pages do."""
    rows = _inputs(ROWS)[-1]
    with pytest.raises(NotImplementedError, match="chunks of 12 tokens over pages of 8"):
        in_chunks(rows, CHUNK, 8, 4)
