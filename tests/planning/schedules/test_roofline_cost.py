"""Layer costs from rooflines by hand, and the sizes of the paper's models and clusters."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.exegpt.scenarios import DEPLOYMENTS
from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning.schedules import CLUSTERS, MODELS, TransformerShape
from jaxserve.planning.schedules.cluster import Cluster
from jaxserve.planning.schedules.layer_cost import LayerCost, LayerPhase, RooflineLayerCost
from tests.planning.schedules.made_up import cluster_of, model_of

pytestmark = pytest.mark.fast

# 500 operations and 50 bytes a second are reached; links 25 and 5, the host's 5.
COST = RooflineLayerCost(model_of(2), cluster_of(4))


def test_products_take_their_arithmetic_or_their_weights():
    """20 operations a token; 20 bytes of weights take 0.4 s, as do 10 tokens."""
    assert COST.rest_s(LayerPhase.DECODE, 1.0, 1) == pytest.approx(0.4)
    assert COST.rest_s(LayerPhase.DECODE, 10.0, 1) == pytest.approx(0.4)
    assert COST.rest_s(LayerPhase.ENCODE, 50.0, 1) == pytest.approx(2.0)
    assert COST.rest_s(LayerPhase.ENCODE, 50.0, 4) == pytest.approx(0.5)
    # The head: 4 parameters.
    assert COST.head_s(100.0, 2) == pytest.approx(2 * 4 * 100 / 500 / 2)


def test_attention_takes_pairs_to_encode_and_kv_to_decode():
    """12 operations a pair; 12 bytes of KV a position take 0.24 s, their arithmetic 0.024 s."""
    assert COST.attention_s(LayerPhase.ENCODE, 2.0, 5.0, 1) == pytest.approx(12 * 50 / 500)
    assert COST.attention_s(LayerPhase.DECODE, 2.0, 5.0, 2) == pytest.approx(0.24 * 10 / 2)


def test_sums_go_round_a_ring():
    """Two sums of 6 bytes a token: half of twice that between two, three quarters among four."""
    assert COST.sync_s(LayerPhase.DECODE, 10.0, 1) == 0.0
    assert COST.sync_s(LayerPhase.DECODE, 10.0, 2) == pytest.approx(2 * (60 / 25 + 0.25))
    assert COST.sync_s(LayerPhase.DECODE, 10.0, 4) == pytest.approx(2 * (1.5 * 60 / 25 + 0.25))


def test_hand_offs_take_the_link():
    """6 bytes a token within a machine and across; 48 bytes of KV a token, between two devices."""
    assert COST.handoff_s(10.0, is_across=False) == pytest.approx(60 / 25 + 0.125)
    assert COST.handoff_s(10.0, is_across=True) == pytest.approx(60 / 2.5 + 0.125)
    assert COST.handover_s(10.0, 2) == pytest.approx(10 * 2 * 12 / 5 / 2)
    other = RooflineLayerCost(model_of(2, is_decoder_only=False), cluster_of(4))
    assert other.handover_s(10.0, 1) == pytest.approx(10 * 6 / 5)


def test_encoder_outputs_are_projected_once():
    """T5: 8 * 10 parameters of keys and values in cross attention, only for encoder-decoders."""
    model = TransformerShape.encoder_decoder(
        num_layers=1, hidden_size=4, attention_width=10, ffn_size=5, vocab_size=3
    )
    cost = RooflineLayerCost(model, cluster_of(2))
    assert cost.join_s(100.0, 2) == pytest.approx(2 * 80 * 100 / 500 / 2)
    assert COST.join_s(100.0, 1) == 0.0
    # Query, key, value, output of 40 each; the decoder has 2 more for cross attention.
    assert model.encode_layer.num_params == 160 + 40
    assert model.decode_layer.num_params == 160 + 80 + 40
    assert model.num_params == 200 + 280 + 80 + 12
    assert model.decode_layer_bytes == 2 * (280 + 80)
    assert (model.encode_layer.num_syncs, model.decode_layer.num_syncs) == (2, 3)


def test_grouped_heads_have_smaller_keys():
    """Four query heads a KV head: a quarter of the keys and values, and three FFN matrices."""
    model = TransformerShape.decoder_only(
        num_layers=2, hidden_size=8, vocab_size=10, ffn_size=24, group_size=4, num_ffn_matrices=3
    )
    assert model.kv_bytes_per_token == 2 * 2 * 2
    assert model.decode_layer.num_params == 2 * 64 + 2 * 16 + 3 * 8 * 24
    assert model.num_params == 2 * model.decode_layer.num_params + 80


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("T5-11B", 11),
        ("OPT-13B", 13),
        ("GPT3-39B", 39),
        ("GPT3-101B", 101),
        ("GPT3-175B", 175),
        ("GPT3-341B", 341),
    ],
)
def test_models_have_the_parameters_of_table_1(name: str, billions: float):
    assert MODELS[name].num_params / 1e9 == pytest.approx(billions, rel=0.03)


def test_deployments_of_table_2_fit():
    """Every model has fewer bytes than its devices, and its cluster enough devices."""
    for model, cluster, num_devices in DEPLOYMENTS:
        devices = CLUSTERS[cluster].of(num_devices)
        assert num_devices <= CLUSTERS[cluster].num_devices
        memory = num_devices * devices.memory_bytes
        assert MODELS[model].num_params * MODELS[model].bytes_each < memory


def test_degrees_divide_machines_and_clusters():
    """Shards share a machine: 12 devices in machines of 8 have degrees 1, 2 and 4."""
    assert cluster_of(12).degrees == (1, 2, 4)
    assert cluster_of(16, per_machine=16).degrees == (1, 2, 4, 8, 16)
    assert cluster_of(3).degrees == (1,)
    with pytest.raises(InvalidConfigError, match="num_devices=0"):
        cluster_of(0)


@pytest.mark.parametrize(("model", "cluster", "num_devices"), DEPLOYMENTS)
def test_costs_do_not_fall(model: str, cluster: str, num_devices: int):
    """What `LayerCost` promises, for the paper's deployments and both phases; batching pays."""
    devices: Cluster = CLUSTERS[cluster].of(num_devices)
    cost: LayerCost = RooflineLayerCost(MODELS[model], devices)
    assert cost.batching_pays
    num = np.geomspace(0.1, 1e5, 60)
    for degree in devices.degrees:
        for phase in LayerPhase:
            for seconds in (
                cost.attention_s(phase, num, 100.0, degree),
                cost.attention_s(phase, 3.0, num, degree),
                cost.rest_s(phase, num, degree),
                cost.sync_s(phase, num, degree),
            ):
                assert (np.diff(seconds) >= 0).all() and (seconds >= 0).all()
            for seconds in (
                cost.attention_s(phase, num, 100.0, degree),
                cost.rest_s(phase, num, degree),
                cost.sync_s(phase, num, degree),
            ):
                assert (np.diff(seconds / num) <= 1e-12 * seconds[1:]).all()
        assert (np.diff(cost.head_s(num, degree)) >= 0).all()
        assert (np.diff(cost.join_s(num, degree)) >= 0).all()
    assert (np.diff(cost.handover_s(num, 2)) >= 0).all()
    for is_across in (False, True):
        assert (np.diff(cost.handoff_s(num, is_across=is_across)) >= 0).all()
