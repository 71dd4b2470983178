"""Decode loops that speculate: when they do, and that no token changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.scheduling.plan import ProposalCount, Row, StepPlan, StepResult
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.speculation import Speculating, Speculation
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some

pytestmark = pytest.mark.fast

POLICIES = (
    *("vllm_like", "orca", "auto", "s3", "fastertransformer", "concurrent_instances"),
    *("pensieve", "exegpt_rra", "exegpt_waa_c", "flover"),
)


@seeds(40, 10)
@pytest.mark.parametrize("name", some(POLICIES, 8))
def test_every_answer_has_the_tokens_it_has_alone(seeds, name):
    """Also where loops deliver fewer tokens than they may, which they do in half of the traces."""
    num_accepted = 0
    for seed in seeds:
        trace = Trace(seed, with_faults=seed % 3 == 0, falls_short=seed % 2 == 0, speculates=True)
        rates = {"cancel_rate": 0.02 if seed % 5 else 0.0}
        if seed % 7:
            trace.check(PRESETS[name], **rates)
        else:
            trace.run(PRESETS[name], **rates, resize_rate=0.02)
        num_accepted += trace.counters["num_accepted_tokens"]
    assert num_accepted or name == "concurrent_instances"  # whose loops are of one sequence


class _Loops:
    """Loops of one size, with the times and counts that a test gives."""

    def __init__(self, most: int = 4, num_rows: int = 1):
        self.speculation = Speculation(most, (1, 2 * most))
        self._rows = tuple(Row(i, i, 0, 1, 1) for i in range(num_rows))
        self.sequences: Any = tuple(SimpleNamespace(key=i) for i in range(num_rows))

    def next_loop(self) -> Speculating | None:
        return self.speculation.next_loop(self.sequences)

    def next_speculating(self) -> Speculating | None:
        """Return how the next loop that speculates does it, after a few that do not."""
        return next((found for _ in range(5) if (found := self.next_loop())), None)

    def ran(
        self, *, plain: int, wide: int, seconds: float, accepted: int = 0, speculates: bool = False
    ) -> None:
        """Take in a loop of iterations of both kinds, and of proposals that were accepted."""
        num_rows, most = len(self._rows), 4
        counts = np.zeros((num_rows, len(ProposalCount) + most), np.int32)
        counts[:, : len(ProposalCount)] = wide, wide * most, plain + wide, wide
        counts[:, len(ProposalCount) :][:, :accepted] += 1
        num_tokens = np.full(num_rows, plain + wide + accepted, np.int32)
        plan = StepPlan(0, rows=self._rows, window_size=num_rows, num_proposed=most if wide else 0)
        nothing = np.zeros((num_rows, 1), np.int32)
        proposals = counts if wide or speculates else None
        result = StepResult(nothing, num_tokens, num_tokens > 0, proposals=proposals)
        self.speculation.take_in(plan, result, seconds)


def test_loops_speculate_behind_one_that_is_timed_without():
    loops = _Loops()
    assert loops.next_loop() is None
    assert loops.next_loop() == Speculating(4, 1.2)  # while that one is in flight
    loops.ran(plain=8, wide=0, seconds=0.08)
    assert loops.next_loop() == Speculating(4, 1.2)
    assert Speculation(0, ()).next_loop(loops.sequences) is None


def test_more_rows_than_twice_the_proposals_never_speculate():
    loops = _Loops(num_rows=9)
    loops.ran(plain=8, wide=0, seconds=0.08)
    assert loops.next_loop() is None


def test_the_cost_is_that_of_the_iterations_that_computed_proposals():
    loops = _Loops()
    loops.ran(plain=8, wide=0, seconds=0.08)
    for wide_s in (0.5, 0.013, 0.013):
        loops.ran(plain=6, wide=2, seconds=0.06 + 2 * wide_s)
    speculating = loops.next_speculating()
    assert speculating is not None and speculating.verify_cost == pytest.approx(1.3)


def test_where_even_right_proposals_would_not_pay_they_are_tried_rarely():
    """Five tokens at most are worth a factor below five."""
    for factor, goes_on in ((4.0, True), (6.0, False)):
        loops = _Loops()
        loops.ran(plain=8, wide=0, seconds=0.08)
        for _ in range(5):
            loops.ran(plain=0, wide=8, seconds=0.08 * factor)
        num_speculating = 0
        for _ in range(1300):
            if loops.next_loop() is None:
                loops.ran(plain=8, wide=0, seconds=0.08)
            else:
                num_speculating += 1
        assert (num_speculating > 1200) == goes_on
        assert num_speculating >= 10


def test_one_loop_in_many_is_timed_without_proposals():
    loops = _Loops()
    loops.ran(plain=8, wide=0, seconds=0.08)
    num_timed = 0
    for _ in range(400):
        if loops.next_loop() is None:
            loops.ran(plain=8, wide=0, seconds=0.08)
            num_timed += 1
    assert 5 <= num_timed <= 10


def test_a_sequence_gets_pages_for_what_it_lately_delivered():
    loops = _Loops()
    sequence: Any = SimpleNamespace(key=0)
    most_tokens = loops.speculation.most_tokens
    assert [most_tokens(sequence, num_rows) for num_rows in (1, 4)] == [5, 3]
    for _ in range(9):
        loops.ran(plain=7, wide=1, seconds=0.08)
    assert most_tokens(sequence, 1) == 3
    for _ in range(9):
        loops.ran(plain=0, wide=1, seconds=0.08, accepted=4)
    assert most_tokens(sequence, 1) == 5


def test_every_device_group_forgets_answers_once():
    speculation = Speculation(4, (1, 4, 8))
    assert not speculation.take_forgetting(0)
    speculation.forget_answers()
    told = [speculation.take_forgetting(group) for group in (0, 0, 1, 1, 0)]
    assert told == [True, False, True, False, False]


def test_counters_tell_what_was_computed_and_kept():
    loops = _Loops()
    loops.ran(plain=8, wide=0, seconds=0.08)
    loops.ran(plain=1, wide=1, seconds=0.02, accepted=3)
    loops.ran(plain=1, wide=1, seconds=0.02, accepted=1)
    assert loops.speculation.num_accepted_by_place == (2, 1, 1, 0)
    assert loops.speculation.counters() == {
        "num_drafts": 2,
        "num_draft_tokens": 8,
        "num_accepted_tokens": 4,
    }


def test_a_late_first_loop_does_not_make_proposals_look_free():
    """Such as one that waited until it was compiled."""
    loops = _Loops()
    loops.ran(plain=8, wide=0, seconds=8.0)
    for _ in range(5):
        loops.ran(plain=4, wide=4, seconds=0.1)
    for _ in range(5):
        loops.ran(plain=8, wide=0, seconds=0.08)
        loops.ran(plain=4, wide=4, seconds=0.1)
    speculating = loops.next_speculating()
    assert speculating is not None and speculating.verify_cost == pytest.approx(1.5)


def test_loops_in_which_proposals_do_not_pay_give_way_to_loops_without():
    """At most four in a row, until proposals pay or another sequence takes part."""
    loops = _Loops()
    loops.ran(plain=8, wide=0, seconds=0.08)
    loops.ran(plain=8, wide=0, seconds=0.08, speculates=True)

    def kinds(num: int, *, wide: int = 0, accepted: int = 0) -> str:
        found = ""
        for _ in range(num):
            speculates = loops.next_loop() is not None
            found += "s" if speculates else "."
            num_wide = wide if speculates else 0
            loops.ran(
                plain=8 - num_wide,
                wide=num_wide,
                seconds=0.08 + 0.002 * num_wide,
                accepted=accepted if speculates else 0,
                speculates=speculates,
            )
        return found

    assert kinds(13) == ".s..s....s..."
    assert kinds(6, wide=4, accepted=4) == ".sssss"
    assert kinds(8, wide=4) == "s.s..s.."
    loops.sequences = (SimpleNamespace(key=7),)
    assert kinds(2) == "ss"
