"""Random conversations on a tiny model have the greedy tokens of new runs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.execution.compilation import warm_up
from jaxserve.execution.device import DeviceExecutor
from jaxserve.execution.pages import num_incoming
from jaxserve.memory.eviction import LRU
from jaxserve.models.batch import empty_cache
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.presets import PRESETS
from jaxserve.scheduling.retention import Tiered
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.steps.programs import Programs
from jaxserve.steps.step_function import Placement
from jaxserve.testing.tiny import MAX_CONTEXT, VOCAB_SIZE, tiny_llama
from tests.common.tiers import some

CONFIG = EngineConfig(
    page_size=4,
    num_pages=200,
    max_slots=8,
    max_context=MAX_CONTEXT,
    max_step_tokens=64,
    max_decode_iterations=4,
    token_buckets=(64,),
    slot_buckets=(1, 8),
    head_buckets=(8,),
    num_host_pages=60,
)
POLICIES = {
    "pensieve": (PRESETS["pensieve"], 60),
    "lru": (replace(PRESETS["auto"], name="lru", retention=Tiered(LRU(), free_share=0.6)), 60),
    "little host": (PRESETS["pensieve"], 15),
    "device_only": (PRESETS["pensieve_device_only"], 0),
    "s3": (replace(PRESETS["s3"], retention=Tiered()), 60),
}
NUM_CONVERSATIONS = 40
STEP_S = 0.01


@pytest.fixture(
    scope="module",
    params=some(
        [
            ("cpu", None, "unrolled", "prefetch"),
            ("xla", None, "scanned", "per_layer"),
            ("cpu", "int8", "unrolled", "per_layer"),
            ("cpu", "float8_e4m3fn", "unrolled", "both"),
        ],
        are_tuples=True,
    ),
    ids=lambda param: "-".join(filter(None, param)),
)
def executor(request):
    """A warm executor; every test leaves all slots inert."""
    attention, kv_dtype, layer_layout, restore = request.param
    config = replace(CONFIG, attention=attention, kv_dtype=kv_dtype, restore=restore)
    model = tiny_llama(layer_layout=layer_layout)
    graphdef, params = nnx.split(model)
    dtype = kv_dtype or "float32"
    cache = empty_cache(model.config, config.num_pages, config.page_size, dtype, layer_layout)
    device = jax.devices()[0]
    place = Placement.like(jax.sharding.SingleDeviceSharding(device))
    programs = Programs(graphdef, config, model.config, place)
    executor = DeviceExecutor(config, programs, params, jax.device_put(cache, device), strict=True)
    warm_up(executor, progress=False)
    yield executor
    executor.close()


@jax.jit
def _page(cache, page: int) -> list[jax.Array]:
    """Return the contents of one page, over all layers."""
    return [leaf[:, page] for leaf in jax.tree.leaves(cache)]


class Watched:
    """The executor for a scheduler with fewer pages; it compares the pages that are restored."""

    def __init__(self, executor: DeviceExecutor, config: EngineConfig):
        self.config, self.swap_costs, self.refinement = config, None, None
        self.host_memory, self.host_states = executor.host_memory, executor.host_states
        self.counts = Counter()
        self._executor = executor
        self._on_host: dict[int, list[np.ndarray]] = {}

    def submit(self, plan: StepPlan):
        """Store the pages that go to the host; restored pages must have the same bytes."""
        for page, host_page in plan.swaps_out:
            self._on_host[host_page] = self._contents(page)
        handle = self._executor.submit(plan)
        for host_page, page in plan.swaps_in:
            for left, came in zip(self._on_host[host_page], self._contents(page), strict=True):
                assert left.tobytes() == came.tobytes()
        self.counts["restored"] += len(plan.swaps_in)
        self.counts["in steps"] += num_incoming(self._executor.config, plan)
        rows = Counter(row.slot for row in plan.rows)
        self.counts["several rows"] += max(rows.values()) > 1
        return handle

    def _contents(self, page: int) -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in _page(self._executor.pages.cache, page)]


def _request(name: str, prompt: tuple[int, ...], length: int) -> Request:
    params = SamplingParams(max_tokens=length)
    return Request(id=name, prompt=prompt, params=params, arrival_s=0.0)


def _fresh(executor: DeviceExecutor, requests: list[Request]) -> list[list[int]]:
    """Return the outputs of a policy that computes every prompt and keeps no page."""
    engine = Engine(executor, PRESETS["orca"], VirtualClock())
    sequences = [sequence for request in requests for sequence in engine.add(request)]
    while engine.has_work:
        engine.step()
    assert engine.stats.num_prefix_hit == 0
    return [sequence.output for sequence in sequences]


def _converse(executor: DeviceExecutor, policy: Policy, num_host: int) -> tuple[list, Counter]:
    """Continue conversations at random; return (request, output) of every turn."""
    rng = random.Random(policy.name)
    config = replace(executor.config, num_pages=70, num_host_pages=num_host)
    watched = Watched(executor, config)
    # Pages are valued by their age; steps of one duration make every run the same.
    clock = VirtualClock()
    engine = Engine(watched, policy, clock)
    first = [tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(8, 30))) for _ in "abc"]
    histories = [rng.choice(first)[: rng.randint(0, 30)] for _ in range(NUM_CONVERSATIONS)]
    talking: dict[int, Sequence] = {}
    turns: list[Sequence] = []
    for number in range(5 * NUM_CONVERSATIONS):
        who = rng.randrange(NUM_CONVERSATIONS)
        more = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))
        prompt = histories[who] + more
        if who not in talking and len(prompt) + 12 < MAX_CONTEXT:
            request = _request(f"{who} {number}", prompt, rng.randint(1, 12))
            (talking[who],) = engine.add(request)
            turns.append(talking[who])
        for _ in range(rng.randint(0, 4)):
            engine.step()
            clock.advance_to(clock.now() + STEP_S)
            engine.scheduler.check_integrity()
            if rng.random() < 0.1:
                _evict_some(engine, rng.choice(histories), rng)
        if talking and rng.random() < 0.03:
            engine.scheduler.end(rng.choice(list(talking.values())), "cancelled")
        for who in [who for who, s in talking.items() if s.phase is Phase.FINISHED]:
            histories[who] = talking.pop(who).known_tokens
    while engine.has_work:
        engine.step()
    assert engine.scheduler.page_usage().num_owned == 0
    stats = engine.stats
    counts = Counter(found=stats.num_prefix_hit, on_host=stats.num_prefix_hit_on_host)
    counts.update(lost=stats.num_evicted_tokens)
    counts.update(preempted=stats.num_preemptions, prefetched=stats.num_pages_prefetched)
    return [(s.request, s.output, s.finish_reason) for s in turns], counts + watched.counts


def _evict_some(engine: Engine, history: tuple[int, ...], rng: random.Random) -> None:
    """Evict random pages of a context, as if they had low values."""
    num_pages = len(history) // CONFIG.page_size
    engine.evict(history, rng.sample(range(num_pages), num_pages // 2))


@pytest.mark.release
@pytest.mark.parametrize("name", some(POLICIES))
def test_conversations_have_the_tokens_of_fresh_runs(executor, name):
    """Tokens are equal under eviction, swaps, drops, cancellations and preemption."""
    policy, num_host = POLICIES[name]
    turns, counts = _converse(executor, policy, num_host)
    fresh = _fresh(executor, [request for request, _, _ in turns])
    for (request, output, reason), whole in zip(turns, fresh, strict=True):
        assert output == (whole[: len(output)] if reason == "cancelled" else whole), request.id
    assert len(turns) > 40 and counts["found"] > 500 and counts["lost"] > 50, counts
    assert counts["several rows"] > 2, counts
    assert (counts["restored"] > 10) == (num_host > 0), counts
    config = executor.config
    assert (counts["prefetched"] > 0) == (config.prefetches and num_host > 0), counts
    if num_host == 60:  # others bring less at once than a copy before the step does
        assert (counts["in steps"] > 0) == (config.num_incoming_pages > 0), counts


@pytest.mark.release
def test_measuring_copies_leaves_the_pages_of_others_alone(executor):
    """A resized pool is warmed up while sequences have pages on the host."""
    host = executor.host_memory
    page = np.random.default_rng(0).bytes(host.entry_bytes)
    for host_page in (0, CONFIG.num_host_pages - 1):
        host.write(host_page, page)
    for name, step in executor.warmup_steps():
        if name == "page swaps":
            step()
    for host_page in (0, CONFIG.num_host_pages - 1):
        assert host.read(host_page) == page
