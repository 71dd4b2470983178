"""The gated delta rule for several tokens at once is the rule for one token after another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.delta_rule import delta_rule
from tests.common.tiers import some

HEADS, GROUP, KEY, VALUE = 2, 3, 12, 10


@pytest.mark.parametrize("num_tokens", some([2, 7, 64], 0, 1, 2))
@pytest.mark.parametrize("spread", [1.0, 0.01], ids=["random", "alike"])
def test_many_tokens_at_once(num_tokens, spread):
    """Also for keys that are almost the same, where powers of the system's matrix are large."""
    rng = np.random.default_rng(0)

    def of_length_one(*shape: int) -> np.ndarray:
        x = 1.0 + spread * rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = of_length_one(2, num_tokens, HEADS, KEY)
    v = rng.normal(size=(num_tokens, HEADS, GROUP, VALUE))
    rate = rng.uniform(0.8, 1.0, (num_tokens, HEADS, GROUP))
    decay = -rng.uniform(0.0, 0.1, (num_tokens, HEADS, GROUP))
    memory = rng.normal(size=(HEADS, GROUP, KEY, VALUE))
    got, left = jax.jit(delta_rule)(
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v, rate, decay, memory))
    )
    wanted = np.zeros_like(v)
    for t in range(num_tokens):
        memory = np.exp(decay[t])[..., None, None] * memory
        held = np.einsum("hgkv,hk->hgv", memory, k[t])
        added = rate[t][..., None] * (v[t] - held)
        memory = memory + k[t][:, None, :, None] * added[:, :, None]
        wanted[t] = np.einsum("hgkv,hk->hgv", memory, q[t])
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    np.testing.assert_allclose(left, memory, atol=1e-4)
