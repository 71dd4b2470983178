"""Steps that attend through plans have the same tokens, and plans cover the actual rows."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.scheduling.plan import Row
from jaxserve.steps.attention_planner import AttentionPlanner
from jaxserve.steps.packing import pack_rows
from jaxserve.steps.programs import Programs
from jaxserve.steps.step_function import Placement
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama


@pytest.mark.release
def test_planned_steps_give_the_same_tokens():
    """This holds in mixed steps and decode loops with preemptions, with kernels that use plans."""
    # Few sizes, since an interpreted kernel takes seconds to compile.
    options = {"max_slots": 2, "max_step_tokens": 16, "page_size": 8, "progress": False}
    prompts, params = random_prompts(5, longest=40), SamplingParams(max_tokens=12)
    model = tiny_llama(layer_layout="scanned")
    with Runtime(model, warmup=False, **options) as rt:
        wanted = [c.token_ids for c in rt.generate(prompts, params)]
    with Runtime(
        model, attention="triton_interpreted", kv_memory=18_000, strict=True, **options
    ) as rt:
        got = [c.token_ids for c in rt.generate(prompts, params)]
        assert rt.stats().num_preemptions > 0
    assert got == wanted


def test_plans_are_of_the_rows_of_the_step():
    """A mixed step's plan has its rows; a decode loop's plan has those of its last iteration."""
    config = EngineConfig(
        num_pages=999,
        max_slots=4,
        max_context=4096,
        max_step_tokens=512,
        attention="triton_interpreted",
    )
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    planner = AttentionPlanner.of(config, tiny_llama().config, place)
    assert planner is not None
    rows = [_row(slot=3, start=1530, num_tokens=1), _row(slot=1, start=0, num_tokens=300)]
    batch, _ = pack_rows(config, rows)
    mixed = planner.mixed(batch)
    assert set(mixed.splits[: mixed.counts[1], 0]) == {0}
    assert mixed.tiles[: mixed.counts[0], [0, 2]].tolist() == [[1, 12]] + [[1, 32]] * 9
    decode = planner.decode(rows[:1], range(2, 4), num_iterations=8)
    chunks = decode.splits[: decode.counts[1]]
    assert set(chunks[:, 0]) == {1} and chunks[:, 4].max() == -(-(1530 + 8) // 512)
    none = planner.decode((), range(2))
    assert not np.any(none.counts) and none.splits.shape == decode.splits.shape


@pytest.mark.parametrize("num_proposed", [0, 1, 8])
def test_loops_are_planned_for_the_longest_contexts(num_proposed: int):
    """Iterations without proposals come after others whose proposals were all right, too."""
    config = EngineConfig(
        num_pages=999,
        max_slots=2,
        max_context=4096,
        max_step_tokens=64,
        max_decode_iterations=16,
        num_proposed=num_proposed,
        attention="triton_interpreted",
    )
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    model = tiny_llama()
    programs = Programs(nnx.split(model)[0], config, model.config, place)
    for start in (490, 500, 511, 4000, 4090):
        row = _row(slot=0, start=start, num_tokens=1)
        plans = programs.plan_loop([row], range(1), 16, num_proposed)
        assert len(plans) == 1 + (num_proposed > 0)
        longest = min(start + 16 * (1 + num_proposed), config.max_context)
        assert plans[0] is not None  # of the iterations whose splits are planned
        planned = plans[0].splits[: plans[0].counts[1], 4].max() * 512
        assert planned >= longest


def test_windows_reach_back_to_the_shortest_context():
    """With splits of 512 keys, a loop at 605 needs keys of the first split, one at 612 does not."""
    config = EngineConfig(
        num_pages=999,
        max_slots=2,
        max_context=4096,
        max_step_tokens=64,
        max_decode_iterations=8,
        attention="triton_interpreted",
    )
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    model_config = replace(tiny_llama().config, sliding_windows=(100, 100))
    planner = AttentionPlanner.of(config, model_config, place)
    assert planner is not None
    decode = planner.decode([_row(slot=0, start=605, num_tokens=1)], range(1), num_iterations=8)
    assert decode.splits[: decode.counts[1], 3].min() == 0
    # A row that is planned at 612 may be at 605 if the previous step delivers nothing.
    batch, _ = pack_rows(config, [_row(slot=0, start=612, num_tokens=1)])
    mixed = planner.mixed(batch)
    assert mixed.splits[: mixed.counts[1], 3].min() == 0


def test_an_implementation_that_cannot_serve_is_refused():
    """An implementation requested by name is not replaced; an unknown name raises with the list."""
    with pytest.raises(InvalidConfigError, match="'triton' cannot serve: .* GPUs, not for cpu"):
        Runtime(tiny_llama(), attention="triton", **OPTIONS)
    with pytest.raises(InvalidConfigError, match="unknown; pass one of"):
        Runtime(tiny_llama(), attention="flash", **OPTIONS)


def _row(*, slot: int, start: int, num_tokens: int) -> Row:
    return Row(slot=slot, sequence_key=0, start=start, num_tokens=num_tokens, max_new_tokens=1)
