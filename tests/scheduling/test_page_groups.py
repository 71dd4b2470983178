"""Layers in page groups: pages behind a window are freed, and every query sees its context.

The simulated model refuses a query whose context is not whole in the table of every layer.
"""

from __future__ import annotations

import random

import pytest

from jaxserve.core.page_layout import page_layout
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing import Trace
from tests.common.tiers import seeds, some

pytestmark = pytest.mark.fast

POLICIES = [
    *("auto", "vllm_like", "s3", "orca", "pensieve_device_only", "concurrent_instances"),
    *("exegpt_rra", "fastertransformer", "flover", "oracle", "pensieve", "s3_oracle"),
]


def random_windows(seed: int) -> tuple[int | None, ...]:
    """Return windows of 2 to 9 layers, at least two of them different."""
    rng = random.Random(f"{seed} windows")
    kinds = [None, *(rng.randint(1, 40) for _ in range(rng.choice([1, 1, 2])))]
    if len(kinds) == 3 and rng.random() < 0.3:
        kinds = [kind for kind in kinds if kind is not None]
    windows = [*kinds, *(rng.choice(kinds) for _ in range(rng.randint(0, 6)))]
    rng.shuffle(windows)
    return tuple(windows)


@pytest.mark.parametrize("policy", some(POLICIES, 0, 1, 2))
@seeds(200, 6)
def test_random_traces(policy, seeds):
    """Requests have the tokens that they have alone, in small pools, in any company."""
    num_preempted = num_hit = 0
    for seed in seeds:
        trace = Trace(
            seed,
            layer_windows=random_windows(seed),
            with_faults=seed % 2 == 0,
            with_conversations=seed % 3 > 0,
            falls_short=seed % 4 == 0,
            has_grammars=seed % 5 == 0,
        )
        together = trace.check(PRESETS[policy], cancel_rate=0.02 if seed % 3 else 0.0)
        num_preempted += sum(outcome.num_preemptions for outcome in together.values())
        num_hit += trace.counters["num_prefix_hit"]
    assert num_preempted or policy not in ("auto", "vllm_like", "s3")
    assert (num_hit > 0) == PRESETS[policy].retention.keeps_pages


@pytest.mark.parametrize("policy", some(POLICIES))
@seeds(100, 6)
def test_a_resized_pool(policy, seeds):
    """Pages move between plans; an answer is cut only if it no longer fits."""
    num_moved = 0
    for seed in seeds:
        trace = Trace(seed, layer_windows=random_windows(seed), with_conversations=True)
        together = trace.run(PRESETS[policy], resize_rate=0.1, update_rate=0.02)
        num_moved += trace.num_moved
        for key, wanted in trace.expected().items():
            got = together[key]
            assert got.output == wanted.output[: len(got.output)], f"seed {seed}, {key}"
            assert got.agrees_with(wanted) or got.finish_reason in ("length", "error")
    assert num_moved


def test_layers_of_gemma_3_are_in_two_groups():
    """Equal windows share tables, a page is padded by at most a twentieth of all layers."""
    layout = page_layout(tuple(None if (i + 1) % 6 == 0 else 512 for i in range(26)))
    assert [(group.window, group.num_tables) for group in layout.groups] == [(None, 2), (512, 11)]
    assert layout.num_buffers == 2 and len(set(layout.places)) == 26
    assert not page_layout((512, 512)).is_grouped and not page_layout(()).is_grouped
