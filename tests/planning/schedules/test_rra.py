"""RRA's timeline by hand, and against a pipeline that is played stage by stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.planning.schedules import (
    Deployment,
    LengthDistribution,
    Points,
    RRATimeline,
    TaskLengths,
)
from tests.planning.schedules.made_up import MadeUpCost, always, cluster_of, model_of
from tests.planning.schedules.pipelines import round_s

pytestmark = pytest.mark.fast


def _timeline(
    num_layers: int = 2,
    num_devices: int = 2,
    *,
    cost: MadeUpCost | None = None,
    inputs: LengthDistribution | None = None,
    outputs: LengthDistribution | None = None,
    is_decoder_only: bool = True,
    **more: float,
) -> RRATimeline:
    """Inputs of 4 tokens and answers of 5: 4 decode iterations after the first token."""
    deployment = Deployment(
        model=model_of(num_layers, is_decoder_only=is_decoder_only),
        cluster=cluster_of(num_devices),
        cost=cost or MadeUpCost(),
    )
    lengths = TaskLengths(inputs or always(4), outputs or always(5))
    return RRATimeline(replace(deployment, **more), lengths)


def test_a_round_of_two_stages_by_hand():
    """B_E = 2, N_D = 2, two stages of a layer.

    A mini-batch of one sequence encodes 4 tokens in e = 2 s, so F = 4 + 2 = 6. Answers of 4
    iterations are in two rounds: 4 sequences decode, two in a mini-batch, in d = 1 + 0.25 * 2 =
    1.5 s and R = 3. A round takes 6 + 2 * 3 = 12 s.
    """
    timeline = _timeline()
    figures = timeline.estimate(Points.one(0, 2, 2))[0]
    assert figures.period_s == pytest.approx(12.0)
    assert figures.throughput == pytest.approx(2 / 12)
    assert figures.encode_s == figures.first_token_s == pytest.approx(6.0)
    # One round, then an encode phase and two iterations.
    assert figures.latency_s == pytest.approx(12 + 6 + 2 * 3)
    assert figures.token_s == pytest.approx((12 + 6) / 4)
    assert figures.decode_batch == pytest.approx(4.0)
    # A layer of 20 bytes and 8 of embedding; in iteration 2 new ones have 4 + 2 tokens, others
    # 4 + 4, of 12 bytes.
    assert figures.memory_bytes == pytest.approx(20 + 8 + 2 * (6 + 8) * 12)


def test_two_shards_are_one_stage_by_hand():
    """Both layers on both devices: e = 2 * (0.5 * 8 / 2 + 1), R = 2 * ((1 + 0.25 * 4) / 2 + 1)."""
    timeline = _timeline(cost=MadeUpCost(sum_s=1.0))
    assert [(each.degree, each.num_sharded_devices) for each in timeline.layouts] == [
        (1, 0),
        (2, 2),
    ]
    figures = timeline.estimate(Points.one(1, 2, 2))[0]
    assert figures.encode_s == pytest.approx(6.0)
    assert figures.period_s == pytest.approx(6.0 + 2 * 4.0)
    assert figures.latency_s == pytest.approx(14.0 + 6.0 + 8.0)
    assert figures.memory_bytes == pytest.approx(20 + 4 + 28 * 12)


def test_partial_tensor_parallelism_shares_layers_by_devices():
    """Three devices, six layers: a stage of two, then a stage of two shards with four."""
    timeline = _timeline(6, 4)
    which = next(
        i
        for i, each in enumerate(timeline.layouts)
        if (each.degree, each.num_sharded_devices) == (2, 2)
    )
    schedule = timeline.schedule(Points.one(which, 3, 2))
    stages = [(s.num_devices, s.num_encode_layers, s.num_decode_layers) for s in schedule.stages]
    assert stages == [(1, 2, 2), (1, 1, 1), (2, 3, 3)]
    assert (schedule.encode_batch, schedule.num_decodes, schedule.num_micro_batches) == (3, 2, 3)
    assert (schedule.decode_batch, schedule.encode_tokens) == (3 * 2, 3 * 4)


def test_heads_launches_and_hops_add_up():
    """One mini-batch, two stages: each pass adds a head, two launches and a hop."""
    plain = _timeline().estimate(Points.one(0, 1, 4))[0]
    cost = MadeUpCost(head_token_s=0.125, launch_s=0.5, hop_s=0.0625)
    more = _timeline(cost=cost).estimate(Points.one(0, 1, 4))[0]
    added = 0.125 + 2 * 0.5 + 0.0625
    assert more.encode_s == pytest.approx(plain.encode_s + added)
    assert more.latency_s == pytest.approx(plain.latency_s + 5 * added)


def test_an_encoder_decoder_model_joins_inputs_and_takes_an_iteration_per_token():
    """Answers of 5 take 5 iterations; each stage projects 4 tokens in 0.25 s a layer."""
    timeline = _timeline(is_decoder_only=False, cost=MadeUpCost(join_token_s=0.0625))
    figures = timeline.estimate(Points.one(0, 1, 5))[0]
    iteration_s = 2 * 1.25
    assert figures.encode_s == pytest.approx(2 * (2 + 0.25))
    assert figures.first_token_s == pytest.approx(4.5 + iteration_s)
    assert figures.latency_s == pytest.approx(4.5 + 5 * iteration_s)
    # Encoder and decoder layers lie on the same devices.
    assert figures.memory_bytes == pytest.approx(20 + 20 + 8 + (4 + 5) * 12)


def test_margins_lengthen_latencies_but_not_rounds():
    """A phase lasts up to 10 % longer than 1.1 times its mean, and iterations 50 %.

    The two phases of an answer spread by the square root of two times as much as one. A first token
    waits for a phase of half a prompt more, and then a tenth.
    """
    timeline = _timeline(encode_margin=0.1, decode_margin=0.5)
    figures = timeline.estimate(Points.one(0, 2, 2))[0]
    assert figures.period_s == pytest.approx(12.0)
    assert figures.latency_s == pytest.approx((12 + 3) + 6 + 0.21 * 6 * 2**0.5 + 1.5 * 6)
    assert figures.first_token_s == pytest.approx(1.1 * 2.5 / 2 * 6)


def test_a_fraction_of_an_iteration_takes_place_if_fewer_than_one_sequence_is_left():
    """Half of the answers need iteration 2 of N_D = 2: of two sequences one, of one half a one."""
    outputs = LengthDistribution.of_samples([2, 3])
    one = _timeline(1, 1, outputs=outputs).estimate(Points.one(0, 1, 2))[0]
    assert one.period_s == pytest.approx(2.0 + 1.25 + 0.5 * 1.25)
    two = _timeline(1, 1, outputs=outputs).estimate(Points.one(0, 2, 2))[0]
    assert two.period_s == pytest.approx(4.0 + 1.5 + 1.25)
    # The longest answer is itself there.
    assert one.latency_s == pytest.approx(2.0 + 2 * 1.25)


@pytest.mark.parametrize("num_decodes", [1, 2, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("token_s", [0.1, 0.5, 3.0])
def test_rounds_of_equal_stages_are_those_of_a_played_pipeline(
    num_decodes: int, num_stages: int, token_s: float
):
    """Encoding slower and faster than decoding, any N_D: the closed forms are exact."""
    cost, point = MadeUpCost(token_s=token_s), Points.one(0, 2 * num_stages, num_decodes)
    encode_s = 2 * 4 * token_s
    decode_s = 1 + 0.25 * 2 * 4 / num_decodes  # four iterations an answer
    figures = _timeline(num_stages, num_stages, cost=cost).estimate(point)[0]
    played = round_s([encode_s] * num_stages, [decode_s] * num_stages, num_decodes)
    assert figures.period_s == pytest.approx(played)


def test_rounds_of_unequal_stages_are_close_to_those_of_a_played_pipeline():
    """Seven layers on four devices: a stage has one or two; within 8 %."""
    timeline = _timeline(7, 4, cost=MadeUpCost(token_s=0.4))
    for num_decodes in (1, 2):
        figures = timeline.estimate(Points.one(0, 8, num_decodes))[0]
        layers = [s.num_decode_layers for s in timeline.schedule(Points.one(0, 8, 1)).stages]
        assert layers == [2, 2, 2, 1]
        decode_s = 1 + 0.25 * 2 * 4 / num_decodes
        played = round_s(
            [3.2 * num for num in layers], [decode_s * num for num in layers], num_decodes
        )
        assert figures.period_s == pytest.approx(played, rel=0.08)


def test_layouts_without_layers_for_every_stage_do_not_fit():
    """Two layers on four devices: only four shards, or two stages of two, hold them."""
    timeline = _timeline(2, 4)
    num = len(timeline.layouts)
    ones = np.ones(num, int)
    fits = timeline.estimate(Points(np.arange(num), ones, ones)).fits
    found = {
        (each.degree, each.num_sharded_devices)
        for each, fit in zip(timeline.layouts, fits, strict=True)
        if fit
    }
    assert found == {(2, 4), (4, 4)}


def test_memory_and_slots_limit_batches():
    """28 + 12 a token fits up to 150 bytes; 4 sequences of B_E = 2 do not fit in 3 slots."""
    small = Deployment(
        model=model_of(2), cluster=cluster_of(2, memory_bytes=150.0), cost=MadeUpCost()
    )
    timeline = RRATimeline(small, TaskLengths(always(4), always(5)))
    # One sequence holds at most 8 tokens: 28 + 96 = 124 bytes, and two rounds' sequences 14.
    assert timeline.estimate(Points.one(0, 1, 4)).fits[0]
    assert not timeline.estimate(Points.one(0, 1, 2)).fits[0]
    assert timeline.max_encode_batch == 1
    slots = replace(small, cluster=cluster_of(2), max_sequences=3.0)
    timeline = RRATimeline(slots, TaskLengths(always(4), always(5)))
    assert timeline.estimate(Points.one(0, 2, 4)).fits[0]
    assert not timeline.estimate(Points.one(0, 2, 2)).fits[0]
