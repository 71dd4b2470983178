"""WAA's timeline by hand, and against groups that are played iteration by iteration."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.planning.schedules import (
    AllocationPolicy,
    Deployment,
    ParallelLayout,
    Points,
    TaskLengths,
    WAATimeline,
)
from jaxserve.planning.schedules.waa import divide, encode_shares
from jaxserve.workload.tasks import TASKS
from tests.planning.schedules.made_up import MadeUpCost, always, cluster_of, model_of
from tests.planning.schedules.pipelines import decode_batch

pytestmark = pytest.mark.fast


def _timeline(
    num_layers: int = 2,
    num_devices: int = 2,
    *,
    cost: MadeUpCost | None = None,
    lengths: TaskLengths | None = None,
    is_decoder_only: bool = True,
    **more: float,
) -> WAATimeline:
    """Inputs of 4 tokens and answers of 5: 4 decode iterations after the first token."""
    deployment = Deployment(
        model=model_of(num_layers, is_decoder_only=is_decoder_only),
        cluster=cluster_of(num_devices),
        cost=cost or MadeUpCost(),
        **more,
    )
    return WAATimeline(deployment, lengths or TaskLengths(always(4), always(5)))


def _layout(
    timeline: WAATimeline, policy: AllocationPolicy, degree: int = 1, num_sharded: int = 0
) -> int:
    return timeline.layouts.index(
        ParallelLayout(policy=policy, degree=degree, num_sharded_devices=num_sharded)
    )


def test_slow_encoding_sets_the_rate_and_decoding_goes_on_at_its_own():
    """B_E = 2 on a device each: 2 layers of 8 tokens take 8 s, and 0.25 sequences begin a second.

    A full decode batch of B_E * 4 = 8 would take 2 * (1 + 0.25 * 8) = 6 s. With n = 0.25 * 4 * R
    and R = 2 + 0.5 n it is n = R = 4.
    """
    timeline = _timeline(cost=MadeUpCost(kv_token_s=0.25))
    figures = timeline.estimate(Points.one(0, 2, 1))[0]
    iteration_s = 4.0
    assert figures.period_s == pytest.approx(8.0)
    assert figures.throughput == pytest.approx(0.25)
    assert figures.decode_batch == pytest.approx(4.0)
    # The batch before it, encoding, the handover of 8 tokens, an iteration, a turn, and four
    # iterations.
    assert figures.latency_s == pytest.approx(8 + 8 + 2 + 2 * iteration_s + 4 * iteration_s)
    assert figures.first_token_s == pytest.approx(8.0 + 8.0)
    assert figures.token_s == pytest.approx(iteration_s)
    # Each device has both layers; the decode device the KV of its sequences, on average at token
    # 4 + 2.5, and of two that arrive.
    kv_tokens = 4 * 6.5 + 8
    assert figures.memory_bytes == pytest.approx(2 * (20 + 12 * kv_tokens) + 8)


def test_the_encode_group_holds_the_batch_that_it_hands_over():
    """Long inputs with short answers fill the encode device: two batches of two 40-token inputs.

    Its decode device has one such batch, which arrives, and less than a sequence of its own.
    """
    timeline = _timeline(lengths=TaskLengths(always(40), always(2)))
    figures = timeline.estimate(Points.one(0, 2, 1))[0]
    assert figures.decode_batch < 1
    assert figures.memory_bytes == pytest.approx(2 * (20 + 12 * 2 * 80) + 8)


def test_slow_decoding_takes_one_encode_batch_an_iteration():
    """Decoding 8 sequences takes 2 * (5 + 2) = 14 s: every iteration admits B_E and ends B_E."""
    timeline = _timeline(cost=MadeUpCost(read_s=5.0))
    figures = timeline.estimate(Points.one(0, 2, 1))[0]
    assert figures.period_s == pytest.approx(14.0)
    assert figures.decode_batch == pytest.approx(8.0)
    assert figures.latency_s == pytest.approx(8 + 8 + 2 * 14 + 4 * 14)


def test_the_slowest_handover_sets_the_rate():
    """Eight tokens at 2 s each take longer than encoding and decoding."""
    timeline = _timeline(cost=MadeUpCost(kv_token_s=2.0))
    figures = timeline.estimate(Points.one(0, 2, 1))[0]
    assert figures.period_s == pytest.approx(16.0)


def test_micro_batches_shorten_iterations_as_in_figure_4():
    """One encode stage, three decode stages of 1 s for a whole batch, that has no other cost.

    Without micro-batches a token takes three stages (figure 4b: seven for two tokens, with the
    encoding), three batches are in turn, and each takes an encode batch every three stages. With
    three micro-batches (figure 4c) a token takes one.
    """
    cost = MadeUpCost(token_s=0.01, read_s=0.0, row_s=0.125)
    lengths = TaskLengths(always(1), always(5))
    timeline = _timeline(3, 4, cost=cost, lengths=lengths, is_decoder_only=True)
    which = _layout(timeline, AllocationPolicy.WAA_C)
    points = Points(np.array([which] * 2), np.array([2, 2]), np.array([1, 3]))
    assert [s.num_decode_layers for s in timeline.schedule(points[:1]).stages] == [0, 1, 1, 1]
    figures = timeline.estimate(points)
    np.testing.assert_allclose(figures.token_s, [3.0, 1.0])
    np.testing.assert_allclose(figures.period_s, [1.0, 1.0])
    np.testing.assert_allclose(figures.decode_batch, [3 * 8.0, 8.0])
    # More micro-batches than stages are as many as stages.
    more = timeline.estimate(Points.one(which, 2, 4))[0]
    assert more.token_s == pytest.approx(1.0)
    assert timeline.schedule(Points.one(which, 2, 4)).num_micro_batches == 3


def test_encoder_and_decoder_layers_are_held_once():
    """T5 and its like: no second copy of the model, and no KV in the encode group."""
    timeline = _timeline(is_decoder_only=False, cost=MadeUpCost(join_token_s=0.125))
    figures = timeline.estimate(Points.one(0, 2, 1))[0]
    # Answers of 5 take 5 iterations; at B_E = 2 a sequence joins 4 / 5 tokens an iteration, so
    # R = 2 * (1 + (0.25 + 0.1) n), and with 1 / 4 a second n = 5 / 4 R: n = 20, above 10.
    assert figures.decode_batch == pytest.approx(10.0)
    iteration_s = 2 * (1 + 3.5)
    assert figures.period_s == pytest.approx(iteration_s)
    assert figures.first_token_s == pytest.approx(8 + 8 + 3 * iteration_s)
    assert figures.latency_s == pytest.approx(8 + 8 + 2 * iteration_s + 5 * iteration_s)
    assert figures.memory_bytes == pytest.approx(2 * (20 + 12 * (10 * 7 + 8)) + 8)


def test_devices_are_divided_by_computation_and_by_memory():
    """B_E = 2 on a device: encoding 2 * 4 s, decoding 2 * (1 + 0.25 * 8) s; KV of 16 and of 52."""
    timeline = _timeline(2, 4)
    lengths = TaskLengths(always(4), always(5))
    deployment = Deployment(model=model_of(2), cluster=cluster_of(4), cost=MadeUpCost())
    by_time, by_memory = encode_shares(
        deployment, lengths, lengths.outputs.less_one(), np.array([2])
    )
    assert by_time[0] == pytest.approx(8 / (8 + 6))
    encode_bytes, decode_bytes = 20 + 12 * 16, 20 + 12 * 8 * 6.5
    assert by_memory[0] == pytest.approx(encode_bytes / (encode_bytes + decode_bytes))
    groups = divide(timeline.layouts, 4, (by_time, by_memory))
    by_layout = dict(zip(timeline.layouts, groups.num_encode[:, 0].tolist(), strict=True))
    assert by_layout[ParallelLayout(policy=AllocationPolicy.WAA_C)] == 2
    assert by_layout[ParallelLayout(policy=AllocationPolicy.WAA_M)] == 1


@pytest.mark.parametrize(
    ("degree", "num_sharded", "share", "expected"),
    [
        (1, 0, 0.01, (1, 7, 0, 0)),  # both groups have a device
        (1, 0, 0.99, (7, 1, 0, 0)),
        (2, 4, 0.3, (2, 6, 0, 4)),  # shards decode first
        (2, 4, 0.7, (6, 2, 2, 2)),  # 5.6 devices: a stage of two shards encodes
        (4, 8, 0.1, (4, 4, 4, 4)),
        (4, 4, 0.9, (4, 4, 0, 4)),  # the last stage decodes
    ],
)
def test_groups_end_between_stages(
    degree: int, num_sharded: int, share: float, expected: tuple[int, ...]
):
    """Eight devices: the encode group's share is rounded to whole stages."""
    layout = ParallelLayout(
        policy=AllocationPolicy.WAA_C, degree=degree, num_sharded_devices=num_sharded
    )
    groups = divide((layout,), 8, (np.array([share]), np.array([0.5])))
    found = (
        groups.num_encode,
        groups.num_decode,
        groups.num_encode_sharded,
        groups.num_decode_sharded,
    )
    assert tuple(int(each[0, 0]) for each in found) == expected


def test_a_single_stage_cannot_be_divided():
    """One device has no layout; two have one only without tensor parallelism."""
    assert _timeline(2, 1).layouts == ()
    assert {each.degree for each in _timeline(2, 2).layouts} == {1}


@pytest.mark.parametrize("period_share", [0.7, 1.0, 2.0, 5.0])
def test_a_steady_state_of_sampled_answers_has_the_expected_batch(period_share: float):
    """Batches of 4 arrive, and 2,000 answers of task S decode: batch and iterations within 4 %."""
    lengths = TaskLengths(always(4), TaskLengths.of_task(TASKS["S"]).outputs)
    iterations = lengths.outputs.less_one()
    batch, iteration_s = 4, (1.0, 0.0125)
    # Decoding a full batch takes this long, and encoding this many times as long.
    full_s = iteration_s[0] + iteration_s[1] * batch * iterations.mean
    cost = MadeUpCost(
        token_s=period_share * full_s / 16, read_s=iteration_s[0], row_s=iteration_s[1]
    )
    timeline = _timeline(1, 2, cost=cost, lengths=lengths)
    figures = timeline.estimate(Points.one(0, batch, 1))[0]
    assert figures.period_s == pytest.approx(max(1.0, period_share) * full_s)
    rng = np.random.default_rng(3)
    sampled = rng.choice(iterations.max_length + 1, 2000, p=iterations.probabilities)
    num, seconds = decode_batch(
        batch, figures.period_s, iteration_s, np.maximum(sampled, 1).tolist()
    )
    assert figures.decode_batch == pytest.approx(num, rel=0.04)
    assert figures.token_s == pytest.approx(seconds, rel=0.04)
