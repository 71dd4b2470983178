"""Layer costs from measured layers: what was measured, rising, for every degree."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.core.errors import InvalidProfileError
from jaxserve.planning.layers import (
    LayerProfile,
    layers_deployment,
    measure_layers,
)
from jaxserve.planning.layers.cost import Line, MeasuredLayerCost, Surface
from jaxserve.planning.schedules import LatencyBounds, LengthDistribution, TaskLengths
from jaxserve.planning.schedules.layer_cost import LayerPhase
from jaxserve.planning.schedules.search import search, throughput_under, timelines_of
from jaxserve.testing.tiny import tiny_llama
from tests.common.tiers import some
from tests.planning.layers.made_up import SIZES, MadeUpTimer, made_up_profile
from tests.planning.schedules.made_up import enumerate_all


def made_up() -> LayerProfile:
    return measure_layers(MadeUpTimer(), made_up_profile(), progress=False, tolerance=0.01)


@pytest.fixture(scope="module")
def cost() -> MeasuredLayerCost:
    return MeasuredLayerCost(made_up(), num_layers=4)


def test_the_made_up_layer_is_found(cost):
    """Every part is what was made up, without the launch, at and between measured points."""
    for degree in (1, 2):
        assert cost.rest_s(LayerPhase.DECODE, 5.0, degree) == pytest.approx(1.0 + 2.5 / degree)
        assert cost.sync_s(LayerPhase.ENCODE, 5.0, degree) == (0.5 if degree > 1 else 0.0)
        assert cost.head_s(7.0, degree) == pytest.approx(0.5 + 1.75 / degree)
        decode_s = cost.attention_s(LayerPhase.DECODE, 5.0, 200.0, degree)
        assert decode_s == pytest.approx(15 / degree)
        encode_s = cost.attention_s(LayerPhase.ENCODE, 3.0, 40.0, degree)
        assert encode_s == pytest.approx(3 * 1.6 / degree, rel=0.05)
    assert cost.handoff_s(np.array([1.0, 20.0]), is_across=False).tolist() == [0.1875, 1.375]
    assert cost.handover_s(20.0, 2) == pytest.approx(4 * (0.25 + 2.5) / 2)
    assert cost.launch_s == 0.5


def test_an_encoder_has_costs_of_its_own():
    """Encoder layers, cross attention and its keys and values are apart from decoder layers."""
    timer, profile = MadeUpTimer(has_encoder=True), made_up_profile(has_encoder=True)
    measure_layers(timer, profile, progress=False, tolerance=0.01)
    assert profile.has_encoder and profile.degrees == (1, 2)
    cost = MeasuredLayerCost(profile, num_layers=4, num_input_tokens=150.0)
    for degree in (1, 2):
        assert cost.rest_s(LayerPhase.ENCODE, 8.0, degree) == pytest.approx(0.75 + 3 / degree)
        assert cost.rest_s(LayerPhase.DECODE, 8.0, degree) == pytest.approx(1.0 + 4 / degree)
        sums_s = [
            cost.sync_s(phase, 8.0, degree) for phase in (LayerPhase.ENCODE, LayerPhase.DECODE)
        ]
        assert sums_s == ([0.5, 0.75] if degree > 1 else [0.0, 0.0])
        assert cost.join_s(8.0, degree) == pytest.approx(0.25 + 1 / degree)
        # Five sequences attend to 150 tokens of their prompts, and to 50 of their own.
        decode_s = cost.attention_s(LayerPhase.DECODE, 5.0, 200.0, degree)
        assert decode_s == pytest.approx((5 * 1.5 + 5 * 2.75) / degree)
        assert cost.attention_s(LayerPhase.DECODE, 5.0, 100.0, degree) <= decode_s
    assert not np.any(MeasuredLayerCost(made_up(), 4).join_s(8.0, 1))


def test_devices_that_share_cores_slow_each_other():
    """With all devices busy each part takes as much longer as was measured; transfers do not."""
    profile = measure_layers(MadeUpTimer(), made_up_profile(), progress=False)
    alone, busy = (MeasuredLayerCost(profile, 4, num) for num in (1, 4))
    for degree, slowdown in ((1, 6 / 3), (2, 6 / 4)):
        assert busy.slowdown(degree) == pytest.approx(slowdown)
        for phase in LayerPhase:
            args = phase, 7.0, degree
            assert busy.rest_s(*args) == pytest.approx(slowdown * alone.rest_s(*args))
    assert busy.handover_s(20.0, 1) == alone.handover_s(20.0, 1)
    assert MeasuredLayerCost(profile, 4, 8).slowdown(1) == pytest.approx(10 / 3)
    # Noise cannot make them slower than one after another.
    profile.seconds["busy@1"][8] = 1000.0
    assert MeasuredLayerCost(profile, 4, 8).slowdown(2) == 4.0


def test_arguments_broadcast_over_degrees(cost):
    """Arrays of batches, lengths and degrees give what single numbers give."""
    batch, degree = np.array([[1.0], [7.0]]), np.array([1, 2, 1])
    for phase in LayerPhase:
        many = cost.attention_s(phase, batch, 50.0, degree)
        assert many.shape == (2, 3)
        assert many[1, 1] == cost.attention_s(phase, 7.0, 50.0, 2)
    assert cost.rest_s(LayerPhase.ENCODE, batch, degree).shape == (2, 3)


def test_costs_beyond_what_was_measured_grow_in_proportion(cost):
    """A pass of twice the tokens takes two passes; a prompt of twice the length four times."""
    most = SIZES.max_tokens
    assert cost.rest_s(LayerPhase.ENCODE, 2.0 * most, 1) == 2 * cost.rest_s(
        LayerPhase.ENCODE, most, 1
    )
    one = cost.attention_s(LayerPhase.DECODE, SIZES.max_batch, SIZES.max_length, 1)
    assert (
        cost.attention_s(LayerPhase.DECODE, 3.0 * SIZES.max_batch, SIZES.max_length, 1) == 3 * one
    )
    longest = cost.attention_s(LayerPhase.ENCODE, 1.0, SIZES.max_length, 1)
    assert cost.attention_s(LayerPhase.ENCODE, 1.0, 2.0 * SIZES.max_length, 1) == 4 * longest


@pytest.mark.parametrize("seed", some(range(4)))
def test_nothing_falls_although_measured_times_do(seed):
    """Noisy measurements are raised, so that costs never fall with a batch or a length."""
    rng = np.random.default_rng(seed)
    line = Line({at: rng.uniform(0.1, 1.0) for at in (1, 3, 9, 27)})
    assert (np.diff(line(np.linspace(0.5, 60.0, 300))) >= 0).all(), seed
    surface = Surface({b: {at: rng.uniform(0.1, 1.0) for at in (1, 5 + b, 64)} for b in (1, 4, 16)})
    batch, length = np.linspace(0.5, 40.0, 60)[:, None], np.linspace(1.0, 99.0, 70)
    seconds = surface(batch, length)
    assert (np.diff(seconds, axis=0) >= -1e-12).all(), seed
    assert (np.diff(seconds, axis=1) >= -1e-12).all(), seed


def test_degrees_that_were_not_measured_are_refused(cost):
    """A typed error names the measured degrees."""
    with pytest.raises(
        InvalidProfileError, match=r"\[4\] were not measured; measured are \[1, 2\]"
    ):
        cost.rest_s(LayerPhase.DECODE, 1.0, np.array([1, 4]))


def test_an_unfinished_profile_serves_for_the_degrees_that_it_has():
    """Without one device's curves there is no cost; a degree that was cut off is not offered."""
    with pytest.raises(InvalidProfileError, match="lacks curves of a layer on one device"):
        MeasuredLayerCost(made_up_profile(), 4)
    profile = made_up_profile()
    measure_layers(MadeUpTimer((1,)), profile, progress=False)
    with pytest.raises(KeyboardInterrupt):
        measure_layers(MadeUpTimer((1, 2), fails_after=3), profile, progress=False)
    assert profile.has(2) and MeasuredLayerCost(profile, 4).degrees == (1,)


@pytest.mark.release
def test_the_search_covers_every_policy_on_measured_layers():
    """Stages, partial tensor parallelism and both groups are tried; the best of all is found."""
    profile = measure_layers(MadeUpTimer(), made_up_profile(), progress=False)
    config = tiny_llama(num_layers=4).config
    deployment = layers_deployment(profile, config, 4, memory_bytes=1e9)
    assert deployment.cluster.degrees == (1, 2)
    assert deployment.model.num_decode_layers == 4
    lengths = TaskLengths(
        LengthDistribution.of_samples([8, 30]), LengthDistribution.of_samples([3, 12, 20])
    )
    timelines = timelines_of(deployment, lengths)
    policies = {layout.policy.value for each in timelines for layout in each.layouts}
    assert policies == {"rra", "waa_c", "waa_m", "continuous"}
    for bound_s in (np.inf, 2000.0):
        bounds = LatencyBounds(latency_s=bound_s)
        choice = search(deployment, lengths, bounds)
        most = enumerate_all(timelines, throughput_under(bounds)).score
        assert choice.estimates.throughput == pytest.approx(most)
        assert choice.estimates.latency_s <= bound_s
