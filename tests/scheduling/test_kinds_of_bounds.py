"""Bounds of requests of their own on the first token and on the time per token."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from decimal import Decimal
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import (
    BoundNotMetError,
    InvalidSamplingParamsError,
    NumericalError,
    UnheededBoundError,
)
from jaxserve.core.metrics import bound_outcomes
from jaxserve.core.request import Completion, FinishReason, Request, Sample, Timing
from jaxserve.core.sampling_params import BOUND_NAMES, SamplingParams
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import simulate
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.presets import PRESETS, check_heeded
from tests.common.tiers import some
from tests.scheduling.simulated import SECOND, engine_of, item_of, request_of

pytestmark = pytest.mark.fast

CONFIG = EngineConfig(
    num_pages=100, max_slots=4, max_context=200, max_step_tokens=64, max_decode_iterations=4
)
AUTO = PRESETS["auto"]


def _request(name: str, clock: VirtualClock, **params: Any) -> Request:
    return request_of(name, (1, 1), clock.now(), **params)


@pytest.mark.parametrize("name", BOUND_NAMES)
def test_a_bound_is_a_number_of_seconds(name: str):
    for wrong in (0, -1.0, float("nan"), "soon"):
        with pytest.raises(InvalidSamplingParamsError, match=name):
            SamplingParams(**{name: wrong})
    assert SamplingParams(**{name: 2.5}).bounds == {name: 2.5}
    for scalar in (np.array(1.5), np.float32(1.5), Decimal("1.5"), jnp.float32(1.5)):
        params = SamplingParams(**{name: scalar})
        assert type(params.bounds[name]) is float and params == SamplingParams(**{name: 1.5})


def test_the_earliest_bound_says_when_a_request_is_due():
    """Of one per token, it is the end of an answer of `max_tokens`."""
    clock = VirtualClock()
    clock.advance_to(7.0)
    cases: tuple[tuple[dict[str, Any], float | None], ...] = (
        ({"latency_bound": 9.0, "first_token_bound": 2.0}, 9.0),
        ({"latency_bound": 9.0, "token_bound": 0.5}, 12.0),
        ({"token_bound": 2.0}, 27.0),
        ({}, None),
    )
    for bounds, due_s in cases:
        request = _request("a", clock, max_tokens=10, **bounds)
        assert request.due_s == due_s and request.has_bounds == bool(bounds)


def test_the_first_token_that_is_due_goes_first():
    """One slot: a first token within 100 s is before a whole answer within 200."""
    config = replace(CONFIG, max_slots=1, slot_buckets=(), head_buckets=())
    items = [item_of(30), item_of(5, 1.0), item_of(5, 1.0, latency_bound=200.0)]
    items.append(item_of(5, 2.0, first_token_bound=100.0))
    done = simulate(items, AUTO, config, SECOND, progress=False).completions
    assert sorted(range(4), key=lambda i: done[i].timing.admitted_s or 0.0) == [0, 3, 2, 1]
    assert all(each.error is None for each in done)


@pytest.mark.parametrize(
    ("bounds", "expected_s"),
    [
        ({"first_token_bound": 20.0}, 36),  # behind what is left of the others
        ({"token_bound": 0.9}, 1),  # an iteration takes a second
        ({"latency_bound": 30.0, "first_token_bound": 100.0}, 46),
    ],
)
def test_what_is_expected_to_miss_a_bound_is_refused(bounds: dict[str, Any], expected_s: float):
    """At its submission, while all slots are taken; the error says which bound, and what else."""
    clock = VirtualClock()
    engine = engine_of("auto", CONFIG, clock, cost=SECOND)
    for name in "abcd":
        engine.add(_request(name, clock, max_tokens=50))
    while engine.scheduler.num_waiting or len(engine.scheduler.running[0].output) < 10:
        engine.step()
    [sequence] = engine.add(_request("e", clock, max_tokens=10, **bounds))
    error = sequence.error
    assert isinstance(error, BoundNotMetError) and sequence.finish_reason == "error"
    [name] = [each for each in bounds if f"{each}={bounds[each]:.4g} s" in str(error)]
    assert ("lower max_tokens" in str(error)) == (name == "latency_bound")
    assert (error.name, error.bound_s) == (name, bounds[name])
    assert error.expected_s == pytest.approx(expected_s, abs=5) and error.expected_s > error.bound_s
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.name == name
    loose: dict[str, Any] = {name: 3 * expected_s for name in bounds}
    [kept] = engine.add(_request("f", clock, max_tokens=10, **loose))
    while engine.has_work:
        engine.step()
    assert kept.error is None and len(kept.output) == 10 and not sequence.output


def test_a_first_token_that_comes_too_late_is_refused_while_it_waits():
    """It was expected in time; then the answers before it grow. It ends as soon as it is late."""
    clock = VirtualClock()
    engine = engine_of("auto", CONFIG, clock, cost=SECOND)
    for name in "abcd":
        engine.add(_request(name, clock, max_tokens=60, latency_bound=1e3))
    engine.step()
    [sequence] = engine.add(_request("e", clock, max_tokens=5, first_token_bound=30.0))
    while engine.has_work and sequence.error is None:
        engine.step()
    assert isinstance(sequence.error, BoundNotMetError)
    assert sequence.error.name == "first_token_bound" and clock.now() <= 31 + 2 * 4


# Mixed steps of these prompts take up to 9 s, and iterations 1 s.
_SLOW_PROMPTS = FlatCost(per_iteration_s=1.0, per_token_s=0.125)
_BULK = [item_of(4, at, num_prompt=60) for at in np.linspace(22, 100, 30).tolist()]


@pytest.mark.parametrize(
    ("name", "bounds_s", "loose", "least"),
    [
        ("token_bound", (2.2, 2.8, 3.5), {}, 0.0),
        ("latency_bound", (80.0, 110.0, 150.0), {"latency_bound": 1000.0}, 0.9),
    ],
)
def test_prompts_wait_while_they_would_make_a_bounded_answer_late(
    name: str, bounds_s: tuple[float, ...], loose: dict[str, float], least: float
):
    """With a loose bound, or none, the same prompts are computed beside it, and it is late.

    All prompts are computed in about the same time.
    """
    config = replace(CONFIG, max_slots=8, slot_buckets=(), head_buckets=(), max_decode_iterations=2)

    def served(**bounds: float) -> tuple[float, float]:
        """Return the seconds that the bound is of, and those until all have ended."""
        items = [item_of(45), item_of(40, 20.0, **bounds), *_BULK]
        run = simulate(items, AUTO, config, _SLOW_PROMPTS, progress=False)
        assert [len(c.token_ids) for c in run.completions] == [45, 40, *[4] * 30]
        times = run.completions[1].timing
        assert times.finished_s is not None and times.first_token_s is not None
        whole_s = times.latency_s or 0.0
        token_s = (times.finished_s - times.first_token_s) / 39
        return whole_s if name == "latency_bound" else token_s, run.wall_s

    loose_s, loose_wall_s = served(**loose)
    for bound_s in bounds_s:
        found_s, wall_s = served(**{name: bound_s})
        assert least * bound_s < found_s <= bound_s < loose_s
        assert wall_s <= 1.1 * loose_wall_s


def test_prompts_do_not_wait_for_answers_of_another_device_group():
    """On two groups they slow none of them, so that a bounded answer holds up no first token."""
    config = replace(CONFIG, max_slots=8, slot_buckets=(), head_buckets=())

    def first_tokens(**bounds: Any) -> list[float | None]:
        items = [item_of(45), item_of(40, 20.0, **bounds), *_BULK]
        run = simulate(items, PRESETS["exegpt_waa_c"], config, _SLOW_PROMPTS, progress=False)
        return [each.timing.time_to_first_token_s for each in run.completions]

    free = first_tokens()
    for bound_s in (1.9, 2.2, 2.5, 3.0):
        assert first_tokens(token_bound=bound_s) == free


@pytest.mark.parametrize("policy", some(["auto", "exegpt", "exegpt_rra"]))
def test_first_tokens_come_in_time_beside_bulk(policy: str):
    """Bulk fills the slots all the time: bounded first tokens come in time, and bulk ends, too.

    Under RRA running answers make way, so that a much shorter bound holds than under continuous
    batching. Without the bound hardly any first token comes in time.
    """
    chosen = PRESETS[policy]
    if policy == "exegpt_rra":
        chosen = replace(chosen, iteration=RRA(encode_batch=2, decode_iterations=40))
    bulk = [item_of(40) for _ in range(40)]
    arrivals = np.linspace(10, 250, 18).tolist()

    def firsts(**bounds: Any) -> tuple[list[float], int]:
        """Return the seconds to first tokens, and how many requests were refused."""
        items = [*bulk, *(item_of(4, at, **bounds) for at in arrivals)]
        run = simulate(items, chosen, CONFIG, SECOND, progress=False)
        assert all(len(c.token_ids) == 40 for c in run.completions[:40])
        served = [c for c in run.completions[40:] if c.error is None]
        assert all(len(c.token_ids) == 4 for c in served)
        seconds = [c.timing.time_to_first_token_s for c in served]
        return [s for s in seconds if s is not None], 18 - len(served)

    bound_s = 12.0 if policy == "exegpt_rra" else 45.0
    bounded, num_refused = firsts(first_token_bound=bound_s)
    free, _ = firsts()
    assert np.mean(np.array(bounded) <= bound_s) >= 0.9 and num_refused <= 2
    assert np.mean(np.array(free) <= bound_s) < 0.4


@pytest.mark.parametrize("policy", ["auto", "exegpt_rra", "exegpt_waa_c"])
@pytest.mark.parametrize("seed", some(range(8)))
def test_every_request_ends_once_under_random_bounds(policy: str, seed: int):
    """Whole, or refused for one of its own bounds; one without bounds always whole.

    What is said of each bound agrees with the times of the request.
    """
    rng = random.Random(seed)
    items = []
    for _ in range(60):
        bounds: dict[str, Any] = {
            name: most * rng.random() ** 2 + 1e-3
            for name, most in zip(BOUND_NAMES, (200.0, 80.0, 4.0), strict=True)
            if rng.random() < 0.3
        }
        arrival_s, num_prompt = rng.uniform(0, 150), rng.randint(1, 90)
        items.append(item_of(rng.randint(1, 60), arrival_s, num_prompt=num_prompt, **bounds))
    config = replace(CONFIG, num_pages=rng.choice([60, 100, 300]))
    run = simulate(items, PRESETS[policy], config, SECOND, progress=False)
    counts = dict.fromkeys(("kept", "missed", "refused"), 0)
    for item, completion in zip(items, run.completions, strict=True):
        params = item.sampling
        assert params is not None
        outcomes = bound_outcomes(params, completion)
        for outcome in outcomes.values():
            counts[outcome] += 1
        if completion.error is None:
            assert len(completion.token_ids) == item.num_output_tokens
            assert set(outcomes) == set(params.bounds)
            continue
        assert isinstance(completion.error, BoundNotMetError)
        assert params.bounds[completion.error.name] == completion.error.bound_s
        assert completion.error.expected_s > completion.error.bound_s
    assert counts["kept"] > 10
    for name, count in counts.items():
        assert sum(getattr(run.stats, f"num_bounds_{name}")) == count


def _completion(
    error: BoundNotMetError | NumericalError | None = None,
    reason: FinishReason = "stop",
    num_tokens: int = 5,
) -> Completion:
    sample = Sample(text="", token_ids=(1,) * num_tokens, finish_reason=reason)
    times = Timing(arrival_s=1.0, admitted_s=1.5, first_token_s=3.0, finished_s=11.0)
    return Completion(
        request_id="a", prompt_token_ids=(1,), samples=(sample,), timing=times, error=error
    )


def test_what_becomes_of_a_bound_by_hand():
    """10 s to the end, 2 to the first token, and 8 for the four tokens after it."""
    every = SamplingParams(latency_bound=10.0, first_token_bound=1.9, token_bound=2.0)
    kept: dict[str, str] = {"latency_bound": "kept", "token_bound": "kept"}
    assert bound_outcomes(every, _completion()) == {**kept, "first_token_bound": "missed"}
    assert bound_outcomes(SamplingParams(token_bound=1.9), _completion()) == {
        "token_bound": "missed"
    }
    assert bound_outcomes(SamplingParams(), _completion()) == {}
    assert bound_outcomes(every, _completion(reason="cancelled")) == {}
    assert bound_outcomes(every, _completion(NumericalError("NaN"), "error")) == {}
    refused = BoundNotMetError("a", "token_bound", 2.0, 3.0, 5.0, 0.0)
    assert bound_outcomes(every, _completion(refused, "error")) == {"token_bound": "refused"}


@pytest.mark.parametrize("policy", PRESETS.values(), ids=lambda each: each.name)
def test_policies_heed_bounds_or_refuse_them(policy: object):
    """The error names the bounds, the policy, and the policies that heed them."""
    preset = PRESETS[policy.name]
    clock = VirtualClock()
    request = _request("a", clock, token_bound=0.5)
    check_heeded(_request("b", clock), preset)
    if preset.name in ("auto", "slos_serve") or preset.name.startswith("exegpt"):
        check_heeded(request, preset)
        return
    with pytest.raises(UnheededBoundError, match=r"token_bound=0\.5.*exegpt_waa_m") as refused:
        check_heeded(request, preset)
    assert repr(preset.name) in str(refused.value)
