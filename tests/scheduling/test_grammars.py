"""Requests that await each of their tokens, which may force others, in random traces."""

from __future__ import annotations

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import RecordingExecutor, Trace, WrapAll
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import engine_of, request_of

CONFIG = EngineConfig(num_pages=50, page_size=4, max_slots=4, max_context=60)

POLICIES = (
    *("vllm_like", "orca", "auto", "s3", "fastertransformer", "concurrent_instances"),
    *("pensieve", "exegpt_rra", "exegpt_waa_c", "flover"),
)


@seeds(24, 10)
@pytest.mark.parametrize("name", some(POLICIES))
def test_every_answer_has_the_tokens_it_has_alone(seeds, name):
    """Forced tokens, preemptions, cancellations, faults and other requests change no token."""
    num_preemptions = 0
    for seed in seeds:
        trace = Trace(seed, with_faults=seed % 2 == 0, has_grammars=True)
        together = trace.check(PRESETS[name], cancel_rate=0.02 if seed % 3 else 0.0)
        num_preemptions += sum(outcome.num_preemptions for outcome in together.values())
    assert num_preemptions or name not in ("vllm_like", "auto", "s3", "pensieve")


def test_others_run_ahead_of_a_request_that_awaits_its_tokens():
    """It has one token in flight at most, in mixed steps; the other is in loops between them."""
    seen = WrapAll(RecordingExecutor)
    engine = engine_of("vllm_like", CONFIG, wrap=seen)
    awaiting, free = (
        engine.add(request_of(name, max_tokens=20, **others))[0]
        for name, others in (("a", {"regex": "a"}), ("b", {}))
    )
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
        assert awaiting.num_planned_outputs - len(awaiting.output) <= 1
    assert len(awaiting.output) == len(free.output) == 20
    kinds = {
        (plan.is_decode_loop, frozenset(row.sequence_key for row in plan.rows))
        for plan in seen.executors[0].plans
    }
    both, alone = frozenset({awaiting.key, free.key}), frozenset({free.key})
    assert {(False, both), (True, alone)} <= kinds
    assert not any(is_loop and awaiting.key in keys for is_loop, keys in kinds)


@pytest.mark.parametrize("name", ["vllm_like", "orca", "auto", "exegpt_rra"])
def test_requests_that_await_their_tokens_go_on_together(name):
    """One that comes later joins the others, instead of taking turns with them."""
    seen = WrapAll(RecordingExecutor)
    engine = engine_of(name, CONFIG, wrap=seen)
    sequences = []
    for i in range(4):
        sequences += engine.add(request_of(f"{i}", max_tokens=20, regex="a"))
        engine.step()
    while engine.has_work:
        engine.step()
    assert all(len(sequence.output) == 20 for sequence in sequences)
    decoding = [plan for plan in seen.executors[0].plans if all(r.start >= 3 for r in plan.rows)]
    num_rows = [len(plan.rows) for plan in decoding]
    assert sum(num_rows) >= 4 * 15 and num_rows.count(4) >= 15, num_rows
