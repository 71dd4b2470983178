"""Decode loops that speculate: when they do, and that no token changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.scheduling.plan import ProposalCount, Row, StepPlan, StepResult
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.speculation import Speculation
from jaxserve.testing import Trace

POLICIES = (
    *("vllm_like", "orca", "auto", "s3", "fastertransformer", "concurrent_instances"),
    *("pensieve", "exegpt_rra", "flover"),
)


@pytest.mark.parametrize("name", POLICIES)
def test_every_answer_has_the_tokens_it_has_alone(name):
    """Also where loops deliver fewer tokens than they may, which they do in half of the traces."""
    num_accepted = 0
    for seed in range(40):
        trace = Trace(seed, with_faults=seed % 3 == 0, falls_short=seed % 2 == 0, speculates=True)
        together = trace.run(
            PRESETS[name],
            cancel_rate=0.02 if seed % 5 else 0.0,
            resize_rate=0.02 if seed % 7 == 0 else 0.0,
        )
        if len(trace.pool_sizes) == 1:
            for key, wanted in trace.expected().items():
                assert together[key].agrees_with(wanted), f"seed {seed}, sequence {key}"
        num_accepted += trace.counters["num_accepted_tokens"]
    assert num_accepted or name == "concurrent_instances"  # whose loops are of one sequence


class _Loops:
    """Loops of one sequence, with the times and counts that a test gives."""

    def __init__(self, most: int = 4):
        self.speculation = Speculation(most)
        self.sequence: Any = SimpleNamespace(key=0)

    @property
    def num_proposed(self) -> int:
        return self.speculation.num_proposed([self.sequence])

    def ran(self, *, hits: int, misses: int, seconds: float, num_proposed: int = 0) -> None:
        """Take in a loop of one iteration."""
        proposals = np.zeros((1, len(ProposalCount)), np.int32)
        proposals[0] = hits, misses, num_proposed, hits * (num_proposed > 0), 1
        plan = StepPlan(0, rows=(Row(0, 0, 0, 1, 1),), window_size=1, num_proposed=num_proposed)
        nothing = np.zeros(1, np.int32)
        result = StepResult(nothing[:, None], nothing, nothing == 0, proposals=proposals)
        self.speculation.take_in(plan, result, seconds)


def test_nothing_is_proposed_before_anything_is_known():
    assert _Loops().num_proposed == 0


def test_proposals_that_were_wrong_are_not_computed():
    loops = _Loops()
    for _ in range(20):
        loops.ran(hits=0, misses=1, seconds=0.01)
    assert loops.num_proposed == 0


def test_proposals_that_would_have_been_right_are_computed():
    loops = _Loops()
    for _ in range(10):
        loops.ran(hits=1, misses=0, seconds=0.01)
    assert loops.num_proposed == 4
    assert Speculation(0).num_proposed([loops.sequence]) == 0


def test_it_stops_where_an_iteration_takes_longer_than_it_gains():
    """Five tokens at most are worth a factor of five, but not one of six; it tries again rarely."""
    for factor, goes_on in ((4.0, True), (6.0, False)):
        loops = _Loops()
        for _ in range(20):
            loops.ran(hits=1, misses=0, seconds=0.01)
        for _ in range(5):
            loops.ran(hits=4, misses=0, seconds=0.01 * factor, num_proposed=4)
        decisions = [loops.num_proposed > 0 for _ in range(1000)]
        assert sum(decisions) == (1000 if goes_on else 4)


def test_counters_tell_what_was_computed_and_kept():
    loops = _Loops()
    loops.ran(hits=1, misses=0, seconds=0.01)
    loops.ran(hits=3, misses=1, seconds=0.01, num_proposed=4)
    assert loops.speculation.counters() == {"num_draft_tokens": 4, "num_accepted_tokens": 3}
