"""Routers choose the experts, and give the gates, that a plain computation for each token gives."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.routing import ExpertsConfig, choose

NUM = 12


def _chosen(logits: np.ndarray, config: ExpertsConfig, correction: np.ndarray) -> dict[int, float]:
    """Return the gates of one token by expert."""
    if config.scores == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    ranks = scores + correction
    size = config.num // config.num_groups
    groups = [range(first, first + size) for first in range(0, config.num, size)]

    def total(group: range) -> float:
        best = sorted((ranks[i] for i in group), reverse=True)
        return best[0] if config.group_score == "best" else sum(best[:2])

    groups = sorted(groups, key=total, reverse=True)[: config.num_chosen_groups]
    allowed = [i for group in groups for i in group]
    experts = sorted(allowed, key=lambda i: ranks[i], reverse=True)[: config.per_token]
    whole = sum(scores[i] for i in experts) if config.normalises_gates else 1.0
    return {i: config.gate_scale * scores[i] / whole for i in experts}


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(normalises_gates=False),
        dict(has_correction=True, gate_scale=2.5),
        dict(num_groups=4, num_chosen_groups=2),
        dict(num_groups=4, num_chosen_groups=2, has_correction=True, normalises_gates=False),
        dict(num_groups=3, num_chosen_groups=1, group_score="best", gate_scale=0.5),
    ],
)
def test_gates_and_experts_are_those_of_each_token_alone(scores, options):
    """For softmax and sigmoid, with corrections and groups."""
    rng = np.random.default_rng(0)
    config = ExpertsConfig(num=NUM, size=1, per_token=3, scores=scores, **options)
    logits = rng.normal(size=(40, NUM))
    correction = rng.normal(size=NUM) * 0.3 if config.has_correction else np.zeros(NUM)
    given = jnp.asarray(correction, jnp.float32) if config.has_correction else None
    gates, experts = choose(jnp.asarray(logits, jnp.float32), config, given)
    for own, number, each in zip(np.asarray(gates), np.asarray(experts), logits, strict=True):
        wanted = _chosen(each, config, correction)
        assert set(number) == set(wanted)
        np.testing.assert_allclose(own, [wanted[int(i)] for i in number], rtol=1e-5)


def test_sigmoids_of_zero_have_finite_gates():
    """A token whose scores are all zero in float32 has gates of zero."""
    config = ExpertsConfig(num=NUM, size=1, per_token=3, scores="sigmoid")
    gates, _ = choose(jnp.full((1, NUM), -1e4), config)
    np.testing.assert_array_equal(gates, 0)


@pytest.mark.parametrize("size", [5, 10, 20])
@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_the_layout_of_fused_tensors_is_that_of_their_shapes(size, layout):
    """One of the two tensors is not square: for a width of 10, neither, the first or the second."""
    gate_up, down = (NUM, 10, 2 * size), (NUM, size, 10)
    if layout == "out_in":
        gate_up, down = (NUM, 2 * size, 10), (NUM, 10, size)
    shapes = {"mlp.experts.down_proj": down, "mlp.experts.gate_up_proj": gate_up}
    config = ExpertsConfig(num=NUM, size=size, per_token=3)
    assert config.fitted_to(shapes, 10).layout == layout
    each = {"model.layers.1.mlp.experts.0.down_proj.weight": (10, size)}
    assert config.fitted_to(shapes, 10).fitted_to(each, 10).layout == "each"
    assert config.fitted_to({}, 10) == config
