"""Compiled steps send sums of activations between shards, but not weights, pages or logits."""

from __future__ import annotations

import pytest
from flax import nnx

from benchmarks.sharding import Collective, collectives_of, play
from jaxserve import Runtime
from jaxserve.execution.staged import Pass
from jaxserve.models.families.llama import Llama, LlamaConfig
from jaxserve.sharding import StagePlan, make_mesh
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.testing import WrapAll

# All sizes differ, so that a shape identifies its array.
CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=24,
    max_position_embeddings=128,
)
ROWS, TOKENS, EMBED = 8, 64, 96
OPTIONS = dict(max_slots=ROWS, max_step_tokens=TOKENS, warmup=False, progress=False)


def _always(executable) -> list[Collective]:
    return [each for each in collectives_of(executable) if not each.in_branch]


def _sums(rows: int, count: int) -> list[Collective]:
    return [Collective("all-reduce", ((rows, EMBED),), rows * EMBED * 4, False)] * count


@pytest.mark.release
def test_a_step_sums_twice_a_layer_and_chooses_among_the_shards_best():
    """There is one more sum for the embedding. Greedy sampling sends a few numbers per row."""
    seen = WrapAll()
    model, mesh = Llama(CONFIG, rngs=nnx.Rngs(0)), make_mesh(tensor=4)
    with Runtime(model, mesh=mesh, wrap_executor=seen, **OPTIONS):
        mixed, decode = seen.executors[0].compiled_steps(Variant.GREEDY)
    assert _always(mixed) == _sums(TOKENS, 5)
    sums = _sums(ROWS, 5)
    choosing = [each for each in _always(decode) if each not in sums]
    assert [each for each in _always(decode) if each in sums] == sums
    # For 2048 logits: the best of each shard, and the block of 64 that contains it.
    assert sum(each.num_bytes for each in choosing) <= ROWS * 4 * (64 + 5 * 4)


@pytest.mark.release
def test_stages_sum_within_themselves_only():
    """No collective is compiled between stages: arrays are copied."""
    plan = StagePlan.of([1, 1], tensor=[4, 1])
    seen = WrapAll()
    with Runtime(Llama(CONFIG, rngs=nnx.Rngs(0)), mesh=plan, wrap_executor=seen, **OPTIONS):
        first, second = seen.executors[0].compiled_steps()
    assert _always(first[0]) == _sums(TOKENS, 3)
    assert _always(first[1]) == _sums(ROWS, 3)
    assert [_always(step) for step in second] == [[], [], []]


def test_a_full_pipeline_has_no_bubble_but_at_its_ends():
    """Four micro-batches keep four stages busy; with one, three of four stages are idle."""
    passes = [Pass(frozenset({slot}), 1, True) for _ in range(10) for slot in range(4)]
    fill = play(passes, [1.0] * 4)
    assert fill.total == fill.ideal == 43
    alone = play([Pass(frozenset({0}), 1, True)] * 10, [1.0] * 4)
    assert alone.total == 40 and alone.bubble == pytest.approx(0.75)
    uneven = play(passes, [1.0, 2.0, 1.0, 1.0])
    assert uneven.total == uneven.ideal == 83
