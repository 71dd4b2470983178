"""The engine on a device: tokens do not depend on the batch, and nothing compiles."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.clock import WallClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CompilationAfterWarmupError, NumericalError, RuntimeClosedError
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.compilation import warm_up
from jaxserve.execution.device import DeviceExecutor
from jaxserve.models.batch import empty_cache
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.order import FCFS
from jaxserve.scheduling.plan import Admission, Row, StepPlan
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Stateless
from jaxserve.scheduling.sequence import Sequence
from jaxserve.steps.programs import Programs, largest_step_bytes
from jaxserve.steps.sampling.sampler import Variant
from jaxserve.steps.step_function import Placement
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.planning.step_times import plan

CONFIG = EngineConfig(
    page_size=8,
    num_pages=600,
    max_slots=64,
    max_context=MAX_CONTEXT,
    max_step_tokens=192,
    max_decode_iterations=4,
    token_buckets=(64, 192),
    slot_buckets=(1, 8, 64),
    head_buckets=(8, 64),
)


def _new_executor(model, config: EngineConfig = CONFIG) -> DeviceExecutor:
    graphdef, params = nnx.split(model)
    cache = empty_cache(model.config, config.num_pages, config.page_size, jnp.float32, "unrolled")
    device = jax.devices()[0]
    place = Placement.like(jax.sharding.SingleDeviceSharding(device))
    programs = Programs(graphdef, config, model.config, place)
    return DeviceExecutor(config, programs, params, jax.device_put(cache, device), strict=True)


@pytest.fixture(scope="module")
def executor():
    """A warm executor for all tests of this module; each test leaves every slot inert."""
    executor = _new_executor(tiny_llama())
    warm_up(executor, progress=False)
    yield executor
    executor.close()


@dataclass
class _SmallerPool:
    """The executor for a scheduler that is configured with fewer pages or slots."""

    executor: DeviceExecutor
    config: EngineConfig
    swap_costs: None = None
    host_memory: None = None
    host_states: None = None
    refinement: None = None

    def submit(self, plan: StepPlan):
        return self.executor.submit(plan)

    def close(self) -> None:
        raise AssertionError("the shared executor stays open")


def _request(number: int, prompt, params: SamplingParams, stop_token_ids=()) -> Request:
    return Request(
        id=f"{number}",
        prompt=tuple(prompt),
        params=params,
        arrival_s=float(number),
        stop_token_ids=tuple(stop_token_ids),
        seed=number,
    )


def _serve(executor, policy: Policy, requests, *, num_pages=None, arrive=None) -> list[Sequence]:
    """Return all sequences after their end; `arrive(i)` steps pass before request i comes."""
    if num_pages is not None:
        executor = _SmallerPool(executor, replace(CONFIG, num_pages=num_pages))
    engine = Engine(executor, policy, WallClock())
    sequences: list[Sequence] = []
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and (arrive is None or arrive()):
            sequences += engine.add(waiting.pop(0))
        engine.step()
        engine.scheduler.check_integrity()
    return sequences


GREEDY = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def requests():
    return [_request(i, p, GREEDY) for i, p in enumerate(random_prompts(64))]


@pytest.fixture(scope="module")
def alone(executor, requests):
    """Return the output tokens of each request served alone."""
    return [_serve(executor, PRESETS["orca"], [request])[0].output for request in requests]


def test_answers_are_lively(alone):
    """The tiny model's answers vary, so that equal tokens mean something."""
    assert len({token for output in alone for token in output}) > VOCAB_SIZE // 2
    assert len({tuple(output) for output in alone}) > 60


@pytest.mark.parametrize("size", some([33, 2, 7, 64]))
@pytest.mark.parametrize("preset", some(["vllm_like", "orca"]))
def test_same_tokens_in_a_batch_of_any_size(executor, requests, alone, preset, size):
    """A request's greedy tokens do not depend on the other requests of the batch."""
    sequences = _serve(executor, PRESETS[preset], requests[:size])
    assert [s.output for s in sequences] == alone[:size]


ONE_GROUP = sorted(name for name, policy in PRESETS.items() if policy.num_device_groups == 1)


@pytest.mark.parametrize(
    "preset", some(ONE_GROUP, *map(ONE_GROUP.index, ("auto", "pensieve", "s3")))
)
def test_same_tokens_under_every_preset(executor, requests, alone, preset):
    """Requests that come one after the other get the same greedy tokens from every policy."""
    rng = random.Random(preset)
    sequences = _serve(executor, PRESETS[preset], requests[:20], arrive=lambda: rng.random() < 0.5)
    assert [s.output for s in sequences] == alone[:20]


@pytest.mark.parametrize("chunk_tokens", some([5, 1, 16, 100]))
def test_same_tokens_with_chunked_prefill(executor, requests, alone, chunk_tokens):
    """Greedy tokens do not depend on the chunks of prompts, also beside other requests."""
    policy = Policy("chunks", OnDemand(), FCFS(), Unified(chunk_tokens), Stateless())
    rng = random.Random(chunk_tokens)
    sequences = _serve(executor, policy, requests[:24], arrive=lambda: rng.random() < 0.3)
    assert [s.output for s in sequences] == alone[:24]


@pytest.mark.parametrize("num_pages", [14, 40])
def test_same_tokens_after_preemption(executor, requests, alone, num_pages):
    """Sequences whose pages were freed continue at their position."""
    sequences = _serve(executor, PRESETS["vllm_like"], requests[:24], num_pages=num_pages)
    assert sum(s.num_preemptions for s in sequences) > 0
    assert [s.output for s in sequences] == alone[:24]


@dataclass
class _StopsEarly(_SmallerPool):
    """The executor with loops that end before the planned number of iterations."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def submit(self, plan: StepPlan):
        if plan.is_decode_loop:
            plan = replace(plan, num_iterations=self.rng.randint(0, plan.num_iterations))
        return self.executor.submit(plan)


@pytest.mark.parametrize("preset", some(["auto", "vllm_like", "orca", "s3", "fastertransformer"]))
def test_same_tokens_when_steps_deliver_less_than_planned(executor, requests, alone, preset):
    """The next step is submitted before the result is known; rows continue at their slots' ends."""
    rng = random.Random(preset)
    config = replace(CONFIG, num_pages=60)
    sequences = _serve(
        _StopsEarly(executor, config),
        PRESETS[preset],
        requests[:24],
        arrive=lambda: rng.random() < 0.3,
    )
    assert [s.output for s in sequences] == alone[:24]
    assert sum(s.falls_short for s in sequences) > 10


def test_a_row_beyond_its_slot_is_inert(executor, requests):
    """It writes only to the null page; one that samples ends at the newest existing token."""
    request = requests[0]
    prompt = np.asarray(request.prompt, np.int32)
    num = len(prompt)
    pages = tuple((0, index, 1 + index) for index in range(MAX_CONTEXT // CONFIG.page_size))
    admission = Admission(0, request, 0, prompt, MAX_CONTEXT)
    prefill = plan(
        admissions=(admission,), page_updates=pages, rows=(Row(0, 0, 0, num, max_new_tokens=1),)
    )
    first = executor.submit(prefill).collect().tokens[0, 0]
    before = jax.tree.map(np.array, executor.pages.cache)
    beyond = plan(rows=(Row(0, 0, num - 2, 8, max_new_tokens=0),))
    assert executor.submit(beyond).collect().num_tokens.tolist() == [0]
    for old, new in zip(*map(jax.tree.leaves, (before, executor.pages.cache)), strict=True):
        np.testing.assert_array_equal(old[:, 1:], np.asarray(new)[:, 1:])
    late = plan(rows=(Row(0, 0, num + 5, 1, max_new_tokens=1),))
    second = executor.submit(late).collect().tokens[0, 0]
    executor.submit(plan((), releases=(0,))).collect()
    (wanted,) = _serve(executor, PRESETS["orca"], [request])
    assert [first, second] == wanted.output[:2]


def test_sampled_tokens_depend_on_seed_and_position_only(executor):
    """Random answers, with all options, are the same alone and in a preempted batch."""
    rng = np.random.default_rng(5)
    requests = []
    for i, prompt in enumerate(random_prompts(20, seed=5)):
        params = SamplingParams(
            max_tokens=20,
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 3, 20])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.05])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.5])),
            min_tokens=int(rng.choice([0, 5])),
            logit_bias={3: 1.0} if i % 3 == 0 else None,
        )
        requests.append(_request(i, prompt, params, stop_token_ids=range(8)))
    alone = [_serve(executor, PRESETS["orca"], [request])[0] for request in requests]
    together = _serve(executor, PRESETS["vllm_like"], requests, num_pages=40)
    assert [s.output for s in together] == [s.output for s in alone]
    assert {s.finish_reason for s in together} == {"stop", "length"}
    for sequence in together:
        early = sequence.output[: sequence.request.params.min_tokens]
        assert not set(early) & set(range(8))


@pytest.mark.release
@pytest.mark.parametrize("preset", some(["vllm_like", "concurrent_instances", "fastertransformer"]))
def test_neighbours_with_other_needs_change_no_token(executor, requests, alone, preset):
    """Greedy, random, penalized and scored requests together have the tokens they have alone.

    Together they are decoded in wider windows, which contain slots of other steps.
    """
    kinds = [
        GREEDY,
        replace(GREEDY, temperature=0.8, top_p=0.9),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, temperature=1.0, logprobs=2),
    ]
    mixed = [replace(each, params=kinds[i % len(kinds)]) for i, each in enumerate(requests[:16])]
    wanted = [_serve(executor, PRESETS["orca"], [request])[0].output for request in mixed]
    assert wanted[::4] == alone[:16:4] and wanted[1::4] != alone[1:16:4]
    rng = random.Random(preset)
    sequences = _serve(executor, PRESETS[preset], mixed, arrive=lambda: rng.random() < 0.3)
    assert [s.output for s in sequences] == wanted
    assert [len(s.scores.output) for s in sequences] == [0, 0, 0, GREEDY.max_tokens] * 4


@pytest.mark.parametrize(
    ("params", "logprobs", "top"),
    [
        (dict(), False, False),
        (dict(temperature=1.0), False, False),
        (dict(frequency_penalty=1.0), False, False),
        (dict(logprobs=0), True, False),
        (dict(temperature=1.0, logprobs=1), True, True),
    ],
)
def test_only_log_probabilities_of_the_steps_own_rows_are_read(executor, params, logprobs, top):
    """A request in another slot that returns them does not add them to a step without it."""
    tokens = np.array([1, 2, 3], np.int32)
    admissions = tuple(
        Admission(slot, _request(slot, tokens.tolist(), each), 0, tokens, MAX_CONTEXT)
        for slot, each in enumerate([SamplingParams(**params), SamplingParams(logprobs=3)])
    )
    pages = tuple((slot, 0, 1 + slot) for slot in range(2))
    rows = (Row(0, 0, 0, 3, max_new_tokens=1), Row(1, 1, 0, 3, max_new_tokens=0))
    steps = [
        plan(rows, admissions=admissions, page_updates=pages),
        plan((Row(0, 0, 3, 1, max_new_tokens=2),), num_iterations=2, window_size=1),
    ]
    try:
        for result in [executor.submit(step).collect() for step in steps]:
            assert result.num_tokens[0] > 0
            assert (result.logprobs is not None) == logprobs
            assert (result.top_ids is not None) == (result.top_logprobs is not None) == top
    finally:
        executor.submit(plan((), releases=(0, 1), window_size=1)).collect()


def test_samples_of_one_prompt_differ_and_are_reproducible(executor):
    """Each of n samples has its own random stream, although prompt pages are shared."""
    prompt = random_prompts(1, seed=9, longest=60)[0] * 2
    params = SamplingParams(max_tokens=12, temperature=1.0, n=4)
    first = _serve(executor, PRESETS["vllm_like"], [_request(1, prompt[:60], params)])
    again = _serve(executor, PRESETS["orca"], [_request(1, prompt[:60], params)])
    assert len({tuple(s.output) for s in first}) == 4
    assert [s.output for s in first] == [s.output for s in again]


def test_stop_token_ends_a_decode_loop_early(executor, alone, requests):
    """The answer ends with its stop token, and later tokens of the device are dropped."""
    stop = alone[0][6]
    cut = alone[0].index(stop) + 1
    request = _request(0, requests[0].prompt, GREEDY, stop_token_ids=[stop])
    sequence = _serve(executor, PRESETS["vllm_like"], [request])[0]
    assert sequence.output == alone[0][:cut]
    assert sequence.finish_reason == "stop"


def test_logprobs_do_not_depend_on_chunks_or_batch(executor):
    """Output and prompt log-probabilities agree between a single run and a chunked batch."""
    params = SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2)
    requests = [_request(i, p, params) for i, p in enumerate(random_prompts(6, seed=2))]
    policy = Policy("chunks", OnDemand(), FCFS(), Unified(7), Stateless())
    for request, together in zip(requests, _serve(executor, policy, requests), strict=True):
        single = _serve(executor, PRESETS["orca"], [request])[0]
        assert len(single.scores.output) == 6
        assert sorted(single.scores.prompt) == list(range(1, len(request.prompt)))
        for a, b in zip(single.scores.output, together.scores.output, strict=True):
            assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, rel=1e-4)
            assert a.top[0][0] == a.token_id  # greedy
        for position, a in single.scores.prompt.items():
            b = together.scores.prompt[position]
            assert a.token_id == request.prompt[position] == b.token_id
            assert a.logprob == pytest.approx(b.logprob, rel=1e-4)
            assert [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.parametrize("preset", some(["vllm_like", "concurrent_instances"]))
def test_nothing_compiles_over_a_random_workload(executor, preset):
    """A random workload with arrivals, cancellations and all options compiles nothing.

    Costly options are rare, so that steps of every variant occur.
    """
    rng = random.Random(0)
    before = executor.num_compilations
    engine = Engine(executor, PRESETS[preset], WallClock())
    sequences: list[Sequence] = []
    for i, prompt in enumerate(random_prompts(80, seed=3)):
        params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([0.9, 1.0]),
            logprobs=rng.choice([None] * 9 + [2]),
            prompt_logprobs=rng.choice([None, 1]),
            repetition_penalty=rng.choice([1.0] * 9 + [1.2]),
        )
        sequences += engine.add(_request(i, prompt, params))
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.2:
            engine.scheduler.end(rng.choice(sequences), "cancelled")
    while engine.has_work:
        engine.step()
    assert executor.num_compilations == before
    assert engine.stats.num_decode_loops > 10


def test_strict_mode_raises_on_a_compilation():
    """An executable that the warm-up did not compile raises an error that names the step."""
    executor = _new_executor(tiny_llama(), replace(CONFIG, num_pages=20))
    executor.finish_warmup()
    engine = Engine(executor, PRESETS["orca"], WallClock())
    engine.add(_request(0, [1, 2], GREEDY))
    with pytest.raises(CompilationAfterWarmupError, match="step 0"):
        engine.step()
    executor.close()
    with pytest.raises(RuntimeClosedError):
        engine.step()


def test_not_finite_logits_fail_one_request_alone(executor, requests, alone):
    """A prompt with a poisoned embedding fails; its neighbours have the same tokens as alone."""
    model = tiny_llama()
    poisoned = VOCAB_SIZE - 1
    model.embedding[...] = model.embedding[...].at[poisoned].set(jnp.nan)
    graphdef, params = nnx.split(model)
    clean = executor.params
    executor.update_params(params)
    try:
        neighbours = [i for i in range(20) if poisoned not in requests[i].prompt + tuple(alone[i])]
        bad = _request(100, [1, 2, poisoned, 3], GREEDY)
        served = [*(requests[i] for i in neighbours), bad]
        *others, failed = _serve(executor, PRESETS["vllm_like"], served)
    finally:
        executor.update_params(clean)
    assert failed.finish_reason == "error" and isinstance(failed.error, NumericalError)
    assert len(neighbours) >= 5
    assert [s.output for s in others] == [alone[i] for i in neighbours]


@pytest.mark.parametrize("layout", some(["unrolled", "scanned"]))
def test_no_copy_of_the_cache_in_any_step(layout):
    """The whole cache is updated in place, and a larger pool needs no larger temporaries."""
    model = tiny_llama(layer_layout=layout)
    graphdef, params = nnx.split(model)
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    programs = Programs(graphdef, CONFIG, model.config, place)

    def needed(num_pages: int) -> tuple[int, int]:
        cache = jax.eval_shape(
            lambda: empty_cache(model.config, num_pages, CONFIG.page_size, jnp.float32, layout)
        )
        cache_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        steps = programs.compiled_steps(params, cache)
        for step in steps:
            assert step.memory_analysis().alias_size_in_bytes >= cache_bytes
        return cache_bytes, largest_step_bytes(steps)

    small_bytes, small_needs = needed(1000)
    large_bytes, large_needs = needed(20000)
    assert large_needs - small_needs < 0.01 * (large_bytes - small_bytes)


@pytest.mark.release
def test_the_costliest_variant_takes_the_most_memory():
    """The page pool is sized by this variant, so the others fit too."""
    model = tiny_llama()
    graphdef, params = nnx.split(model)
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    programs = Programs(graphdef, CONFIG, model.config, place)
    cache = jax.eval_shape(
        lambda: empty_cache(model.config, 100, CONFIG.page_size, jnp.float32, "unrolled")
    )
    needed = [
        largest_step_bytes(programs.compiled_steps(params, cache, variant)[1:])
        for variant in Variant
    ]
    assert needed == sorted(needed)
    assert largest_step_bytes(programs.compiled_steps(params, cache)[1:]) == needed[-1]


@pytest.mark.release
def test_a_pool_leaves_room_for_the_heads():
    """Sampling, checks of proposals and scores of prompts may need more than a step."""
    model = tiny_llama()
    graphdef, params = nnx.split(model)
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    config = replace(CONFIG, num_proposed=4)
    programs = Programs(graphdef, config, model.config, place)
    cache = jax.eval_shape(
        lambda: empty_cache(model.config, 100, config.page_size, jnp.float32, "unrolled")
    )
    steps, heads = programs.compiled_steps(params, cache), programs.compiled_heads(params, cache)
    assert len(heads) == 3 and all(largest_step_bytes([head]) > 0 for head in heads)
    assert programs.step_bytes(params, cache) == largest_step_bytes(steps)
    both = largest_step_bytes([*steps, *heads])
    assert programs.step_bytes(params, cache, has_heads=True) == both
