"""Prompts and answers on groups of real devices: the answers of one device, whatever happens."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.scheduling.admission.on_demand import OnDemand
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from sharding import DeviceGroups, Stage, StagePlan, make_groups

NUM_LAYERS = 3
# Pages on demand, so that a small pool preempts; several iterations of a decode step.
POLICY = replace(
    PRESETS["exegpt_waa_c"],
    name="waa on demand",
    admission=OnDemand(0.0),
    iteration=WAA(encode_batch=4, decode_iterations=2),
)
PROMPTS = random_prompts(12, longest=60)
PARAMS = [
    SamplingParams(
        max_tokens=1 + 5 * (i % 5),
        temperature=0.8 * (i % 2),
        seed=i,
        n=1 + (i % 4 == 3),
        logprobs=2 * (i % 3 == 0),
    )
    for i in range(len(PROMPTS))
]


def _model(**settings):
    return tiny_llama(num_layers=NUM_LAYERS, num_heads=8, **settings)


def _groups() -> dict[str, DeviceGroups]:
    devices = jax.devices()
    return {
        "a device each": make_groups(encode=1, decode=1),
        "copies of KV heads": make_groups(encode=2, decode=4),
        "fewer shards": make_groups(encode=4, decode=1),
        "stages of other layers": DeviceGroups(
            StagePlan.of([1, 2], devices=devices),
            StagePlan.of([2, 1], tensor=[4, 1], devices=devices[2:]),
        ),
    }


@pytest.fixture(scope="module")
def wanted():
    """Return the answers of one device under the default policy."""
    with Runtime(_model(), **OPTIONS) as rt:
        return _samples(rt.generate(PROMPTS, PARAMS))


def _samples(completions):
    return [[s.token_ids for s in completion.samples] for completion in completions]


def _memory(groups: DeviceGroups, num_pages: int) -> int:
    """Return the memory of this many pages on the device whose pages are the largest."""

    def per_layer(num_shards: int) -> int:
        return max(2 // num_shards, 1) * 8 * 8 * 4 * 2

    sizes = [
        len(stage.layers) * per_layer(stage.num_shards)
        for group in groups.both
        for stage in (
            group.stages if isinstance(group, StagePlan) else [Stage(group, range(NUM_LAYERS))]
        )
    ]
    return num_pages * max(sizes)


@pytest.mark.parametrize("groups", _groups().values(), ids=_groups().keys())
def test_groups_answer_alike(wanted, groups):
    """Greedy and sampled, one sample and two, in a pool that preempts, without a compilation."""
    memory = _memory(groups, 14)
    options = OPTIONS | dict(policy=POLICY, strict=True, kv_memory=memory)
    with Runtime(_model(), mesh=groups, **options) as rt:
        assert rt.config.num_pages == 14 and rt.stats().pool_bytes == memory
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.check_integrity()
        stats = rt.stats()
    assert stats.num_preemptions > 0 and stats.num_pages_handed_over > 0
