"""The parts of a real layer are timed on one device and on shards."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest
from flax import nnx

from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.families.t5 import T5
from jaxserve.planning.layers import (
    LayerBench,
    LayerOrigin,
    LayerProfile,
    LayerSizes,
    layers_deployment,
    measure_layers,
)
from jaxserve.planning.layers.bench import degrees_of
from jaxserve.planning.layers.cost import MeasuredLayerCost, shape_of
from jaxserve.planning.layers.profile import LAUNCH, curve
from jaxserve.planning.schedules import LatencyBounds, LengthDistribution, TaskLengths
from jaxserve.planning.schedules.layer_cost import LayerPhase
from jaxserve.planning.schedules.search import search
from jaxserve.planning.step_times import differences
from jaxserve.testing.tiny import tiny_llama, tiny_t5
from tests.common.tiers import some

SIZES = LayerSizes(max_tokens=4, max_batch=2, max_length=8, page_size=4)


@pytest.mark.release
@pytest.mark.parametrize(
    ("kv_dtype", "quantize"), some([("int8", None), (None, None), (None, "int8")])
)
def test_a_tiny_layer_is_measured_on_one_and_two_devices(tmp_path, kv_dtype, quantize):
    """Every curve has times above 0, and they make up a cost; the file belongs to its devices."""
    config, devices = tiny_llama().config, jax.devices()[:2]
    sizes = replace(SIZES, kv_dtype=kv_dtype, quantize=quantize)
    is_plain = kv_dtype is None and quantize is None
    degrees = (1, 2) if is_plain else (1,)
    bench = LayerBench(config, sizes, devices, degrees)
    origin = LayerOrigin.of(config, devices, sizes)
    path = tmp_path / "layers.json"
    measure_layers(bench, LayerProfile(origin, path=path), budget_s=0.0, progress=False)
    if is_plain:  # no time was left for the second degree
        measure_layers(
            bench, LayerProfile.load(path, expected=origin), tolerance=9.0, progress=False
        )
    profile = LayerProfile.load(path, expected=origin)
    assert profile.degrees == degrees
    assert all(s > 0 for points in profile.seconds.values() for s in points.values())
    cost = MeasuredLayerCost(with_free_launches(profile), config.num_layers)
    assert cost.rest_s(LayerPhase.ENCODE, 16.0, 1) > 0
    assert cost.handover_s(16.0, 1) > 0 and cost.handoff_s(16.0, is_across=False) > 0
    assert differences(origin, LayerOrigin.of(config, devices[:1], sizes))


def with_free_launches(profile: LayerProfile) -> LayerProfile:
    """Return `profile` with empty passes of no time, which may outlast tiny parts elsewhere."""
    for degree in profile.degrees:
        profile.seconds[curve(LAUNCH, degree)] = {1: 0.0}
    return profile


@pytest.mark.release
def test_tiny_layers_of_an_encoder_decoder_are_measured():
    """Encoder, cross attention and what it needs have times above 0, on one and two devices."""
    config, devices = tiny_t5().config, jax.devices()[:2]
    sizes = LayerSizes(max_tokens=4, max_batch=2, max_length=4, page_size=4)
    profile = LayerProfile(LayerOrigin.of(config, devices, sizes))
    bench = LayerBench(config, sizes, devices, (1, 2))
    measure_layers(bench, profile, tolerance=9.0, progress=False)
    assert profile.degrees == (1, 2) and profile.has_encoder
    assert {"encode@2", "join@2", "cross@2", "cross 2@2"} <= profile.seconds.keys()
    assert all(s > 0 for points in profile.seconds.values() for s in points.values())
    deployment = layers_deployment(
        with_free_launches(profile), config, 2, memory_bytes=1e9, num_input_tokens=12.0
    )
    assert not deployment.model.is_decoder_only and deployment.cost.join_s(16.0, 2) > 0
    lengths = TaskLengths(*(LengthDistribution.of_samples([5, 12]) for _ in range(2)))
    choice = search(deployment, lengths, LatencyBounds())
    assert choice.estimates.throughput > 0


@pytest.mark.release
def test_the_shape_of_an_encoder_decoder():
    """Parameters of encoder and decoder layers, of cross attention's projections, and layers."""
    config = replace(tiny_t5().config, num_encoder_layers=3)
    shape = shape_of(config, SIZES)
    assert (shape.num_encode_layers, shape.num_decode_layers) == (3, 2)
    params = jax.tree.leaves(nnx.state(T5(config, rngs=nnx.Rngs(0))))
    biases = 2 * config.num_buckets * config.num_heads
    norms = 2 * config.hidden_size
    assert shape.num_params == sum(leaf.size for leaf in params) - biases - norms
    assert shape.decode_layer.num_join_params == 2 * config.hidden_size**2


@pytest.mark.release
def test_quantised_weights_take_less_memory():
    """A layer in int8 has about a fourth of the bytes of float32, and keeps no blocks."""
    config = tiny_llama().config
    dense, few = (shape_of(config, replace(SIZES, quantize=each)) for each in (None, "int8"))
    assert 0.25 <= few.decode_layer_bytes / dense.decode_layer_bytes < 0.5
    assert dense.num_embedding_params == config.vocab_size * config.hidden_size
    for wrong, said in (("keep", "'int8' or 'int4'"), ("int3", "int3")):
        with pytest.raises(InvalidConfigError, match=said):
            replace(SIZES, quantize=wrong)


def test_degrees_divide_the_heads():
    """Four query heads and two KV heads go on one, two and four devices."""
    config = tiny_llama().config
    assert degrees_of(config, jax.devices()[:8]) == (1, 2, 4)
    with pytest.raises(InvalidConfigError, match=r"degrees \[3\] are not allowed.*\[1, 2, 4\]"):
        LayerBench(config, SIZES, jax.devices()[:8], (3,))
    with pytest.raises(InvalidConfigError, match="max_batch=0"):
        replace(SIZES, max_batch=0)
