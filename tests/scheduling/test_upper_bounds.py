"""Planned tokens and pages that are not used, in cases computed by hand."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.config import EngineConfig
from jaxserve.predictor import LengthBuckets
from jaxserve.scheduling.sequence import Phase, Sequence
from tests.scheduling.simulated import certain, engine_of, request_of

# One token per page.
CONFIG = EngineConfig(
    page_size=1,
    num_pages=101,
    max_slots=2,
    max_context=60,
    max_step_tokens=64,
    max_decode_iterations=8,
)


class Accepting:
    """An engine whose steps deliver the next of these numbers of tokens, and then all."""

    def __init__(self, *accepted: int, policy: str = "vllm_like", config: EngineConfig = CONFIG):
        left = list(accepted)
        self.engine = engine_of(policy, config, accepted=lambda *_: left.pop(0) if left else 100)

    def add(self, max_tokens: int, predicted: int | None = None) -> Sequence:
        """Add a request of 4 tokens whose answer ends at its limit."""
        buckets = LengthBuckets.equal_width(100, 10)
        known = None if predicted is None else certain(predicted, buckets)
        request = request_of("a", (1, 2, 3, 4), prediction=known, max_tokens=max_tokens)
        (sequence,) = self.engine.add(request)
        return sequence

    def step(self) -> None:
        """Run one step and check the counts."""
        self.engine.step()
        self.engine.scheduler.check_integrity()

    def run(self) -> None:
        """Run all remaining steps."""
        while self.engine.has_work:
            self.step()

    @property
    def num_owned(self) -> int:
        return self.engine.scheduler.page_usage().num_owned


def _wanted(max_tokens: int) -> list[int]:
    server = Accepting()
    sequence = server.add(max_tokens)
    server.run()
    return sequence.output


def test_pages_for_tokens_that_did_not_come_go_back_to_the_reservation():
    """Two loops of 8 follow 4 + 1 tokens; when 2 of the first come, 6 pages are free."""
    server = Accepting(1, 2)
    sequence = server.add(50)
    server.step()  # the prompt is in flight
    server.step()  # the first loop is in flight, the prompt is collected
    assert (len(sequence.output), sequence.planned_length, server.num_owned) == (1, 13, 12)
    server.step()
    assert (len(sequence.output), sequence.planned_length) == (3, 7 + 8)
    assert (sequence.kv.num_computed, server.num_owned) == (14, 14)
    assert sequence.kv.table.reservation == 20
    assert server.engine.scheduler.counters()["num_taken_back"] == 6
    server.run()
    assert sequence.output == _wanted(50) and server.num_owned == 0


def test_a_step_that_delivers_nothing_is_planned_again():
    """This holds for the prompt's step and for a step of several tokens."""
    server = Accepting(0, 0, 3, 0)
    sequence = server.add(20)
    server.run()
    assert sequence.output == _wanted(20) and sequence.finish_reason == "length"


def test_a_sequence_that_was_closed_too_early_comes_back():
    """Its 8 tokens are planned and its pages freed when a token turns out to be missing."""
    server = Accepting(1, 6)
    sequence = server.add(8)
    server.step()
    server.step()
    assert sequence.phase is Phase.CLOSING and server.num_owned == 0
    server.step()
    assert sequence.phase is Phase.WAITING and len(sequence.output) == 7
    server.run()
    assert sequence.output == _wanted(8)
    assert server.engine.stats.num_recomputed == 10


def test_a_sequence_that_falls_short_is_closed_when_its_end_is_read():
    """It fell short before, so it keeps its slot at its limit until then; no row goes beyond."""
    server = Accepting(0, 1, 5, 7, 3)
    sequence = server.add(30)
    phases = set()
    while server.engine.has_work:
        server.step()
        phases.add(sequence.phase)
    assert sequence.output == _wanted(30) and Phase.CLOSING not in phases
    assert server.engine.stats.num_recomputed == 0


def test_a_sequence_that_is_swapped_out_in_flight_comes_back_where_it_is():
    """Its 14 reserved tokens are planned, so it is preempted; 5 of them were not delivered."""
    server = Accepting(1, 3, policy="s3", config=replace(CONFIG, num_host_pages=100))
    sequence = server.add(40, predicted=10)
    server.step()
    server.step()
    assert sequence.kv.num_computed == 12
    server.step()  # 2 more are planned; of the 8 before, 3 have come
    assert (sequence.kv.num_computed, len(sequence.output)) == (9, 4)
    while sequence.num_preemptions == 0:
        server.step()
    host_pages, planned = len(sequence.kv.host_pages), sequence.kv.num_computed
    assert host_pages == 14
    server.run()
    assert sequence.output == _wanted(40) and planned <= 14
    assert server.engine.stats.num_recomputed == 0
