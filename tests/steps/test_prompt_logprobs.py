"""Prompt log-probabilities are right, and logits of all positions never exist at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.sampling_params import MAX_LOGPROBS
from jaxserve.steps.sampling.logprobs import prompt_logprobs


@pytest.mark.parametrize("num_positions", [1, 15, 16, 33])
def test_matches_reference(num_positions):
    """Any number of positions, a multiple of the chunk or not, agrees with float64 log-softmax."""
    rng = np.random.default_rng(num_positions)
    head = rng.normal(size=(8, 2000)).astype(np.float32)
    hidden = rng.normal(size=(num_positions, 8)).astype(np.float32)
    targets = rng.integers(0, 2000, num_positions, np.int32)
    is_processed = jnp.arange(num_positions) % 2 == 0
    logprob, processed, top_ids, top_logprobs = jax.jit(
        lambda h, t: prompt_logprobs(
            lambda x: x @ head,
            h,
            t,
            is_processed,
            lambda _, t, i: (2 * t + i).astype(jnp.float32) / 2,
            chunk=16,
        )
    )(hidden, targets)
    places = np.arange(num_positions)
    np.testing.assert_array_equal(
        processed, np.where(is_processed, (2 * targets + places) / 2, logprob).astype(np.float32)
    )
    exact = hidden.astype(np.float64) @ head
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    assert top_ids.shape == top_logprobs.shape == (num_positions, MAX_LOGPROBS)
    np.testing.assert_allclose(logprob, exact[np.arange(num_positions), targets], atol=1e-4)
    np.testing.assert_allclose(top_logprobs, -np.sort(-exact)[:, :MAX_LOGPROBS], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(exact, top_ids, 1), top_logprobs, atol=1e-4)


def test_never_holds_all_logits():
    """Temporary memory is a few chunks of logits, far below positions times vocabulary."""
    num_positions, width, vocab, chunk = 2048, 16, 8192, 64
    compiled = (
        jax.jit(
            lambda head, h, t: prompt_logprobs(
                lambda x: x @ head, h, t, t > 0, lambda logits, *_: logits[:, 0], chunk
            )
        )
        .lower(
            jax.ShapeDtypeStruct((width, vocab), jnp.float32),
            jax.ShapeDtypeStruct((num_positions, width), jnp.float32),
            jax.ShapeDtypeStruct((num_positions,), jnp.int32),
        )
        .compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * chunk * vocab * 4
