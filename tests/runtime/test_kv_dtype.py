"""Keys and values in 8 or 16 bits, from the option to the answers: more pages, the same tokens."""

from __future__ import annotations

import pytest

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import KV_DTYPES, RuntimeOptions
from jaxserve.execution.sizes import nbytes
from jaxserve.sharding import StagePlan, make_mesh
from jaxserve.testing import FreeCopiesExecutor, SlowExecutor, WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.runtime.serving import tokens, until_tokens

PROMPTS = random_prompts(10, seed=4, longest=50)
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0.8 * (i % 2), seed=i) for i in range(len(PROMPTS))
]
# Two layers, two KV heads and eight tokens: keys and values of eight numbers each.
PAGE_BYTES = {
    None: 2 * 2 * 8 * 2 * 8 * 4,
    "bfloat16": 2 * 2 * 8 * 2 * 8 * 2,
    **dict.fromkeys(KV_DTYPES, 2 * 2 * 8 * 2 * (8 + 4)),
}
NUM_PAGES = 20


def _runtime(kv_dtype: str | None, num_pages: int = NUM_PAGES, shards: int = 1, **options):
    memory = num_pages * PAGE_BYTES[kv_dtype] // shards
    options = {**OPTIONS, **options}
    return Runtime(tiny_llama(), kv_dtype=kv_dtype, kv_memory=memory, **options)


@pytest.fixture(scope="module", params=some(["bfloat16", *KV_DTYPES], 1))
def alone(request):
    """The dtype, and the answer to each prompt alone, in a pool that holds all of them."""
    with _runtime(request.param, num_pages=60) as rt:
        return request.param, [
            rt.generate(*each).token_ids for each in zip(PROMPTS, PARAMS, strict=True)
        ]


@pytest.mark.parametrize("wrong", ["int4", "float64", "float8_e5m2", "", 8])
def test_unknown_dtypes_are_refused_first(wrong):
    """The check comes before the model is loaded; the error lists the allowed dtypes."""
    with pytest.raises(InvalidConfigError, match=r"kv_dtype=.* one of \('int8', 'float8_e4m3"):
        Runtime.from_pretrained("no such model", kv_dtype=wrong)
    assert RuntimeOptions.parse({}).kv_dtype is None


def test_a_floating_dtype_is_the_models_or_bfloat16_for_float32():
    for dtype, kv_dtype in (("float16", "bfloat16"), ("float32", "float16")):
        with pytest.raises(InvalidConfigError, match=f"in {dtype} .*omit kv_dtype, or pass 'int8'"):
            Runtime(tiny_llama(dtype=dtype), kv_dtype=kv_dtype, **OPTIONS)


@pytest.mark.parametrize("kv_dtype", some(["int8", "bfloat16", None]))
def test_the_same_memory_holds_more_pages(kv_dtype):
    """As many pages fit with their scales, and the device holds exactly these bytes."""
    options = {**OPTIONS, "kv_memory": 20_000}
    seen = WrapAll()
    with Runtime(tiny_llama(), kv_dtype=kv_dtype, wrap_executor=seen, **options) as rt:
        assert rt.config.num_pages == 20_000 // PAGE_BYTES[kv_dtype]
        assert rt.config.kv_dtype == kv_dtype
        held = nbytes(seen.executors[0].pages.cache)
        assert held == rt.stats().pool_bytes == rt.config.num_pages * PAGE_BYTES[kv_dtype]


def test_same_tokens_in_a_batch_with_preemptions(alone):
    """Nothing compiles after a warm-up, and preempted sequences are computed again."""
    kv_dtype, wanted = alone
    warm = {} if kv_dtype == "int8" else {"warmup": "full", "strict": True}
    with _runtime(kv_dtype, policy="vllm_like", **warm) as rt:
        assert tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.stats().num_preemptions > 0


@pytest.mark.release
def test_same_tokens_over_several_devices(alone):
    """Scales are split by KV head or cut by layer, like their pages."""
    kv_dtype, wanted = alone
    mesh = make_mesh(tensor=2) if kv_dtype == "int8" else StagePlan.of([1, 1], tensor=[1, 2])
    # The memory is that of one shard, or of the stage whose pages are larger.
    with _runtime(kv_dtype, shards=2, mesh=mesh, policy="vllm_like") as rt:
        assert rt.config.num_pages == NUM_PAGES
        assert tokens(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.stats().num_preemptions > 0


@pytest.mark.release
def test_a_disk_gives_back_pages_of_its_own_dtype_alone(tmp_path):
    """A runtime hits the pages of an earlier one; with another dtype it hits none."""
    disk = {"disk_memory": "4MB", "disk_folder": tmp_path, "host_memory": "100kB"}
    options = {"num_pages": 60, "policy": "pensieve", "wrap_executor": FreeCopiesExecutor, **disk}
    answers = []
    for kv_dtype in ("int8", None, "int8"):
        with _runtime(kv_dtype, **options) as rt:
            answers.append(tokens(rt.generate(PROMPTS, PARAMS)))
            assert (rt.stats().num_prefix_hit_on_disk > 0) == (len(answers) == 3)
    assert answers[2] == answers[0]


@pytest.mark.release
def test_same_tokens_in_a_pool_that_is_resized():
    """The pool shrinks below the pages of running requests, which continue."""
    with _runtime("int8", num_pages=60) as rt:
        wanted = tokens(rt.generate(PROMPTS, PARAMS))
    with _runtime("int8", num_pages=60, wrap_executor=SlowExecutor) as rt:
        pending = [rt.submit(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
        until_tokens(rt, 30)
        assert rt.resize_kv("10kB") == 10_000 // PAGE_BYTES["int8"] * PAGE_BYTES["int8"]
        assert tokens(each.result(60) for each in pending) == wanted
