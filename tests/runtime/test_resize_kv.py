"""The page pool shrinks and grows under running requests."""

from __future__ import annotations

import gc

import jax
import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import DeviceMemoryError, InvalidConfigError, PromptTooLongError
from jaxserve.sharding import make_mesh
from jaxserve.testing import SlowExecutor, WrapAll
from jaxserve.testing.tiny import MAX_CONTEXT, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.common.waiting import until
from tests.runtime.serving import tokens, until_tokens

OPTIONS = dict(max_slots=2, max_step_tokens=32, page_size=8, warmup=False)
PROMPTS = random_prompts(4, longest=30)
LONG = [
    SamplingParams(max_tokens=MAX_CONTEXT - 31, temperature=i % 2, seed=i)
    for i in range(len(PROMPTS))
]
PAGES_OF_ONE = MAX_CONTEXT // 8
# Pages for both slots at the longest context, and the null page.
MOST_PAGES = 1 + 2 * PAGES_OF_ONE
# Pages for one slot at the longest context and the beginning of another.
FEW_PAGES = PAGES_OF_ONE + 4


@pytest.fixture(scope="module")
def answers():
    """The answers of a runtime whose pool is not resized."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        return tokens(rt.generate(PROMPTS, LONG))


def _cache_bytes() -> int:
    """Return the bytes of all pages on all devices; only they are in arrays of five axes.

    Pages of a runtime that is gone are counted until they are collected as garbage, so do that.
    Pages on their way to or from the host are counted too, and a step may hold the cache.
    """
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if array.ndim == 5)


def _until_cache_bytes(wanted: int) -> None:
    """Wait until the pages on all devices have the wanted number of bytes."""
    until(lambda: _cache_bytes() == wanted)


def _page_bytes(rt: Runtime) -> int:
    return rt.stats().pool_bytes // rt.stats().num_pages


def _begun(rt: Runtime):
    """Submit all prompts, and wait until two are in the middle of their answers."""
    target = rt.stats().num_tokens + 180
    pending = [rt.submit(prompt, each) for prompt, each in zip(PROMPTS, LONG, strict=True)]
    until_tokens(rt, target)
    return pending


@pytest.mark.release
@pytest.mark.parametrize("num_shards", some([1, 2]))
def test_running_requests_go_on_with_the_same_tokens(answers, num_shards):
    """The pool shrinks below the pages of running requests and grows again; memory is freed.

    Over two devices nothing compiles, after a warm-up.
    """
    mesh = None if num_shards == 1 else make_mesh(tensor=num_shards)
    others = _cache_bytes()
    slow = WrapAll(SlowExecutor)
    is_warm = num_shards == 2
    options = {"wrap_executor": slow, "strict": is_warm, "warmup": is_warm}
    with Runtime(tiny_llama(), mesh=mesh, **OPTIONS | options) as rt:
        [executor] = slow.executors
        whole, page = rt.stats().pool_bytes, _page_bytes(rt)
        compiled = rt.stats().num_compilations
        pending = _begun(rt)
        executor.step_s = 0.3  # no answer ends until the pool grows again
        assert rt.resize_kv(FEW_PAGES * page) == FEW_PAGES * page
        assert rt.stats().num_pages == rt.config.num_pages == FEW_PAGES
        _until_cache_bytes(others + num_shards * FEW_PAGES * page)
        assert rt.resize_kv(whole) == whole
        executor.step_s = 0.02
        _until_cache_bytes(others + num_shards * whole)
        rt.check_integrity()
        assert tokens(p.result(60) for p in pending) == answers
        assert rt.stats().num_preemptions == 1
        pending = _begun(rt)
        rt.resize_kv(FEW_PAGES * page)
        assert tokens(p.result(60) for p in pending) == answers
        assert not is_warm or rt.stats().num_compilations == compiled


@pytest.mark.release
def test_a_request_that_does_not_fit_fails_alone_with_the_reason():
    """A request that runs, streams or is new fails; others continue; all fit after growing."""
    long, short = (PROMPTS[0] * 60)[:60], PROMPTS[1][:3]
    few = SamplingParams(max_tokens=9)
    slow = WrapAll(SlowExecutor)
    with Runtime(tiny_llama(), wrap_executor=slow, **OPTIONS) as rt:
        whole, page = rt.stats().pool_bytes, _page_bytes(rt)
        assert whole == MOST_PAGES * page
        wanted = rt.generate([long, short], few)
        # No answer ends until the pool has shrunk: it was measured, which compiles; steps are slow.
        rt.resize_kv(whole)
        slow.executors[0].step_s = 0.3
        stream = rt.stream(long, SamplingParams(max_tokens=60))
        shown = next(stream).token_ids
        pending = rt.submit(short, few)
        assert rt.resize_kv(0) == 2 * page
        slow.executors[0].step_s = 0.02
        with pytest.raises(PromptTooLongError, match=r"60 prompt tokens and .* holds 8 tokens"):
            for piece in stream:
                shown += piece.token_ids
        assert shown[:9] == wanted[0].token_ids[: len(shown)]
        # The pool is the limit, as if the request were submitted now.
        cut = pending.result(60)
        assert cut.token_ids == wanted[1].token_ids[:5] and cut.finish_reason == "length"
        with pytest.raises(PromptTooLongError, match="resize_kv"):
            rt.generate(long, few)
        refused, served = rt.generate([long[:8], short], few)
        assert isinstance(refused.error, PromptTooLongError)
        assert served.token_ids == cut.token_ids
        assert rt.resize_kv("64MB") == whole
        assert tokens(rt.generate([long, short], few)) == tokens(wanted)


@pytest.mark.release
def test_what_cannot_be_had_changes_nothing(answers):
    """Too much memory, less than two pages, and a text that is not a size are refused."""
    with Runtime(tiny_llama(), wrap_executor=SlowExecutor, **OPTIONS) as rt:
        page = _page_bytes(rt)
        assert rt.resize_kv(f"{(FEW_PAGES + 1) * page - 1}B") == FEW_PAGES * page
        pending = _begun(rt)
        with pytest.raises(DeviceMemoryError, match="does not fit on .* pass at most"):
            rt.resize_kv("1000TiB")
        with pytest.raises(DeviceMemoryError, match=f"pass {2 * page:,} or more, or 0"):
            rt.resize_kv(2 * page - 1)
        with pytest.raises(InvalidConfigError, match="not a size"):
            rt.resize_kv("much")
        assert rt.stats().num_pages == FEW_PAGES
        assert tokens(p.result(60) for p in pending) == answers


def test_counters_compile_nothing():
    """Where the default pool did not depend on the largest step, a resize measures it first."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        stats = rt.stats()
        assert stats.step_bytes is None and stats.num_compilations == 0
        rt.resize_kv(stats.pool_bytes)
        measured = rt.stats().step_bytes
        assert measured is not None and measured > 0
    with Runtime(tiny_llama(), kv_memory=stats.pool_bytes, **OPTIONS) as rt:
        assert rt.stats().step_bytes == measured
