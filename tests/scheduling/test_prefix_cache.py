"""Plans for prompts of which the cache has some parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import JaxserveError, StepMemoryError
from jaxserve.engine.engine import Engine
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.memory.disk_tier import DiskTier, PageFiles
from jaxserve.memory.snapshots import LearnedReuse, StateRetention
from jaxserve.scheduling.kv.manager import KVManager
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Tiered
from jaxserve.scheduling.sequence import MAX_LOOKED_AT, Sequence
from jaxserve.testing import RecordingExecutor
from tests.memory.gate import GatedFiles
from tests.scheduling.simulated import request_of, run_to_end

CONFIG = EngineConfig(
    page_size=4,
    num_pages=101,
    max_slots=4,
    max_context=200,
    max_step_tokens=200,
    max_decode_iterations=4,
    num_host_pages=100,
)

OURS = LearnedReuse()


class Server:
    """An engine that answers batches of prompts, one batch after the other."""

    def __init__(
        self,
        config: EngineConfig = CONFIG,
        free_share: float = 0.0,
        disk: DiskTier | None = None,
        states: StateRetention = OURS,
        **device: Any,
    ):
        retention = Tiered(free_share=free_share, states=states)
        policy = replace(PRESETS["pensieve"], retention=retention)
        self.clock = VirtualClock()
        self.executor = RecordingExecutor(SimulatedExecutor(config, self.clock, **device))
        self.engine = Engine(self.executor, policy, self.clock, disk=disk)

    def answer(self, *prompts: tuple[int, ...], max_tokens: int = 5) -> list[tuple[int, ...]]:
        """Return prompts with their answers; `plans` has those of this call."""
        self.executor.plans.clear()
        self.clock.advance_to(self.clock.now() + 10)
        sequences = []
        for prompt in prompts:
            sequences += self.engine.add(request_of(str(prompt), prompt, max_tokens=max_tokens))
        run_to_end(self.engine)
        return [sequence.known_tokens for sequence in sequences]

    @property
    def first_rows(self) -> list[tuple[int, int]]:
        """Return (start, number of tokens) of the first step's rows."""
        return [(row.start, row.num_tokens) for row in self.executor.plans[0].rows]


PROMPT = tuple(range(1, 19))


def test_the_next_turn_computes_what_is_new():
    """18 tokens and 5 fill 5 pages; the last page was not full, and is computed again."""
    server = Server()
    (history,) = server.answer(PROMPT)
    assert server.first_rows == [(0, 18)] and len(history) == 23
    server.answer((*history, 7, 8, 9))
    assert server.first_rows == [(20, 6)]
    stats = server.engine.stats
    assert (stats.num_prefix_queried, stats.num_prefix_hit) == (16 + 24, 20)
    assert stats.num_evicted_tokens == 0


def test_an_answer_that_begins_anew_is_looked_up_anew():
    """Its tokens are others then, of which another sequence has the pages: one page is missing."""
    kv = KVManager(CONFIG, PRESETS["pensieve"], lambda: 0.0)

    def sequence(key: int, prompt: tuple[int, ...]) -> Sequence:
        request = request_of(str(key), prompt)
        return Sequence(key, request, sample_index=0, max_length=100, kv=kv.new(request))

    first, later = sequence(0, PROMPT), sequence(1, PROMPT[:9])
    kv.begin(first, 18)
    kv.allocate(first, 18)
    kv.computed(first, 0, 18)
    later.output.extend([77] * 8)
    assert not kv.fits_into(later, 18, num_pages=1)  # 2 of 5 pages are those of the first
    kv.restart(later, keeps_output=False)
    later.drop_output()
    later.output.extend(PROMPT[9:17])
    assert kv.fits_into(later, 18, num_pages=1)


def test_at_least_one_token_is_computed():
    """If the whole prompt is cached, its last token is computed to sample from."""
    server = Server()
    server.answer(PROMPT[:16])
    server.answer(PROMPT[:16])
    assert server.first_rows == [(12, 4)]


def test_requests_that_come_together_share_what_they_begin_with():
    """The first one computes it in the same step; no sequence writes to a shared page."""
    server = Server()
    server.answer((*PROMPT, 50), (*PROMPT, 60), (*PROMPT[:9], 70))
    assert server.first_rows == [(0, 19), (16, 3), (8, 2)]
    pages = [page for _, _, page in server.executor.plans[0].page_updates]
    assert len(pages) == 5 + 5 + 3 and len(set(pages)) == 5 + 1 + 1


def test_what_was_dropped_is_computed_in_the_step_of_the_new_prompt():
    """Two ranges before the new prompt give three rows of one sequence, in order."""
    server = Server()
    (history,) = server.answer(PROMPT, max_tokens=15)
    server.engine.evict(history, (0, 1, 4))
    (known,) = server.answer((*history, 7))
    assert server.first_rows == [(0, 8), (16, 4), (32, 2)]
    assert len({row.slot for row in server.executor.plans[0].rows}) == 1
    assert [row.samples for row in server.executor.plans[0].rows] == [False, False, True]
    assert server.engine.stats.num_evicted_tokens == 12
    assert Server().answer((*history, 7)) == [known]


def test_more_ranges_than_rows_take_several_steps():
    """A step has as many rows as slots; ranges are computed in the order of positions."""
    server = Server()
    (history,) = server.answer(tuple(range(1, 60)))
    server.engine.evict(history, range(0, 14, 2))
    (known,) = server.answer((*history, 7))
    assert [len(plan.rows) for plan in server.executor.plans[:2]] == [4, 4]
    starts = [row.start for plan in server.executor.plans[:2] for row in plan.rows]
    assert starts == [0, 8, 16, 24, 32, 40, 48, 60]
    assert Server().answer((*history, 7)) == [known]


def test_pages_go_to_the_host_ahead_of_time_and_cost_nothing_until_they_are_reclaimed():
    """If less than a quarter of the pool is free, they are copied, and still hit on the device."""
    config = replace(CONFIG, num_pages=13)
    server = Server(config, free_share=0.75)
    (history,) = server.answer(tuple(range(1, 31)))  # of 12 pages, 8 full ones remain
    updates = [update for plan in server.executor.plans for update in plan.page_updates]
    pages = [page for _, index, page in updates if index < 8]
    assert sum(len(plan.swaps_out) for plan in server.executor.plans) == 0
    server.answer((99,))
    copied = [copy for plan in server.executor.plans for copy in plan.swaps_out]
    assert len(copied) == 7  # it took 2 of the 4 free ones; with 7 these are three quarters of 12
    assert [page in dict(copied) for page in pages] == [True] * 7 + [False]
    server.answer((*history, 5))
    assert server.first_rows == [(32, 4)]
    assert not any(plan.swaps_in for plan in server.executor.plans)


def test_reclaimed_pages_come_back_from_the_host():
    """Another conversation took their memory; they are not computed again."""
    config = replace(CONFIG, num_pages=13)
    server = Server(config)
    (history,) = server.answer(tuple(range(1, 31)))
    server.answer(tuple(range(101, 131)))
    assert sum(len(plan.swaps_out) for plan in server.executor.plans) > 0
    (known,) = server.answer((*history, 5))
    assert server.first_rows == [(32, 4)]
    first = server.executor.plans[0]
    assert len(first.swaps_in) >= 4
    assert server.engine.stats.num_prefix_hit_on_host == 4 * len(first.swaps_in)
    assert Server().answer((*history, 5)) == [known]


def test_pages_come_back_while_their_conversation_waits_for_a_slot():
    """Its first step copies no more pages, and its hits count as without prefetching."""
    config = replace(
        CONFIG, num_pages=13, max_slots=1, slot_buckets=(1,), head_buckets=(1,), restore="prefetch"
    )
    server = Server(config, free_share=1.0)
    (history,) = server.answer(tuple(range(1, 31)))
    server.answer(tuple(range(101, 131)))
    found = server.engine.stats.num_prefix_hit_on_host
    _, known = server.answer((99, 98, 97), (*history, 5), max_tokens=12)
    (begins,) = [i for i, plan in enumerate(server.executor.plans) if plan.admissions][1:]
    num_in = [len(plan.swaps_in) for plan in server.executor.plans]
    assert sum(num_in[:begins]) == sum(num_in) == server.engine.stats.num_pages_prefetched >= 4
    assert [(r.start, r.num_tokens) for r in server.executor.plans[begins].rows] == [(32, 4)]
    assert server.engine.stats.num_prefix_hit_on_host - found == 4 * sum(num_in)
    assert Server().answer((*history, 5), max_tokens=12) == [known]


@pytest.mark.release
def test_all_pages_of_a_long_prompt_come_back_while_it_waits():
    """They are more than one step looks at, and those that came stay."""
    config = replace(
        CONFIG,
        num_pages=1_501,
        num_host_pages=4_000,
        max_slots=1,
        max_context=6_000,
        slot_buckets=(1,),
        head_buckets=(1,),
        restore="prefetch",
    )
    server = Server(config, free_share=1.0)
    (history,) = server.answer(tuple(range(1, 4 * 2 * MAX_LOOKED_AT)))
    server.answer(tuple(range(2, 4 * 2 * MAX_LOOKED_AT)))
    away = server.engine.residency(history).count("host")
    server.answer((99, 98, 97), (*history, 5), max_tokens=500)
    (begins,) = [i for i, plan in enumerate(server.executor.plans) if plan.admissions][1:]
    num_in = [len(plan.swaps_in) for plan in server.executor.plans]
    assert sum(num_in[:begins]) == server.engine.stats.num_pages_prefetched == away
    assert away > MAX_LOOKED_AT


def test_without_host_memory_leading_pages_are_dropped_first():
    """Leading pages cost the least to compute."""
    server = Server(replace(CONFIG, num_pages=13, num_host_pages=0))
    (history,) = server.answer(tuple(range(1, 31)))
    server.answer(tuple(range(101, 120)))
    lies = [tier == "device" for tier in server.engine.residency(history)]
    assert lies == sorted(lies) and 0 < sum(lies) < len(lies)


def test_other_weights_find_nothing():
    server = Server()
    (history,) = server.answer(PROMPT)
    server.engine.forget_kept_pages(keeps_disk=True)
    assert server.engine.scheduler.page_usage().num_cached == 0
    server.answer(history)
    assert server.first_rows == [(0, 23)]


@pytest.mark.parametrize("keeps_disk", [True, False])
def test_pages_on_the_disk_are_forgotten_as_told(tmp_path: Path, keeps_disk: bool):
    """Later prompts evict the first one's pages to the disk, where it finds them, or none."""
    disk = DiskTier(PageFiles(tmp_path, 100_000))
    server = Server(replace(CONFIG, num_pages=13, num_host_pages=8), disk=disk)
    try:
        (history,) = server.answer(PROMPT)
        for first in range(100, 1000, 100):
            server.answer(tuple(range(first, first + 18)))
        server.engine.forget_kept_pages(keeps_disk=keeps_disk)
        assert server.answer(PROMPT) == [history]
        found = server.engine.scheduler.counters()["num_prefix_hit_on_disk"]
        assert found == (16 if keeps_disk else 0)
    finally:
        server.engine.close(is_whole=False)


def test_a_sequence_that_is_cancelled_waits_for_no_page(tmp_path: Path):
    """One whose pages are being read from the disk gives up its claim to them when it ends."""
    config = replace(CONFIG, num_pages=13, num_host_pages=8)
    before = Server(config, disk=DiskTier(PageFiles(tmp_path, 100_000)))
    before.answer(PROMPT)
    before.engine.close(is_whole=True)
    files = GatedFiles(tmp_path)
    files.reading.shut()
    server = Server(config, disk=DiskTier(files))
    try:
        [sequence] = server.engine.add(request_of("a", PROMPT, max_tokens=5))
        server.engine.step()
        assert server.engine.awaits_disk and not server.executor.plans
        server.engine.scheduler.end(sequence, "cancelled")
        assert not server.engine.awaits_disk and not server.engine.has_work
    finally:
        files.reading.open()
        server.engine.close(is_whole=False)


@pytest.mark.parametrize("error", [None, StepMemoryError("no memory")])
def test_the_kv_of_a_failed_sequence_is_not_found(error: JaxserveError | None):
    """What a cancelled sequence has computed is right and stays; after an error it may be wrong."""
    server = Server()
    server.engine.add(request_of("a", PROMPT, max_tokens=50))
    for _ in range(3):
        server.engine.step()
    server.engine.drain()
    [sequence] = server.engine.scheduler.running
    server.engine.scheduler.end(sequence, "error" if error else "cancelled", error)
    server.engine.scheduler.check_integrity()
    assert set(server.engine.residency(PROMPT)) == {"nowhere" if error else "device"}


def test_prompt_log_probabilities_need_the_whole_prompt():
    """The hidden states of cached tokens are not stored."""
    server = Server()
    server.answer(PROMPT)
    server.executor.plans.clear()
    server.engine.add(request_of("again", PROMPT, max_tokens=1, prompt_logprobs=1))
    server.engine.step()
    assert server.first_rows == [(0, 18)]
