"""Models with states in slots: sequences begin with a snapshot of a state, or anew."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.memory.cached_page import TAIL_BYTES
from jaxserve.memory.disk_tier import DiskTier, PageFiles
from jaxserve.memory.snapshots import Grid, LearnedReuse, Marconi
from jaxserve.scheduling.kv.manager import SwapCosts
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Tiered
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some
from tests.memory.gate import GatedFiles, PoorFiles, spoil
from tests.scheduling.simulated import request_of
from tests.scheduling.test_prefix_cache import CONFIG, Server

POLICIES = [
    *("auto", "concurrent_instances", "exegpt_rra", "fastertransformer", "flover", "orca"),
    *("pensieve", "pensieve_device_only", "s3", "s3_oracle", "vllm_like"),
]


def state_trace(seed: int, num_snapshots: int = 0, num_on_host: int = 0, **options: Any) -> Trace:
    """Return a random trace of a model whose sequences have states, `num_on_host` on the host."""
    trace = Trace(seed, **options)
    trace.config = replace(
        trace.config,
        has_slot_state=True,
        num_snapshots=num_snapshots,
        num_host_snapshots=num_on_host,
        num_host_pages=8 * num_on_host,
        restore="prefetch" if num_on_host % 2 else "on_admission",
    )
    return trace


@seeds(20, 10)
@pytest.mark.parametrize("policy", some(POLICIES))
def test_random_traces(seeds, policy):
    """Requests have the tokens that they have alone, and no page is kept, shared or swapped.

    The simulated model refuses rows that do not begin where the state of their slot ends.
    """
    num_preempted = 0
    for seed in seeds:
        trace = state_trace(seed, with_faults=seed % 2 == 0, with_conversations=True)
        together = trace.check(PRESETS[policy], cancel_rate=0.02 if seed % 3 else 0.0)
        num_preempted += sum(outcome.num_preemptions for outcome in together.values())
        assert trace.counters["num_prefix_hit"] == 0
        assert trace.counters["num_pages_out"] == trace.counters["num_pages_in"] == 0
    assert num_preempted or policy not in ("auto", "vllm_like", "s3")


STATES = replace(CONFIG, has_slot_state=True, num_snapshots=8, num_host_pages=0)
SYSTEM = tuple(range(100, 121))


def test_a_turn_computes_its_new_tokens():
    """The state is one token behind the answer; forks of a conversation copy it."""
    server = Server(STATES)
    (history,) = server.answer(SYSTEM)
    assert len(history) == len(SYSTEM) + 5
    server.answer((*history, 1, 2, 3), (*history, 4))
    assert server.first_rows == [(25, 4), (25, 2)]
    server.engine.scheduler.check_integrity()


def test_the_second_prompt_leaves_a_state_where_both_part():
    """Full pages that two prompts share are computed twice, and not a third time."""
    server = Server(STATES)
    server.answer((*SYSTEM, 1, 2), max_tokens=1)
    assert server.first_rows == [(0, 23)]
    server.answer((*SYSTEM, 3, 4), max_tokens=1)
    rows = [(row.start, row.num_tokens) for plan in server.executor.plans for row in plan.rows]
    assert rows == [(0, 20), (20, 3)]
    server.answer((*SYSTEM, 5), max_tokens=1)
    assert server.first_rows == [(20, 2)]


def test_a_turn_whose_state_was_evicted_parts_from_nothing():
    """It is computed as a whole; the state of its own history would not be used again."""
    server = Server(replace(STATES, num_snapshots=1))
    (history,) = server.answer(SYSTEM)
    server.answer((7,), max_tokens=1)  # it takes the only entry
    server.answer((*history, *range(1, 9)), max_tokens=1)
    rows = [(row.start, row.num_tokens) for plan in server.executor.plans for row in plan.rows]
    assert rows == [(0, len(history) + 8)]


def test_a_prompt_leaves_a_state():
    """A history that continues with another answer, as without thoughts, begins at its end."""
    server = Server(STATES)
    server.answer(SYSTEM)
    server.answer((*SYSTEM, 1, 2, 3))
    assert server.first_rows == [(21, 3)]


def test_a_state_that_is_kept_is_not_copied_again():
    """The same prompt does not evict the state of another one for its own."""
    server = Server(replace(STATES, num_snapshots=3))
    short, long = SYSTEM[:3], tuple(range(41))
    server.answer(short, max_tokens=1)
    for _ in range(4):
        server.answer(long, max_tokens=1)
    assert server.first_rows == [(40, 1)]
    server.answer((*short, 1))
    assert server.first_rows == [(3, 1)]
    server.engine.scheduler.check_integrity()


def test_states_of_a_request_that_failed_are_dropped():
    """No sequence begins with a state whose logits were not numbers, also within a page."""
    failing = SYSTEM[:3]
    server = Server(STATES, fault_length=lambda request, _: 0 if request.prompt == failing else 100)
    server.answer(failing)
    server.answer((*failing, 1))
    assert server.first_rows == [(0, 4)]
    server.engine.scheduler.check_integrity()


def test_a_grid_has_states_of_prompts_and_answers():
    """Steps end at multiples of its tokens; a next turn begins after the last one."""
    server = Server(replace(STATES, max_step_tokens=12, token_buckets=()), states=Grid(8))
    (history,) = server.answer(SYSTEM, max_tokens=12)
    rows = [(row.start, row.num_tokens) for plan in server.executor.plans for row in plan.rows]
    assert rows[:3] == [(0, 8), (8, 8), (16, 5)]
    loops = [plan.num_iterations for plan in server.executor.plans if plan.is_decode_loop]
    assert sum(loops) == 11 and loops[0] == 3  # 21, 22, 23: a state after 24 tokens
    server.answer((*history, 4))
    assert server.first_rows == [(32, 2)]
    server.answer((*history[:20], 4))
    assert server.first_rows == [(16, 5)]
    server.engine.scheduler.check_integrity()


@pytest.mark.release
@pytest.mark.parametrize("states", [Marconi(), Grid(1), Grid(8)], ids=str)
def test_other_retentions_give_the_same_tokens(states):
    """Which states are kept changes no answer."""
    policy = replace(PRESETS["pensieve"], retention=Tiered(states=states))
    num_restored = 0
    for seed in range(40):
        trace = state_trace(seed, 1 + seed % 7, with_faults=seed % 2 == 0, with_conversations=True)
        trace.check(policy, cancel_rate=0.02, update_rate=0.01)
        num_restored += trace.counters["num_snapshots_restored"]
    assert num_restored > 0


@pytest.mark.parametrize("policy", some(["auto", "exegpt", "pensieve_device_only", "pensieve"]))
@seeds(200, 2)
def test_sequences_begin_with_snapshots(policy, seeds):
    """Requests have the tokens that they have alone, with forks, evictions and preemptions.

    The simulated model's states depend on all tokens, so that a wrong snapshot is refused.
    """
    num_restored = 0
    for seed in seeds:
        trace = state_trace(seed, 1 + seed % 7, with_faults=seed % 2 == 0, with_conversations=True)
        rates = dict(cancel_rate=0.02, update_rate=0.01) if seed % 3 else {}
        trace.check(PRESETS[policy], **rates)
        num_restored += trace.counters["num_snapshots_restored"]
    assert num_restored > 0


@pytest.mark.parametrize("policy", some(["pensieve", "auto", "exegpt"]))
@seeds(200, 4)
def test_states_and_pages_go_to_the_host(policy, seeds):
    """Requests have the tokens that they have alone; few states fit on the device.

    Some sequences await pages after they got their state, and some are preempted then.
    """
    totals = Counter()
    for seed in seeds:
        options = dict(with_faults=seed % 2 == 0, incoming_pages=(None, 1, 3)[seed % 3])
        trace = state_trace(seed, 1 + seed % 2, 1 + seed % 9, with_conversations=True, **options)
        rates = dict(cancel_rate=0.02, update_rate=0.01) if seed % 3 else {}
        together = trace.check(PRESETS[policy], **rates)
        totals.update(trace.counters)
        totals["awaited"] += trace.num_awaited
        totals["preempted"] += sum(outcome.num_preemptions for outcome in together.values())
    names = ("num_snapshots_out", "num_snapshots_in", "num_pages_out", "num_pages_in")
    assert all(totals[name] for name in names)
    assert len(seeds) < 200 or min(totals["awaited"], totals["preempted"]) > 0


def test_a_preempted_sequence_continues_from_the_host():
    """Its state was pushed out by another one; nothing is computed again."""
    config = replace(STATES, num_snapshots=1, num_pages=14, num_host_pages=30)
    for num_on_host, is_lossless in ((0, False), (4, True)):
        server = Server(replace(config, num_host_snapshots=num_on_host))
        server.answer(*((i, *SYSTEM[:15]) for i in range(3)), max_tokens=20)
        stats = server.engine.stats
        assert stats.num_preemptions > 0
        assert (stats.num_recomputed == 0) == is_lossless
        assert (stats.num_snapshots_in > 0) == is_lossless
        server.engine.scheduler.check_integrity()


def test_pages_go_wherever_their_states_go():
    """Although they cost less to compute than to copy: without them a state is of no use."""
    config = replace(STATES, num_snapshots=1, num_host_snapshots=4, num_pages=14, num_host_pages=30)
    server = Server(config, swap_costs=SwapCosts(page_s=1.0, token_s=0.01))
    (history,) = server.answer(SYSTEM)
    server.answer(tuple(range(200, 240)), max_tokens=1)
    server.answer((*history, 1))
    assert server.first_rows == [(25, 2)]
    assert server.engine.stats.num_pages_in > 0


def test_a_state_on_the_host_without_its_pages_is_not_used():
    """The sequence begins with an earlier state, whose pages are cached, or anew."""
    config = replace(STATES, num_snapshots=1, num_host_snapshots=4, num_host_pages=4)
    for evicted, start in ((None, 25), (5, 21), (4, 0)):
        server = Server(config)
        (history,) = server.answer(SYSTEM)
        server.answer((7,), max_tokens=1)  # whose state takes the only entry of the device
        server.engine.evict(history, [] if evicted is None else [evicted])
        server.answer((*history, 4))
        assert server.first_rows[0][0] == start
        assert server.engine.stats.num_snapshots_in == (evicted != 4)
        server.engine.scheduler.check_integrity()


ON_DISK = replace(STATES, num_snapshots=1, num_host_snapshots=4, num_host_pages=30)


def _on_disk(folder: Path, config: EngineConfig = ON_DISK) -> tuple[Server, DiskTier]:
    disk = DiskTier(GatedFiles(folder))
    return Server(config, disk=disk), disk


def test_a_state_comes_from_the_disk(tmp_path):
    """It went there from the host, for other states; or at the end of an earlier run."""
    server, disk = _on_disk(tmp_path)
    (history,) = server.answer(SYSTEM)
    for begin in range(200, 600, 50):
        server.answer(tuple(range(begin, begin + 40)), max_tokens=1)
    disk.flush()  # else they come from what is still to be written
    for start in (25, 32, 39):
        (history,) = server.answer((*history, 1, 2))
        assert server.first_rows[0][0] == start
        assert server.engine.stats.num_snapshots_in == 1
        assert sum(len(key) > TAIL_BYTES for key in disk.files.reading.calls) == 1
        server.engine.scheduler.check_integrity()
        server.engine.close(is_whole=True)
        server, disk = _on_disk(tmp_path)
    server.engine.close(is_whole=True)


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: Path) -> None:
    *most, last = path.read_bytes()
    path.write_bytes(bytes([*most, last ^ 1]))


@pytest.mark.parametrize("damage", [_halve, _flip, Path.unlink])
@pytest.mark.parametrize(
    ("num_states", "num_pages", "start"), [(1, 0, 21), (2, 0, 0), (0, 1, 21), (0, 2, 0)]
)
def test_what_is_damaged_on_the_disk_is_computed_again(
    damage, num_states, num_pages, start, tmp_path
):
    """A sequence begins with an earlier state if the last one, or a page before it, is damaged."""
    server, _ = _on_disk(tmp_path)
    (history,) = server.answer(SYSTEM)
    server.engine.close(is_whole=True)
    server, _ = _on_disk(tmp_path)  # which has found the files
    states = [path for path in tmp_path.iterdir() if len(path.stem) > 2 * TAIL_BYTES]
    states.sort(key=lambda path: np.frombuffer(path.read_bytes()[-48:], np.int64)[0], reverse=True)
    pages = [path.with_stem(path.stem[: -2 * TAIL_BYTES]) for path in states]
    for path in (*states[:num_states], *pages[:num_pages]):
        damage(path)
    assert server.answer((*history, 4)) == Server(STATES).answer((*history, 4))
    assert server.first_rows[0][0] == start
    server.engine.scheduler.check_integrity()
    server.engine.close(is_whole=True)


def test_many_turns_continue_from_the_disk(tmp_path):
    """They wait for room on the host, which has fewer states, and do not evict each other's."""
    config = replace(ON_DISK, num_snapshots=4, num_host_snapshots=8)
    server, _ = _on_disk(tmp_path, config)
    prompts = [(*SYSTEM[:9], i) for i in range(12)]
    histories = [history for each in prompts for history in server.answer(each)]
    server.engine.close(is_whole=True)
    server, disk = _on_disk(tmp_path, config)
    for history in histories:
        server.engine.add(request_of(str(history), (*history, 4), max_tokens=5))
    while server.engine.has_work:
        server.engine.step()
        server.engine.scheduler.check_integrity()
        disk.flush()  # which takes no time on the virtual clock
    assert server.engine.stats.num_snapshots_restored == 12
    server.engine.close(is_whole=True)


@pytest.mark.parametrize("policy", some(["pensieve", "auto"]))
@seeds(40, 2)
def test_states_and_pages_go_to_the_disk(policy, seeds, tmp_path):
    """Later runs find them, and requests have the tokens that they have alone.

    Disks are slow, small or full, and files are missing or damaged.
    """
    totals = Counter()
    for seed in seeds:
        for run in range(3):
            folder, rng = tmp_path / str(seed), random.Random(f"{seed} {run}")
            files = PageFiles(folder, 20_000 if seed % 4 == 0 else 1_000_000)
            options = dict(with_faults=seed % 2 == 0, incoming_pages=(None, 1, 3)[seed % 3])
            trace = state_trace(
                seed, 1 + seed % 2, 1 + seed % 5, with_conversations=True, **options
            )
            rates = dict(cancel_rate=0.02, update_rate=0.01) if seed % 3 == 2 and not run else {}
            disk = DiskTier(PoorFiles(files, rng) if seed % 2 else files)
            trace.check(PRESETS[policy], disk=disk, **rates)
            totals.update(trace.counters)
            totals["num_corrupt"] += files.num_corrupt
            spoil(folder, rng, share=0.03)
    assert min(totals["num_prefix_hit_on_disk"], totals["num_snapshots_in"]) > 0
    assert totals["num_corrupt"] > 0


@pytest.mark.parametrize("states", some([LearnedReuse(), Grid(1), Grid(8), Marconi()]), ids=str)
@seeds(100, 10)
def test_snapshots_of_loops_that_speculate(states, seeds):
    """Loops end before what was planned, and states are found by the tokens that they have."""
    policy = replace(PRESETS["pensieve"], retention=Tiered(states=states))
    num_restored, num_accepted = 0, 0
    for seed in seeds:
        falls_short = seed % 3 > 0
        given = dict(with_faults=seed % 2 == 0, with_conversations=True, falls_short=falls_short)
        trace = state_trace(seed, 1 + seed % 7, seed % 4, speculates=True, **given)
        trace.check(policy, cancel_rate=0.02 if falls_short else 0.0)
        num_restored += trace.counters["num_snapshots_restored"]
        num_accepted += trace.counters["num_accepted_tokens"]
    assert num_restored > 0 and num_accepted > 0


@pytest.mark.release
@pytest.mark.parametrize("num_on_host", [0, 5])
def test_snapshots_outlast_other_pools(num_on_host):
    """Resizes move pages and drop copies that no plan has made; invariants hold after each."""
    num_restored = 0
    for seed in range(60):
        trace = state_trace(seed, 1 + seed % 7, num_on_host, with_conversations=True)
        trace.run(PRESETS["auto"], resize_rate=0.1, recompute_rate=0.02, cancel_rate=0.02)
        num_restored += trace.counters["num_snapshots_restored"]
    assert num_restored > 0
