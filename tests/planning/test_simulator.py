"""Simulated workloads: by hand, compared with a real device's schedule, and with arrivals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve import Runtime
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import PromptTooLongError
from jaxserve.core.metrics import summarise
from jaxserve.execution.step_cost import FlatCost
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.planning import Simulation, simulate
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing.tiny import random_prompts, tiny_llama
from jaxserve.workload import WorkloadItem
from tests.common.tiers import some
from tests.planning.step_times import CONFIG, made_up
from tests.scheduling.simulated import SECOND, item_of

TWO_SLOTS = EngineConfig(
    num_pages=20, max_slots=2, max_context=64, max_step_tokens=64, max_decode_iterations=1
)


def _item(num_output: int, arrival_s: float = 0.0, max_tokens: int | None = None) -> WorkloadItem:
    return replace(item_of(num_output, arrival_s), max_tokens=max_tokens or num_output)


def _run(items, policy: Policy | str, config=TWO_SLOTS, cost=SECOND) -> Simulation:
    chosen = PRESETS[policy] if isinstance(policy, str) else policy
    return simulate(items, chosen, config, cost, progress=False)


def _times(simulation: Simulation) -> list[tuple[float | None, float | None]]:
    timings = [completion.timing for completion in simulation.completions]
    return [(timing.first_token_s, timing.finished_s) for timing in timings]


@pytest.mark.parametrize(
    "policy, expected",
    [
        # Steps of one second: A, A, A; B's prompt while A waits; both.
        ("orca", [(1.0, 5.0), (4.0, 5.0)]),
        # B's prompt is in the step of A's last token.
        ("vllm_like", [(1.0, 4.0), (4.0, 5.0)]),
        # B waits until A has ended.
        ("fastertransformer", [(1.0, 4.0), (5.0, 6.0)]),
    ],
)
def test_two_requests_by_hand(policy, expected):
    """A has four tokens; B arrives at 1.5 s, is admitted at 2 s, and has two tokens."""
    simulation = _run([_item(4), _item(2, arrival_s=1.5)], policy)
    assert _times(simulation) == expected
    assert simulation.wall_s == max(end for _, end in expected)
    figures = summarise(simulation.completions, simulation.wall_s)
    assert figures["output_tokens"] == 6 and figures["num_failed"] == 0


def test_a_loop_ends_with_its_last_answer():
    """The host does not know that the answer has two tokens; the device stops after them."""
    config = replace(TWO_SLOTS, max_decode_iterations=4)
    simulation = _run([_item(2, max_tokens=20)], "orca", config)
    assert [step.num_iterations for step in simulation.steps] == [1, 4, 4]
    assert simulation.wall_s == 2.0


def test_the_host_works_while_the_device_does():
    """Its time counts only when the device waits for it."""
    cost = made_up(TWO_SLOTS)
    free = replace(cost, plan_s=0.0, submit_s=0.0)
    items = [_item(4)]
    with_host, without = (_run(items, "orca", cost=c).wall_s for c in (cost, free))
    assert with_host == pytest.approx(without + 0.03)


def test_a_time_window_passes():
    """Triton's batch of one starts when its window ends; a full batch starts at once."""
    assert _run([_item(1)], "triton_window").wall_s == 1.5
    assert _run([_item(1), _item(1)], "triton_window").wall_s == 1.0
    late = _run([_item(1), _item(1, arrival_s=0.25), _item(1, arrival_s=9.0)], "triton_window")
    assert [end for _, end in _times(late)] == [1.25, 1.25, 10.5]


def test_stops_in_time():
    """By then A has its whole answer, B does not, and C has not arrived."""
    items = [_item(2), _item(9), _item(1, arrival_s=50.0)]
    run = simulate(items, PRESETS["orca"], TWO_SLOTS, SECOND, until_s=5.0, progress=False)
    assert [len(completion.token_ids) for completion in run.completions] == [2]
    assert run.wall_s == 2.0 and run.steps[-1].collected_s == 5.0


def test_refuses_what_a_runtime_refuses():
    """A prompt that leaves no room for an answer is refused."""
    item = replace(_item(1), prompt_token_ids=(1,) * 64)
    with pytest.raises(PromptTooLongError):
        _run([item], "orca")


@pytest.mark.parametrize(
    "policy", some(["vllm_like", "fastertransformer", "concurrent_instances", "orca"])
)
def test_the_schedule_is_the_device_s(policy):
    """All requests arrive at once in a small pool; steps, preemptions and ends are a real run's."""
    items = [
        WorkloadItem(
            prompt_token_ids=prompt, num_output_tokens=20 + 5 * i % 17, max_tokens=40 + i % 2
        )
        for i, prompt in enumerate(random_prompts(12, longest=30))
    ]
    with Runtime(
        tiny_llama(),
        policy=policy,
        warmup=False,
        progress=False,
        max_slots=4,
        max_step_tokens=64,
        page_size=8,
        kv_memory="40KB",
    ) as rt:
        done = rt.generate(
            [item.prompt_token_ids for item in items], [item.params() for item in items]
        )
        steps, config = rt.report().steps, rt.config
    simulation = _run(items, policy, config, made_up(config))
    assert _shapes(simulation.steps, simulation.completions) == _shapes(steps, done)
    assert [len(c.token_ids) for c in simulation.completions] == [len(c.token_ids) for c in done]
    preempted = [c.timing.num_preemptions for c in done]
    assert [c.timing.num_preemptions for c in simulation.completions] == preempted
    assert any(preempted) == (policy == "vllm_like"), "the pool is short for those that grow"


def _shapes(steps, completions) -> list[tuple]:
    """Return the shapes of the steps up to the last end; later ones may or may not be collected."""
    end_s = max(completion.timing.finished_s for completion in completions)
    return [
        (step.kind, step.num_rows, step.num_tokens, step.num_iterations, step.num_padding_tokens)
        + (step.num_running, step.num_waiting, step.pages_owned, step.pages_reserved)
        for step in steps
        if step.collected_s <= end_s
    ]


def test_config_of_the_table_need_not_be_the_simulation_s():
    """With more memory than the table's configuration, more sequences run at once."""
    items = [_item(100) for _ in range(8)]
    few, many = (replace(CONFIG, num_pages=n) for n in (30, 200))
    assert _run(items, "orca", few, made_up()).wall_s > _run(items, "orca", many, made_up()).wall_s


def test_kept_pages_are_valued_by_the_cost_given():
    """There is room for one of two conversations: the later one, or the one that costs more."""
    config = EngineConfig(page_size=4, num_pages=12, max_slots=1, max_context=64)
    policy = PRESETS["pensieve_device_only"]
    prompts = [tuple(range(10 * i, 10 * i + length)) for i, length in ((1, 33), (5, 9), (9, 13))]
    items = [
        replace(_item(1, arrival_s=2.0 * i), prompt_token_ids=prompt)
        for i, prompt in enumerate([*prompts, prompts[0]])
    ]

    def num_found(chunk_cost: RecomputeCost) -> int:
        run = simulate(items, policy, config, SECOND, chunk_cost=chunk_cost, progress=False)
        return run.stats.num_prefix_hit

    alike = RecomputeCost(((1, 1.0), (64, 1.0)))
    late_is_dear = RecomputeCost(((1, 1.0), (64, 1000.0)))
    assert num_found(late_is_dear) > num_found(alike)


def test_swap_costs_given_are_the_scheduler_s():
    """A page that takes longer to copy than to compute is not copied."""
    config = EngineConfig(page_size=4, num_pages=8, max_slots=1, max_context=24, num_host_pages=20)
    items = [replace(_item(2, arrival_s=9.0 * i), prompt_token_ids=(i,) * 20) for i in range(1, 5)]
    num_out = [
        simulate(
            items,
            PRESETS["pensieve"],
            config,
            SECOND,
            swap_costs=SwapCosts(page_s=page_s, token_s=1.0),
            progress=False,
        ).stats.num_pages_out
        for page_s in (1.0, 3.0)
    ]
    assert num_out[0] > 0 and num_out[1] == 0


def test_steps_are_planned_late_while_requests_arrive():
    """What arrives in the first part of a step of one second is in the step after it."""
    arrivals_s = [0.0, 1.3, 3.3, 6.3, 8.7]
    config = EngineConfig(
        num_pages=80, max_slots=8, max_context=64, max_step_tokens=64, max_decode_iterations=1
    )
    done = _run([_item(20, arrival_s=arrival_s) for arrival_s in arrivals_s], "auto", config)
    # The first two are no stream of requests yet.
    assert [first_s for first_s, _ in _times(done)] == [1.0, 4.0, 6.0, 8.0, 11.0]
    assert done.stats.host_gap_s == 0.0


def test_the_device_does_not_wait_after_a_short_step():
    """The rest of a prompt takes a part of the time of the long steps before it."""
    items = [item_of(40, arrival_s=100.0 * i, num_prompt=64) for i in range(6)]
    config = EngineConfig(
        num_pages=80, max_slots=4, max_context=128, max_step_tokens=8, max_decode_iterations=1
    )
    cost = FlatCost(per_iteration_s=1.0, per_token_s=1.0)
    assert _run(items, "vllm_like", config, cost).stats.host_gap_s == 0.0


def test_an_answer_that_ends_early_is_not_awaited():
    """The next step is planned when a loop of eight seconds has ended after two."""
    others = [_item(1, arrival_s=arrival_s) for arrival_s in (10.0, 20.0, 30.0)]
    config = replace(TWO_SLOTS, num_pages=80, max_context=128, max_decode_iterations=8)
    done = _run([_item(46, max_tokens=90), *others], "vllm_like", config)
    (_, finished_s), *_ = _times(done)
    assert finished_s is not None and 46.0 <= finished_s < 46.5
