"""Speculation changes how many tokens an iteration gives, and no token."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve import Completion, Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.models.families.llama import Llama
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import DeviceGroups, StagePlan, make_groups, make_mesh
from jaxserve.testing import OPTIONS, RecordingExecutor, WrapAll, tiny_llama
from tests.common.tiers import some

WARM = OPTIONS | {"strict": True, "warmup": True}
QUOTED = [7, 3, 9, 4, 11, 6, 2, 8]


def _prompts() -> list[list[int]]:
    """Return prompts that repeat themselves, some of them all the time."""
    rng = random.Random(0)
    return [[rng.randrange(90)] * rng.randint(1, 4) + QUOTED * rng.randint(1, 4) for _ in range(10)]


def _params(rng: random.Random) -> SamplingParams:
    """Return parameters of any kind, among them some that favour tokens that were there before."""
    kind = rng.randrange(5)
    bias = {token: 30.0 for token in QUOTED[:2]}
    common: dict[str, Any] = dict(max_tokens=rng.randint(1, 60), seed=rng.randrange(100))
    return [
        SamplingParams(**common),
        SamplingParams(**common, temperature=0.8, logit_bias=bias),
        SamplingParams(**common, logit_bias=bias),
        SamplingParams(**common, temperature=1.0, repetition_penalty=1.3, logprobs=2),
        SamplingParams(**common, logit_bias=bias, frequency_penalty=0.4, logprobs=1, n=1),
    ][kind]


def _asked(seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, and parameters of a random kind for each."""
    rng = random.Random(seed)
    prompts = _prompts()
    return prompts, [_params(rng) for _ in prompts]


@pytest.fixture(scope="module")
def plain() -> Any:
    with Runtime(tiny_llama(), **OPTIONS, deterministic=True) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def wanted(plain) -> Callable[[int], list[Any]]:
    """A function that returns the answers to `_asked(seed)` without speculation."""
    return cache(lambda seed: plain.generate(*_asked(seed)))


@pytest.fixture(scope="module")
def speculating() -> Any:
    with Runtime(tiny_llama(), **OPTIONS, deterministic=True, speculation="lookup") as runtime:
        yield runtime


def _check_same(given: Any, wanted: Any, *, has_same_bits: bool = True) -> None:
    """Check tokens, ends and log-probabilities.

    Args:
      has_same_bits: whether log-probabilities are the same to the bit; else to their rounding.
    """
    for one, other in zip(wanted, given, strict=True):
        assert other.token_ids == one.token_ids
        assert other.finish_reason == one.finish_reason
        if has_same_bits:
            assert other.logprobs == one.logprobs
        elif one.logprobs is not None:
            np.testing.assert_allclose(
                [each.logprob for each in other.logprobs],
                [each.logprob for each in one.logprobs],
                rtol=1e-4,
                atol=1e-5,
            )


def test_tokens_and_logprobs_are_those_without_speculation(plain, wanted, speculating):
    """Greedy and drawn, with penalties and log-probabilities."""
    for seed in range(12):
        # Loops speculate as long as it pays by measured times, which vary with the machine's load.
        if seed >= 4 and speculating.stats().num_accepted_tokens > 20:
            break
        _check_same(speculating.generate(*_asked(seed)), wanted(seed))
    stats = speculating.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert plain.stats().num_draft_tokens == 0


def _check_distribution(speculating: Runtime, at_once: int = 400) -> None:
    """Draw four tokens of two; the sixteen answers have the probabilities that `score` gives."""
    prompt, num = [3, 5] * 6, 400
    params = SamplingParams(temperature=1.0, max_tokens=4, logit_bias={3: 100.0, 5: 100.0})
    before = speculating.stats().num_accepted_tokens
    done: list[Completion] = []
    # Loops speculate as long as it pays by measured times, which vary with the machine's load.
    while len(done) < 5 * num and speculating.stats().num_accepted_tokens == before:
        for first in range(len(done), len(done) + num, at_once):
            each = [replace(params, seed=i) for i in range(first, first + at_once)]
            done += speculating.generate([prompt] * at_once, each)
    assert speculating.stats().num_accepted_tokens > before
    num = len(done)
    counts = Counter(tuple(each.token_ids) for each in done)
    answers = list(itertools.product((3, 5), repeat=4))
    scores = speculating.score([[*prompt, *answer] for answer in answers], params)
    expected = num * np.exp([score[-4:].sum() for score in scores])
    assert sum(expected) == pytest.approx(num, rel=1e-3)
    found = np.array([counts[answer] for answer in answers])
    # The 99.9th percentile of chi-square with fifteen degrees of freedom.
    assert ((found - expected) ** 2 / expected).sum() < 37.7


@pytest.mark.release
def test_drawn_answers_have_the_distribution_of_the_model(speculating):
    _check_distribution(speculating)


@pytest.mark.release
def test_drawn_answers_with_a_draft_model_have_the_distribution_of_the_model():
    draft: dict[str, Any] = {"speculation": "draft", "draft_model": tiny_llama(7, num_layers=1)}
    with Runtime(tiny_llama(), **OPTIONS | draft) as runtime:
        # Every answer has a slot, so that no prompt cuts the loops of answers short.
        _check_distribution(runtime, at_once=OPTIONS["max_slots"])


@pytest.mark.release
def test_a_stop_string_and_an_end_token_end_an_answer_in_the_middle_of_what_was_proposed(plain):
    prompt, params = QUOTED * 3, SamplingParams(max_tokens=50, logit_bias={5: 100.0})
    first = plain.generate(prompt, params).token_ids
    with Runtime(tiny_llama(), **OPTIONS, speculation="lookup") as runtime:
        runtime.generate(prompt, params)  # after which it knows that speculating pays
        for length in range(1, 12):
            limited = SamplingParams(max_tokens=length, logit_bias={5: 100.0})
            assert runtime.generate(prompt, limited).token_ids == first[:length]
        ends = SamplingParams(max_tokens=50, logit_bias={5: 100.0}, stop_token_ids=(5,))
        assert runtime.generate(prompt, ends).finish_reason == "stop"


@pytest.mark.release
def test_tensor_parallel_runtimes_speculate_too(plain):
    prompts = _prompts()[:4]
    params = SamplingParams(max_tokens=40, logit_bias={token: 30.0 for token in QUOTED[:2]})
    model = tiny_llama()
    with Runtime(model, mesh=make_mesh(tensor=2), **OPTIONS, speculation="lookup") as runtime:
        given = runtime.generate(prompts, params)
        assert runtime.stats().num_accepted_tokens > 0
    wanted = plain.generate(prompts, params)
    assert [each.token_ids for each in given] == [each.token_ids for each in wanted]


WAA_ON_DEMAND = replace(PRESETS["exegpt_waa_c"], admission=OnDemand())
# Each with a pool of about 18 pages, of a half of the layers on a stage.
PLACES: dict[str, Callable[[], dict[str, Any]]] = {
    "stages": lambda: {"mesh": StagePlan.of([1, 1]), "policy": "vllm_like", "kv_memory": "18KiB"},
    "stages and micro-batches": lambda: {
        "mesh": StagePlan.of([1, 1], tensor=[1, 2], micro_batches=2),
        "policy": "vllm_like",
        "kv_memory": "18KiB",
    },
    "groups": lambda: {"mesh": make_groups(), "policy": WAA_ON_DEMAND, "kv_memory": "36KiB"},
    "groups of stages": lambda: {
        "mesh": DeviceGroups(StagePlan.of([1, 1]), StagePlan.of([1, 1], devices=jax.devices()[2:])),
        "policy": WAA_ON_DEMAND,
        "kv_memory": "18KiB",
    },
}


@pytest.mark.release
@pytest.mark.parametrize("where", some(PLACES))
def test_stages_and_device_groups_speculate_too(wanted, where):
    """Any parameters, several rounds, and a pool that preempts; a warm-up compiles everything.

    No bit changes, except under tensor parallelism, which promises none.
    """
    options = WARM if where in ("stages and micro-batches", "groups of stages") else OPTIONS
    has_same_bits = where != "stages and micro-batches"
    options = options | {"speculation": "lookup", "deterministic": has_same_bits}
    options |= PLACES[where]()
    with Runtime(tiny_llama(), **options) as runtime:
        for seed in range(3):
            given = runtime.generate(*_asked(seed))
            _check_same(given, wanted(seed), has_same_bits=has_same_bits)
            if not seed:  # answers before are proposed no more
                runtime.forget_kept_pages()
        stats = runtime.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.num_accepted_by_place)
    assert stats.num_preemptions > 0


@pytest.mark.release
def test_the_decode_group_alone_speculates_also_after_devices_have_moved(wanted):
    seen, where = WrapAll(), {"mesh": make_groups(encode=2, decode=1), "policy": "exegpt_waa_c"}
    # Few slots, since a move prepares the steps of every number of them.
    options = {**OPTIONS, "max_slots": 2, **where, "wrap_executor": seen, "speculation": "lookup"}
    with Runtime(tiny_llama(), **options) as runtime:
        for seed in range(2):
            num_before = runtime.stats().num_accepted_tokens
            for _ in range(5):  # whether loops speculate depends on measured times
                given = runtime.generate(*_asked(seed))
                # Two devices share the prompts.
                _check_same(given, wanted(seed), has_same_bits=False)
                if runtime.stats().num_accepted_tokens > num_before:
                    break
            assert runtime.stats().num_accepted_tokens > num_before
            groups = seen.executors[0].groups
            assert [group.config.num_proposed for group in groups] == [0, 8]
            if not seed:
                runtime.regroup(encode=1, decode=2, max_pause_s=60)


@pytest.mark.release
def test_every_stage_knows_what_the_last_one_chose():
    """After loops that speculate, the slots of all stages have the same tokens and ends.

    Tokens on their way to a slot that is released are dropped, so that it may lack its last ones.
    """
    seen, plan = WrapAll(RecordingExecutor), StagePlan.of([1, 1], micro_batches=2)
    options = {**OPTIONS, "mesh": plan, "wrap_executor": seen, "speculation": "lookup"}
    with Runtime(tiny_llama(), **options) as runtime:
        runtime.generate(*_asked(5))
        assert runtime.stats().num_accepted_tokens > 0
        runtime.pause("finish")  # steps behind the last answer may be in flight
        first, last = seen.executors[0].stages
        first.catch_up()
        slots, others = last.slots.state, first.slots.state
        held = set[int]()
        for each in seen.executors[0].plans:
            held -= {*each.releases, *(origin for origin, _ in each.moves)}
            held |= {*(a.slot for a in each.admissions), *(to for _, to in each.moves)}
        assert held
        for slot in held:
            length = int(slots.length[slot])
            assert int(others.length[slot]) == length
            assert bool(others.done[slot]) == bool(slots.done[slot])
            np.testing.assert_array_equal(others.tokens[slot, :length], slots.tokens[slot, :length])
        assert others.lookup is None and slots.lookup is not None


@pytest.mark.release
@pytest.mark.parametrize("layout", some(["unrolled", "scanned"]))
@pytest.mark.parametrize(("seed", "is_alike"), some([(0, True), (7, False)]))
def test_a_draft_model_changes_no_token_and_no_bit(wanted, layout, seed, is_alike):
    """Greedy and drawn, with penalties; the model itself as a draft model is always right.

    Nothing compiles after a warm-up, which is for the draft model of one layer.
    """
    draft = tiny_llama(seed, num_layers=2 if is_alike else 1, layer_layout=layout)
    options: dict[str, Any] = {
        **(OPTIONS if is_alike else WARM),
        "deterministic": True,
        "speculation": "draft",
        "draft_model": draft,
    }
    with Runtime(tiny_llama(), **options) as runtime:
        for i in range(4):
            _check_same(runtime.generate(*_asked(i)), wanted(i))
        stats = runtime.stats()
    assert stats.num_draft_tokens > 0
    if is_alike and layout == "unrolled":  # scanned layers draw other weights
        assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens


@pytest.mark.release
def test_a_draft_model_knows_pages_that_came_back():
    """Prefixes that are found on the host have the draft model's keys and values too."""
    options: dict[str, Any] = {
        **OPTIONS,
        "policy": "pensieve",
        "kv_memory": "96KiB",
        "host_memory": "1MiB",
    }
    prompts = [[i, *QUOTED * 4, i] for i in range(8)]
    params = SamplingParams(max_tokens=30)
    with Runtime(tiny_llama(), **options) as runtime:
        wanted = [each.token_ids for each in runtime.generate(prompts, params)]
    options |= {"speculation": "draft", "draft_model": tiny_llama()}
    with Runtime(tiny_llama(), **options) as runtime:
        for _ in range(3):
            given = [each.token_ids for each in runtime.generate(prompts, params)]
            assert given == wanted
        stats = runtime.stats()
    assert stats.num_pages_in > 0
    assert stats.num_accepted_tokens > 0.7 * stats.num_draft_tokens > 0


def test_what_cannot_speculate_is_refused():
    other = Llama(replace(tiny_llama().config, vocab_size=50), rngs=nnx.Rngs(0))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"speculation": "draft"}, "draft_model=None"),
        ({"draft_model": tiny_llama()}, "speculation=None"),
        ({"speculation": "draft", "draft_model": other}, "50 tokens"),
        ({"speculation": "draft", "draft_model": tiny_llama(), "mesh": make_mesh(data=2)}, "mesh"),
        ({"speculation": "oracle"}, "speculation='oracle' is unknown"),
        ({"speculation": "lookup", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
    ]
    for options, name in cases:
        with pytest.raises(InvalidConfigError, match=name):
            Runtime(tiny_llama(), **OPTIONS, **options)


def test_options_of_what_is_off_are_refused():
    """As `draft_model` alone is; the defaults hold where the options are omitted."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_speculative_tokens": 4}, "num_speculative_tokens=4 without speculation"),
        ({"max_adapter_rank": 8}, "max_adapter_rank=8 without max_adapters"),
        ({"adapter_dtype": "bfloat16"}, "adapter_dtype='bfloat16' without max_adapters"),
        ({"speculation": "lookup", "num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"max_adapters": True}, "max_adapters=True"),
    ]
    for options, said in cases:
        with pytest.raises(InvalidConfigError, match=said):
            RuntimeOptions.parse(options)
    off, on = RuntimeOptions(), RuntimeOptions(speculation="lookup", max_adapters=2)
    assert (off.num_proposed, off.adapter_rank) == (0, 0)
    assert (on.num_proposed, on.adapter_rank) == (8, 16)
