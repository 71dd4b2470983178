"""Encode and decode phases: by hand, kept even, and on random traces."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.planning import Simulation, simulate
from jaxserve.scheduling.admission import OnDemand, Predicted
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.order import FCFS, LongestFirst, Priority
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless, Tiered
from jaxserve.testing import check_policy
from jaxserve.workload import WorkloadItem
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import SECOND, item_of

CONFIG = EngineConfig(
    num_pages=40, max_slots=8, max_context=64, max_step_tokens=64, max_decode_iterations=8
)
EXEGPT = PRESETS["exegpt_rra"]


def _run(items: list[WorkloadItem], shape: RRA, config: EngineConfig = CONFIG) -> Simulation:
    policy = replace(EXEGPT, iteration=shape)
    return simulate(items, policy, config, SECOND, progress=False)


def _steps(run: Simulation) -> list[tuple[str, int, int]]:
    """Each step: its kind, and its tokens or its rows and iterations."""
    return [
        ("decode", step.num_rows, step.num_iterations)
        if step.kind == "decode loop"
        else ("encode", step.num_rows, step.num_tokens)
        for step in run.steps
    ]


def test_three_requests_by_hand():
    """Two are encoded, decode three times and wait for the third's prompt; no loop passes an end.

    Then nothing waits, and the third decodes on.
    """
    run = _run([item_of(6), item_of(6), item_of(6)], RRA(encode_batch=2, decode_iterations=3))
    assert _steps(run) == [
        ("encode", 2, 6),
        ("decode", 2, 3),
        ("encode", 1, 3),
        ("decode", 3, 2),  # the first two reach their limit
        ("decode", 1, 1),
        ("decode", 1, 2),
    ]
    times = [(c.timing.first_token_s, c.timing.finished_s) for c in run.completions]
    assert times == [(1.0, 7.0), (1.0, 7.0), (5.0, 10.0)]


def test_an_encode_phase_has_as_many_steps_as_its_prompts_need():
    """Three prompts of five tokens, in steps of eight."""
    config = replace(CONFIG, max_step_tokens=8, token_buckets=())
    run = _run([item_of(9, num_prompt=5)] * 3, RRA(encode_batch=3, decode_iterations=8), config)
    assert _steps(run) == [("encode", 2, 8), ("encode", 2, 7), ("decode", 3, 8)]


def test_a_request_waits_for_the_end_of_a_decode_phase_and_no_longer():
    """B comes in the first phase of four; C after the second, when one more step is planned."""
    items = [item_of(40), item_of(3, arrival_s=2.5), item_of(2, arrival_s=20.5)]
    config = replace(CONFIG, max_decode_iterations=1)
    run = _run(items, RRA(encode_batch=2, decode_iterations=4), config)
    assert [c.timing.first_token_s for c in run.completions] == [1.0, 6.0, 23.0]


def test_an_early_end_of_all_answers_ends_the_decode_phase():
    """The host does not know that each answer has two tokens; the device stops after them."""
    items = [replace(item_of(2), max_tokens=30)] * 3
    run = _run(items, RRA(encode_batch=1, decode_iterations=20))
    assert [c.timing.first_token_s for c in run.completions] == [1.0, 3.0, 5.0]


def test_answers_of_one_token_leave_nothing_to_decode():
    """Encode phases follow each other at once."""
    run = _run([item_of(1)] * 5, RRA(encode_batch=2, decode_iterations=20))
    assert _steps(run) == [("encode", 2, 6), ("encode", 2, 6), ("encode", 1, 3)]
    assert run.wall_s == 3.0


def _stream(seed: int, num: int = 400) -> list[WorkloadItem]:
    rng = random.Random(seed)
    return [item_of(rng.randint(2, 60), num_prompt=rng.randint(1, 30)) for _ in range(num)]


LARGE = EngineConfig(
    num_pages=1000, max_slots=64, max_context=128, max_step_tokens=256, max_decode_iterations=8
)


def _levels(run: Simulation) -> tuple[np.ndarray, np.ndarray]:
    """Running sequences at the beginning of decode phases, tokens of the encode phases before."""
    running, tokens = [], []
    encoded = 0
    for step in run.steps:
        if step.kind != "decode loop":
            encoded += step.num_tokens
        elif encoded:
            running.append(step.num_rows)
            tokens.append(encoded)
            encoded = 0
    settled = slice(15, len(running) * 3 // 4)  # without the first rounds, and the last answers
    return np.asarray(running)[settled], np.asarray(tokens)[settled]


@pytest.mark.release
@pytest.mark.parametrize("decode_batch", some([None, 22.0]))
def test_batches_stay_even(decode_batch):
    """Beside encode batches of always five sequences, although lengths vary by a factor of 30.

    A threshold that no batch comes near takes five always.
    """
    kept = RRA(encode_batch=5, decode_iterations=8, decode_batch=decode_batch, threshold=0.1)
    fixed = replace(kept, threshold=0.999)
    for seed in range(2):
        run, other = (_run(_stream(seed), shape, LARGE) for shape in (kept, fixed))
        (running, tokens), (_, fixed_tokens) = _levels(run), _levels(other)
        assert len(running) > 30
        assert np.std(tokens) < 0.75 * np.std(fixed_tokens), f"seed {seed}"
        assert np.max(tokens) < 1.1**2 * 5 * 15.5 + 15, f"seed {seed}"
        assert run.wall_s < 1.06 * other.wall_s, f"seed {seed}"
        if decode_batch is not None:
            assert np.max(running) <= 1.1 * decode_batch, f"seed {seed}"
            assert np.mean(running) > 0.9 * decode_batch, f"seed {seed}"


def test_the_measured_decode_batch_is_the_papers():
    """B_D = B_E / sum of P_D(U): answers of 33 tokens decode in four phases of eight."""
    shape = RRA(encode_batch=3, decode_iterations=8)
    running, tokens = _levels(_run([item_of(33)] * 300, shape, LARGE))
    assert set(running) == {12} and set(tokens) == {9}


@pytest.mark.parametrize(
    ("shape", "setting"),
    [
        *((shape, {"encode_batch": 0}) for shape in (RRA, WAA)),
        *((shape, {"decode_iterations": 0}) for shape in (RRA, WAA)),
        *((shape, {"reserved_slots": -1}) for shape in (RRA, WAA, Unified)),
        (RRA, {"encode_tokens": 0.0}),
        (RRA, {"decode_batch": -1.0}),
        (RRA, {"decode_batch": float("nan")}),
        (RRA, {"threshold": -0.1}),
        (RRA, {"threshold": 1.0}),
        (Unified, {"max_running": 0}),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(shape, setting):
    """The message names the setting."""
    ((name, value),) = setting.items()
    good = {} if shape is Unified else {"encode_batch": 2, "decode_iterations": 2}
    with pytest.raises(InvalidConfigError, match=f"{name}={value}"):
        shape(**{**good, **setting})


POLICIES = [
    EXEGPT,
    Policy(
        "on demand",
        OnDemand(0.0),
        Priority(),
        RRA(encode_batch=2, decode_iterations=5, decode_batch=3.5, encode_tokens=9.0),
        Stateless(),
    ),
    Policy(
        "all at once",
        Predicted(),
        LongestFirst(Predicted()),
        RRA(encode_batch=50, decode_iterations=1, threshold=0.0),
        Stateless(),
        LastInOrder(keeps_state=True),
    ),
    Policy(
        "one by one",
        OnDemand(0.1),
        FCFS(),
        RRA(encode_batch=1, decode_iterations=30, decode_batch=2.0),
        Tiered(),
    ),
]


@seeds(40, 10)
@pytest.mark.parametrize("policy", some(POLICIES), ids=lambda policy: policy.name)
def test_random_traces(seeds, policy):
    """Every request ends once, with the tokens that it has alone."""
    checked = check_policy(policy, num_traces=len(seeds))
    assert (checked.num_preemptions == 0) == (policy is EXEGPT)
