"""Layers in page groups: pages behind a window are freed, and every query sees its context.

The simulated model refuses a query whose context is not whole in the table of every layer.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.page_layout import page_layout
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.kv.transfer import KVPages
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import engine_of, request_of

pytestmark = pytest.mark.fast

POLICIES = [
    *("auto", "vllm_like", "s3", "orca", "pensieve_device_only", "concurrent_instances"),
    *("exegpt_rra", "fastertransformer", "flover", "mlfq", "oracle", "pensieve", "s3_oracle"),
]
# Cached pages go to the host, or preempted sequences do.
USE_HOST = ("auto", "pensieve", "s3", "mlfq")


def random_windows(seed: int) -> tuple[int | None, ...]:
    """Return windows of 2 to 9 layers, at least two of them different."""
    rng = random.Random(f"{seed} windows")
    kinds = [None, *(rng.randint(1, 40) for _ in range(rng.choice([1, 1, 2])))]
    if len(kinds) == 3 and rng.random() < 0.3:
        kinds = [kind for kind in kinds if kind is not None]
    windows = [*kinds, *(rng.choice(kinds) for _ in range(rng.randint(0, 6)))]
    rng.shuffle(windows)
    return tuple(windows)


@pytest.mark.parametrize("policy", some(POLICIES, 0, 1))
@seeds(200, 6)
def test_random_traces(policy, seeds):
    """Requests have the tokens that they have alone, in small pools, in any company."""
    num_preempted = num_hit = num_in = num_awaited = 0
    for seed in seeds:
        trace = Trace(
            seed,
            layer_windows=random_windows(seed),
            incoming_pages=(None, 1, 3)[seed % 3],
            with_faults=seed % 2 == 0,
            with_conversations=seed % 3 > 0,
            falls_short=seed % 4 == 0,
            has_grammars=seed % 5 == 0,
        )
        together = trace.check(PRESETS[policy], cancel_rate=0.02 if seed % 3 else 0.0)
        num_preempted += sum(outcome.num_preemptions for outcome in together.values())
        num_hit += trace.counters["num_prefix_hit"]
        num_in += trace.counters["num_pages_in"]
        num_awaited += trace.num_awaited
    assert num_preempted or policy not in ("auto", "vllm_like", "s3")
    assert (num_hit > 0) == PRESETS[policy].retention.keeps_pages
    assert (num_in > 0) == (policy in USE_HOST)
    assert num_awaited or len(seeds) < 200 or policy not in ("auto", "pensieve")


@pytest.mark.release
@pytest.mark.parametrize("policy", some(POLICIES))
@seeds(100, 6)
def test_a_resized_pool(policy, seeds):
    """Pages move between plans; an answer is cut only if it no longer fits."""
    num_moved = 0
    for seed in seeds:
        trace = Trace(seed, layer_windows=random_windows(seed), with_conversations=True)
        together = trace.run(
            PRESETS[policy], resize_rate=0.1, update_rate=0.02, recompute_rate=0.02 * (seed % 2)
        )
        num_moved += trace.num_moved
        for key, wanted in trace.expected().items():
            got = together[key]
            assert got.output == wanted.output[: len(got.output)], f"seed {seed}, {key}"
            assert got.agrees_with(wanted) or got.finish_reason in ("length", "error")
    assert num_moved or len(seeds) < 100


@pytest.mark.parametrize("policy", some(POLICIES[:4]))
@seeds(100, 2)
def test_proposals(policy, seeds):
    """Loops deliver tokens that were proposed, and take back others."""
    num_accepted = 0
    for seed in seeds:
        trace = Trace(
            seed,
            layer_windows=random_windows(seed),
            with_conversations=seed % 3 > 0,
            falls_short=seed % 2 == 0,
            speculates=True,
        )
        trace.check(PRESETS[policy], cancel_rate=0.02)
        num_accepted += trace.counters["num_accepted_tokens"]
    assert num_accepted


CONFIG = EngineConfig(
    page_size=4,
    num_pages=200,
    max_slots=4,
    max_context=64,
    max_step_tokens=8,
    max_decode_iterations=4,
    num_host_pages=100,
    layer_windows=(None, 6, 6, 13, 13),
)
PROMPT = tuple(range(1, 31))  # seven full pages, and two tokens


def _answer(engine: Engine, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    [sequence] = engine.add(request_of(str(num_tokens), prompt, max_tokens=num_tokens))
    while sequence.finish_reason is None:
        engine.step()
    engine.scheduler.check_integrity()
    return list(sequence.output)


def test_an_engine_goes_on_from_the_pages_of_another():
    """Only the pages that the next token sees are sent; also in parts, and a part is of no use."""
    alone, prefill, decode, other = (engine_of("auto", CONFIG) for _ in range(4))
    wanted = _answer(alone, PROMPT, 10)
    _answer(prefill, PROMPT, 1)
    kv = prefill.export_kv(PROMPT)
    assert [len(page) // 32 for page in kv.pages] == [1, 1, 1, 1, 3, 5, 5]  # tables with the page
    assert prefill.residency(PROMPT) == ["device"] * 7
    assert decode.import_kv(PROMPT, kv) == 7 and decode.residency(PROMPT) == ["host"] * 7
    assert _answer(decode, PROMPT, 10) == wanted
    assert decode.stats.num_prefix_hit_on_host == 28
    assert other.import_kv(PROMPT, KVPages(kv.identity, kv.pages[:5])) == 5
    assert _answer(other, PROMPT, 10) == wanted and other.stats.num_prefix_hit == 0
    small = engine_of("auto", replace(CONFIG, num_host_pages=16))
    assert small.import_kv(PROMPT, kv) == 6
    assert _answer(small, PROMPT, 10) == wanted


def test_an_index_is_evicted_from_all_tables():
    """The next request computes it again, and counts its tokens as evicted."""
    engine = engine_of("auto", CONFIG)
    wanted = _answer(engine, PROMPT, 10)
    engine.evict(PROMPT, [6])
    assert engine.residency(PROMPT) == ["device"] * 6 + ["nowhere"]
    assert _answer(engine, PROMPT, 10) == wanted
    assert engine.stats.num_evicted_tokens == 4


def test_layers_of_gemma_3_are_in_two_groups():
    """Equal windows share tables, a page is padded by at most a twentieth of all layers."""
    layout = page_layout(tuple(None if (i + 1) % 6 == 0 else 512 for i in range(26)))
    assert [(group.window, group.num_tables) for group in layout.groups] == [(None, 2), (512, 11)]
    assert layout.num_buffers == 2 and len(set(layout.places)) == 26
    assert not page_layout((512, 512)).is_grouped and not page_layout(()).is_grouped
