"""Prompts that an encoder computes whole are never cut, under any policy, on random traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.core.config import EngineConfig
from jaxserve.core.request import EncoderPrompts, Request
from jaxserve.engine.engine import Engine
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import RecordingExecutor, Trace, WrapAll
from tests.common.tiers import seeds, some
from tests.scheduling.simulated import engine_of, request_of

POLICIES = ["auto", "concurrent_instances", "exegpt_rra", "exegpt_waa_c", "orca", "pensieve", "s3"]
POLICIES += ["fastertransformer", "vllm_like", "pensieve_device_only"]


def encoder_trace(seed: int, **options: bool) -> Trace:
    """Return a random trace whose prompts are an encoder's, some as long as a step takes."""
    trace = Trace(seed, **options)
    config = trace.config
    trace.config = config = replace(
        config,
        has_encoder=True,
        num_pages=max(config.num_pages, 4),
        max_context=max(config.max_context, 3 * config.page_size),
    )
    prompts = EncoderPrompts(start_token_id=0, page_size=config.page_size)
    trace.requests = [
        _encoded(request, prompts, config.max_prompt_tokens) for request in trace.requests
    ]
    return trace


def _encoded(request: Request, prompts: EncoderPrompts, longest: int) -> Request:
    prompt, num_encoded, num_padding = prompts.around(request.prompt[:longest])
    return replace(request, prompt=prompt, num_encoded=num_encoded, num_padding=num_padding)


@seeds(20, 10)
@pytest.mark.parametrize("policy", some(POLICIES))
def test_random_traces(seeds, policy):
    """Each request has the tokens that it has alone; the simulated model refuses cut prompts."""
    chosen = PRESETS[policy]
    num_preempted = num_hit = 0
    for seed in seeds:
        trace = encoder_trace(
            seed, with_faults=seed % 2 == 0, with_conversations=chosen.retention.keeps_pages
        )
        together = trace.check(chosen, cancel_rate=0.02 if seed % 3 else 0.0)
        num_preempted += sum(outcome.num_preemptions for outcome in together.values())
        num_hit += int(trace.counters["num_prefix_hit"])
    assert num_preempted or policy not in ("auto", "vllm_like", "s3")
    assert num_hit or not chosen.retention.keeps_pages


@pytest.mark.release
def test_random_traces_with_resizes():
    """Pools that shrink and grow change no answer, or end one that has no room, with an error."""
    for seed in range(20):
        trace = encoder_trace(seed, with_conversations=True)
        together = trace.run(PRESETS["auto"], resize_rate=0.05)
        for key, alone in trace.expected().items():
            got = together[key]
            assert got.finish_reason in ("error", "length") or got.agrees_with(alone), (
                f"seed {seed}: {key}"
            )
            assert alone.output[: len(got.output)] == got.output, f"seed {seed}: {key}"


def _engine(policy: str, config: EngineConfig) -> tuple[Engine, list[StepPlan]]:
    seen = WrapAll(RecordingExecutor)
    return engine_of(policy, config, wrap=seen), seen.executors[0].plans


def _request(name: str, length: int, num_outputs: int = 8, first: int = 1) -> Request:
    prompts = EncoderPrompts(start_token_id=0, page_size=_CONFIG.page_size)
    plain = request_of(name, tuple(range(first, first + length)), max_tokens=num_outputs)
    return _encoded(plain, prompts, length)


_CONFIG = EngineConfig(
    page_size=4, num_pages=100, max_slots=4, max_context=64, max_step_tokens=20, has_encoder=True
)


@pytest.mark.parametrize("policy", POLICIES)
def test_long_prompts_are_not_passed_for_ever(policy):
    """A prompt that fills a step is computed while short ones keep coming and answers run."""
    engine, plans = _engine(policy, _CONFIG)
    for i in range(3):
        engine.add(_request(f"running {i}", 4, num_outputs=40, first=20 * i))
    for _ in range(4):
        engine.step()
    (long,) = engine.add(_request("long", 20, first=100))
    for i in range(200):
        if not engine.has_work or long.output:
            break
        engine.add(_request(f"short {i}", 3, num_outputs=1, first=200 + 3 * i))
        engine.step()
    assert long.output, "the long prompt waits for ever"
    rows = [row for plan in plans for row in plan.rows if row.sequence_key == long.key]
    assert [row.num_tokens for row in rows if row.encodes] == [20]


def test_prompts_share_a_step_and_start_their_answers_in_it():
    """Prompts that fit together are encoded in one step, which gives each its first token."""
    engine, plans = _engine("vllm_like", _CONFIG)
    for i in range(2):
        engine.add(_request(str(i), 5, first=10 * i))
    engine.step()
    (plan,) = plans[:1]
    assert [(row.start, row.num_tokens, row.encodes, row.samples) for row in plan.rows] == [
        (0, 5, True, False),
        (8, 1, False, True),
        (0, 5, True, False),
        (8, 1, False, True),
    ]
    assert plan.num_encoded == 10 and plan.num_tokens == 12
    while engine.has_work:
        engine.step()


def test_the_longest_prompt_depends_on_the_step_and_the_pool():
    """A prompt fits in one step, and leaves a page for the start token and one more."""
    assert _CONFIG.max_prompt_tokens == 20
    large = replace(_CONFIG, max_step_tokens=64, token_buckets=())
    assert large.max_prompt_tokens == 60
    assert replace(large, num_pages=5).max_prompt_tokens == 12
