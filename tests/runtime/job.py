"""The program of a test job's processes: `python -m tests.runtime.job WHAT [GROUPS]`.

WHAT is "rounds", "forever", "differ", "lossy" (pages are lost between groups), "dies" (process 1
does, when pages are handed over) or "swaps" (pages go to the host and come back). GROUPS are the
processes that compute prompts and those that compute answers, such as 0/1,2.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import numpy as np
from flax import nnx

from jaxserve import JaxserveError, Runtime, SamplingParams
from jaxserve.execution.executor import StepHandle
from jaxserve.execution.pages import num_incoming
from jaxserve.models.families.llama import Llama, LlamaConfig
from jaxserve.models.loading import abstract_model
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import DeviceGroups, JoinError, join, make_mesh
from jaxserve.testing import (
    ExecutorWrapper,
    FaultyExecutor,
    FreeCopiesExecutor,
    RecordingExecutor,
    WrapAll,
)
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, random_prompts

OPTIONS = dict(max_slots=2, max_step_tokens=16, page_size=8, warmup=False, progress=False)
PROMPTS = random_prompts(8, longest=50)
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.8 * (i % 2), seed=i, logprobs=2)
    for i in range(len(PROMPTS))
]
WEIGHT_SEEDS = (0, 1)
# Pages on demand, so that a small pool preempts; several iterations of a decode step.
GROUP_OPTIONS = dict(
    policy=replace(
        PRESETS["exegpt_waa_c"],
        name="waa on demand",
        admission=OnDemand(0.0),
        iteration=WAA(encode_batch=4, decode_iterations=2),
    ),
    max_slots=4,
    kv_memory="16KiB",
)
# A pool that is too small for two answers, of so small pages that a step brings many at once.
SWAP_OPTIONS = dict(
    page_size=2,
    policy=replace(PRESETS["pensieve"], name="pensieve on demand", admission=OnDemand(0.0)),
    kv_memory="4KiB",
    host_memory="128KiB",
    restore="per_layer",
)
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=MAX_CONTEXT,
)


def params(seed: int) -> nnx.State:
    """Return weights from NumPy: drawing them on a device would compile in every process."""
    rng = np.random.default_rng(seed)
    _, state = abstract_model(CONFIG)
    return jax.tree.map(lambda x: jax.numpy.asarray(rng.normal(0, 0.4, x.shape), x.dtype), state)


def model() -> Llama:
    """Return a decoder with the first weights."""
    graphdef, _ = abstract_model(CONFIG)
    return nnx.merge(graphdef, params(WEIGHT_SEEDS[0]))


def rounds(rt: Runtime) -> None:
    """Print the tokens of a round of answers with each of several weights."""
    for seed in WEIGHT_SEEDS:
        rt.update_params(params(seed))
        if rt.is_leader:
            answers = rt.generate(PROMPTS, PARAMS)
            print(json.dumps([c.token_ids for c in answers]), flush=True)
            rt.dismiss_followers()
        else:
            rt.follow()


def planned(rt: Runtime) -> None:
    """Adopt a schedule from measured times."""
    rt.measure_group_times(rounds=1)
    rt.plan(math.inf, lengths=[(len(prompt), 10) for prompt in PROMPTS])
    answers = rt.generate(PROMPTS, PARAMS)
    print(json.dumps([c.token_ids for c in answers]), flush=True)


def counted(rt: Runtime) -> None:
    """Print what the groups have done, after a check of the pages."""
    rt.check_integrity()
    stats = rt.stats()
    counts = (stats.num_preemptions, stats.num_pages_handed_over, stats.num_handovers_lost)
    print(*counts, file=sys.stderr)


def swapped(rt: Runtime, plans: Sequence[StepPlan]) -> None:
    """Answer again with pages that the first answers left, and print what came from the host."""
    answers = rt.generate(PROMPTS, PARAMS)
    print(json.dumps([c.token_ids for c in answers]), flush=True)
    rt.check_integrity()
    stats = rt.stats()
    num_in_steps = sum(num_incoming(rt.config, plan) for plan in plans)
    print(stats.num_preemptions, stats.num_pages_in, stats.num_prefix_hit_on_host, num_in_steps)


def refused(rt: Runtime) -> None:
    """Print the error of a follower that is asked for an answer."""
    try:
        rt.generate(PROMPTS[0])
    except JaxserveError as error:
        print(type(error).__name__, error, file=sys.stderr)


def groups_of(text: str) -> DeviceGroups:
    """Return the groups of the devices of some processes and of others, such as 0/1,2."""
    groups = [[int(each) for each in part.split(",")] for part in text.split("/")]
    devices = [[d for d in jax.devices() if d.process_index in ids] for ids in groups]
    return DeviceGroups(*(make_mesh(tensor=len(each), devices=each) for each in devices))


@final
class Dying(ExecutorWrapper):
    """A process is killed when pages are handed over, before they are taken."""

    def __init__(self, inner: Any, process_id: int):
        super().__init__(inner)
        self._process_id = process_id

    def submit(self, plan: StepPlan) -> StepHandle:
        if plan.handovers:
            os.kill(self._process_id, signal.SIGKILL)
        return self.inner.submit(plan)


def main(what: str, groups: str | None = None) -> None:
    group = join()
    process_id = 0 if group is None else group.process_id
    options = OPTIONS | (dict(max_slots=2 + process_id) if what == "differ" else {})
    # A warm-up takes many times as long as the answers.
    options |= dict(strict=True, warmup=True) if what == "swaps" else {}
    mesh = make_mesh(tensor=jax.device_count())
    if groups is not None:
        mesh = groups_of(groups)
        options |= GROUP_OPTIONS
    watched = None
    if what == "swaps":
        # Copies have no measured costs, which could decide against them.
        watched = WrapAll(lambda inner: RecordingExecutor(FreeCopiesExecutor(inner)))
        options |= SWAP_OPTIONS | dict(wrap_executor=watched)
    if what == "lossy":
        options |= dict(wrap_executor=partial(FaultyExecutor, loses_every=3))
    if what == "dies" and group is not None:
        victim = group.all_gather(os.getpid())[1]
        options |= dict(wrap_executor=partial(Dying, process_id=victim))
    with Runtime(model(), mesh=mesh, **options) as rt:
        rounds(rt)
        if groups is not None and rt.is_leader:
            planned(rt)
            counted(rt)
        if watched is not None and rt.is_leader:
            swapped(rt, watched.executors[0].plans)
        if not rt.is_leader:
            refused(rt)
            rt.follow()
        while what == "forever":
            rt.generate(PROMPTS, PARAMS)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (JaxserveError, JoinError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
