"""SLOs-Serve admits as many requests as it can serve in time, and keeps what it promised."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Completion
from jaxserve.execution.step_cost import FlatCost
from jaxserve.planning import simulate
from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import Policy, QueueView, ServiceOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slos_serve import Bounds, Prompt, SoftAdmission, most_in_time
from jaxserve.workload import WorkloadItem
from tests.scheduling.simulated import item_of

pytestmark = pytest.mark.fast

BOUNDS = Bounds(first_token_s=2.0, token_s=0.2, base_s=0.05, each_s=1e-3)
COST = FlatCost(per_iteration_s=BOUNDS.base_s, per_token_s=BOUNDS.each_s)
CONFIG = EngineConfig(
    num_pages=4000, max_slots=64, max_context=1024, max_step_tokens=512, max_decode_iterations=4
)


class Watched:
    """The state of an order that remembers which requests were admitted, by their ids."""

    def __init__(self) -> None:
        self.admitted: set[str] = set()
        self._state = SoftAdmission(BOUNDS).new_state()
        self._sequences: list[Sequence] = []

    def key(self, sequence: Sequence, lengths: LengthTracker) -> object:
        self._sequences.append(sequence)
        return self._state.key(sequence, lengths)

    def update(self, queue: QueueView) -> bool:
        has_changed = self._state.update(queue)
        self.admitted |= {s.request.id for s in self._sequences if self._state.is_admitted(s)}
        return has_changed


@dataclass(frozen=True)
class WatchedOrder(ServiceOrder):
    """The order of one run whose state the test has."""

    state: Watched

    def new_state(self) -> Watched:
        return self.state


def _feasible(prompts: list[Prompt], chosen: tuple[bool, ...], num_decoding: int) -> bool:
    """Count batch by batch whether the chosen prompts are computed in time: 10 tokens a second."""
    num_running, left, before_s = num_decoding, 0.0, 0.0
    for prompt, is_chosen in sorted(zip(prompts, chosen, strict=True)):
        left += max(0.0, prompt.due_s - before_s) * max(0, 10 - num_running)
        before_s = prompt.due_s
        if is_chosen:
            left -= prompt.num_tokens
            num_running += 1
            if left < 0 or num_running > 10:
                return False
    return True


def test_as_many_prompts_as_can_be_in_time():
    """It admits as many as the best of all subsets, and those that it admits are in time."""
    rng = np.random.default_rng(0)
    num_admitted = []
    for _ in range(40):
        num = int(rng.integers(1, 7))
        prompts = [
            Prompt(float(due), int(tokens))
            for due, tokens in zip(rng.integers(1, 9, num), rng.integers(1, 30, num), strict=True)
        ]
        num_decoding = int(rng.integers(0, 8))
        chosen = most_in_time(prompts, 0.0, num_decoding, batch_tokens=10, batch_s=1.0)
        assert _feasible(prompts, tuple(chosen), num_decoding)
        subsets = itertools.product([False, True], repeat=num)
        best = max(sum(each) for each in subsets if _feasible(prompts, each, num_decoding))
        assert sum(chosen) == best
        num_admitted.append(best)
    assert 0 < np.mean(num_admitted) < 3


def test_what_was_promised_is_kept():
    """A prompt that was admitted before stays so, and leaves less for others."""
    small = [Prompt(2.0, 5), Prompt(2.0, 5)]
    assert most_in_time(small, 0.0, 0, 10, 1.0) == [True, True]
    chosen = most_in_time([*small, Prompt(2.0, 15, is_promised=True)], 0.0, 0, 10, 1.0)
    assert chosen[2] and sum(chosen) < 3


def _overload() -> list[WorkloadItem]:
    """Return long prompts, about twice as many as can be computed."""
    times = np.cumsum(np.random.default_rng(1).exponential(0.25, 60))
    return [item_of(20, float(time_s), num_prompt=300) for time_s in times]


def _in_time(policy: Policy) -> dict[str, bool]:
    """Return of each request whether it met its bounds."""
    done = simulate(_overload(), policy, CONFIG, COST, progress=False).completions
    return {each.request_id: _meets(each) for each in done}


def _meets(done: Completion) -> bool:
    first_s, whole_s = done.timing.time_to_first_token_s, done.timing.latency_s
    assert first_s is not None and whole_s is not None
    each_s = (whole_s - first_s) / (len(done.token_ids) - 1)
    return first_s <= BOUNDS.first_token_s and each_s <= BOUNDS.token_s + 1e-6


def test_admitted_requests_meet_their_bounds_under_twice_the_load():
    """All of them do; first come, first served, no request meets its bounds in the end."""
    preset, state = PRESETS["slos_serve"], Watched()
    order, iteration = WatchedOrder(state), replace(preset.iteration, bounds=BOUNDS)
    in_time = _in_time(replace(preset, order=order, iteration=iteration))
    before = [*_in_time(PRESETS["vllm_like"]).values()]
    assert all(in_time[name] for name in state.admitted)
    assert 20 <= len(state.admitted) < 50 and sum(in_time.values()) > 2 * sum(before)
    assert not any(before[-10:]) and any([*in_time.values()][-10:])
