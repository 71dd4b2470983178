"""RRA's timeline against the discrete simulation, which drives the real scheduler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.exegpt.step_cost import LayerStepCost
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Request, SamplingParams
from jaxserve.execution.step_cost import StepWork
from jaxserve.planning import simulate
from jaxserve.planning.schedules import (
    CLUSTERS,
    MODELS,
    AllocationPolicy,
    Deployment,
    ParallelLayout,
    Points,
    RRATimeline,
    TaskLengths,
)
from jaxserve.planning.schedules.layer_cost import RooflineLayerCost
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.plan import Admission, Row, StepPlan
from jaxserve.scheduling.policy import Policy as ServingPolicy
from jaxserve.scheduling.retention import Stateless
from jaxserve.workload.tasks import TASKS, task_items
from tests.common.tiers import some
from tests.planning.schedules.made_up import MadeUpCost, cluster_of, model_of

_PAGE_TOKENS = 32


def _deployment() -> Deployment:
    cluster = CLUSTERS["A40"].of(4)
    model = MODELS["OPT-13B"]
    return Deployment(model=model, cluster=cluster, cost=RooflineLayerCost(model, cluster))


@pytest.mark.release
@pytest.mark.parametrize(
    ("task", "encode_batch", "num_decodes", "degree", "of_throughput", "of_latency"),
    some(
        [
            ("S", 52, 13, 4, 0.05, 0.07),  # the paper's own, table 6
            ("S", 49, 7, 4, 0.05, 0.07),
            ("S", 8, 40, 4, 0.08, 0.17),
            ("S", 12, 8, 1, 0.05, 0.07),  # four pipeline stages
            ("C1", 24, 16, 4, 0.05, 0.07),
            ("C1", 10, 48, 2, 0.08, 0.07),
            ("T", 12, 32, 4, 0.05, 0.07),
            ("T", 6, 100, 4, 0.05, 0.07),
            ("G", 8, 25, 4, 0.05, 0.07),
            ("G", 16, 200, 4, 0.05, 0.07),
        ]
    ),
)
def test_rra_is_estimated_as_the_real_scheduler_runs_it(
    task: str,
    encode_batch: int,
    num_decodes: int,
    degree: int,
    of_throughput: float,
    of_latency: float,
):
    """Sampled answers, all waiting at once: shares by which the estimates may differ.

    The estimates are worst for small batches with long decode phases, where a batch that happens to
    have long answers takes fewer new ones.
    """
    deployment, lengths = _deployment(), TaskLengths.of_task(TASKS[task])
    timeline = RRATimeline(deployment, lengths)
    num_sharded = 4 if degree > 1 else 0
    layout = ParallelLayout(
        policy=AllocationPolicy.RRA, degree=degree, num_sharded_devices=num_sharded
    )
    point = Points.one(timeline.layouts.index(layout), encode_batch, num_decodes)
    schedule, figures = timeline.schedule(point), timeline.estimate(point)[0]
    assert figures.fits
    num_rounds = -(-lengths.outputs.max_length // num_decodes)
    items = task_items(task, encode_batch * (3 * num_rounds + 30), vocab_size=100, seed=1)
    num_slots = 2 * int(schedule.decode_batch) + encode_batch
    longest = lengths.inputs.max_length + lengths.outputs.max_length
    simulation = simulate(
        items,
        ServingPolicy(
            "rra",
            OnDemand(),
            FCFS(),
            RRA(
                encode_batch=encode_batch,
                decode_iterations=num_decodes,
                encode_tokens=schedule.encode_tokens,
                decode_batch=schedule.decode_batch,
            ),
            Stateless(),
        ),
        EngineConfig(
            page_size=_PAGE_TOKENS,
            num_pages=num_slots * (longest // _PAGE_TOKENS + 2),
            max_slots=num_slots,
            max_context=longest + 1,
            max_step_tokens=2 * encode_batch * lengths.inputs.max_length + num_slots,
            max_decode_iterations=64,
        ),
        LayerStepCost.of_layout(deployment, layout),
        progress=False,
    )
    timings = [completion.timing for completion in simulation.completions]
    ends = np.sort([timing.finished_s or 0.0 for timing in timings])
    # Between the first rounds, which fill the batch, and the last, which empty it.
    low, high = len(ends) // 3, 2 * len(ends) // 3
    throughput = (high - low) / (ends[high] - ends[low])
    assert throughput == pytest.approx(figures.throughput, rel=of_throughput)
    p99 = lengths.outputs.percentile(lengths.level)
    spent = [
        (timing.finished_s or 0.0) - (timing.admitted_s or 0.0)
        for item, timing in zip(items[low:high], timings[low:high], strict=True)
        if abs((item.num_output_tokens or 0) - p99) <= 0.05 * p99
    ]
    assert len(spent) >= 2
    assert np.mean(spent) == pytest.approx(figures.latency_s, rel=of_latency)


def test_the_work_of_a_step_by_hand():
    """An encoder-decoder model on two stages: prompts of 4 tokens, then two rows.

    Two mini-batches encode a prompt each in 0.5 * 4 + 4 / 8 = 2.5 s a stage, and then a row each
    decodes in 1 + 0.25 s a stage. A group that only encodes begins its next batch of two prompts
    when its first stage is free; one that only decodes projects inputs when it admits sequences.
    """
    deployment = Deployment(
        model=model_of(2, is_decoder_only=False),
        cluster=cluster_of(2),
        cost=MadeUpCost(join_token_s=0.125),
    )
    cost = LayerStepCost.of_layout(deployment, ParallelLayout(policy=AllocationPolicy.RRA))
    prompts = StepPlan(index=0, rows=(Row(0, 0, 0, 4, 1), Row(1, 1, 0, 4, 1)))
    rows = (Row(0, 0, 4, 1, 1), Row(1, 1, 4, 1, 1))
    decoding = StepPlan(index=1, rows=rows, num_iterations=2, window_size=2)
    assert cost.device_s(StepWork(prompts, 20, ())) == pytest.approx(2 * 2.5 + 2.5)
    assert cost.device_s(StepWork(decoding, 0, (10, 12))) == pytest.approx(2 * 2 * 1.25)
    # One of the two rows has ended: a single mini-batch through both stages.
    assert cost.device_s(StepWork(decoding, 0, (10, 6))) == pytest.approx(2.5 + 2.5)
    encode = replace(cost, decodes=False)
    assert encode.device_s(StepWork(prompts, 20, ())) == pytest.approx(0.5 * 8)
    decode = replace(cost, encodes=False)
    request = Request(id=0, prompt=(1, 2, 3, 4), params=SamplingParams(max_tokens=3), arrival_s=0.0)
    admitting = replace(decoding, admissions=(Admission(0, request, 0, np.array([1, 2, 3, 4]), 7),))
    assert decode.device_s(StepWork(decoding, 0, (10, 12))) == pytest.approx(5.0)
    # Four tokens in two mini-batches: 0.25 s a stage more, in each of the two turns.
    assert decode.device_s(StepWork(admitting, 0, (10, 12))) == pytest.approx(5.0 + 2 * 0.25)


def test_a_group_has_one_pipeline():
    """Pipelines of several layouts are refused."""
    deployment = Deployment(model=model_of(2), cluster=cluster_of(2), cost=MadeUpCost())
    layout = ParallelLayout(policy=AllocationPolicy.RRA)
    pipeline = LayerStepCost.of_layout(deployment, layout).pipeline
    with pytest.raises(InvalidConfigError, match="one pipeline"):
        LayerStepCost(deployment, pipeline[np.array([0, 0])])
