"""Adapters that requests name: their answers, pages, and calls that are refused."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams, merge_adapter
from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineBusyError,
    InvalidConfigError,
    InvalidParamsError,
    InvalidSamplingParamsError,
    QueueFullError,
    UnknownAdapterError,
)
from jaxserve.models.quantisation import Quantisation, Quantiser
from jaxserve.sharding import StagePlan, make_groups, make_mesh, state_shardings
from jaxserve.testing import FreeCopiesExecutor, SlowExecutor, tiny
from jaxserve.testing.tiny import random_prompts, tiny_llama, tiny_t5
from tests.common.tiers import some
from tests.runtime.serving import weights

RANK, NUM_TOKENS = 4, 16
OPTIONS: dict[str, Any] = tiny.OPTIONS | {"max_adapters": 3, "max_adapter_rank": RANK}
# Rows and columns of the tiny model's matrices, as PyTorch stores them: 2 KV heads of 2 queries.
SHAPES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}
SCALE = 0.15
# Seed, rank and modules of each adapter.
ADAPTERS = {
    "all": (1, RANK, tuple(SHAPES)),
    "usual": (2, 2, ("self_attn.q_proj", "self_attn.v_proj")),
    "mlp": (3, 3, ("mlp.gate_proj", "mlp.down_proj")),
}
NAMES = (None, *ADAPTERS)
PROMPTS = random_prompts(8, longest=40)


@functools.cache
def _arrays(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a trainer's arrays of an adapter."""
    own_seed, rank, modules = ADAPTERS[name]
    rng = np.random.default_rng((own_seed, seed))
    found = {}
    for layer in range(2):
        for module in modules:
            height, width = SHAPES[module]
            own = f"model.layers.{layer}.{module}"
            found[f"{own}.lora_A"] = rng.standard_normal((rank, width), np.float32)
            found[f"{own}.lora_B"] = rng.standard_normal((height, rank), np.float32)
    return found


def _merged(name: str | None, seed: int = 0, weights: int = 0) -> nnx.Module:
    """Return the tiny model with W + scale * B @ A in the place of its matrices W."""
    model = tiny_llama(weights)
    if name is None:
        return model
    arrays = _arrays(name, seed)
    for layer, block in enumerate(model.blocks):

        def change(module: str, layer: int = layer) -> np.ndarray:
            own = f"model.layers.{layer}.{module}"
            if f"{own}.lora_A" not in arrays:
                return np.zeros(SHAPES[module], np.float32)
            return SCALE * arrays[f"{own}.lora_B"] @ arrays[f"{own}.lora_A"]

        attention, mlp = block.attention, block.mlp
        qkv = [change(f"self_attn.{letter}_proj").reshape(2, -1, 8, 32) for letter in "qkv"]
        attention.wqkv[...] += np.concatenate(qkv, axis=1).transpose(3, 0, 1, 2)
        attention.wo[...] += change("self_attn.o_proj").T.reshape(2, 2, 8, 32)
        gate_up = np.stack([change(f"mlp.{each}_proj").T for each in ("gate", "up")], axis=1)
        mlp.gate_up[...] += gate_up
        mlp.down[...] += change("mlp.down_proj").T
    return model


@functools.cache
def _wanted(name: str | None, seed: int = 0, weights: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the greedy answers of merged weights to `PROMPTS`."""
    with Runtime(_merged(name, seed, weights), **tiny.OPTIONS) as rt:
        return _tokens(rt.generate(list(PROMPTS), SamplingParams(max_tokens=NUM_TOKENS)))


def _tokens(completions) -> tuple[tuple[int, ...], ...]:
    return tuple(completion.token_ids for completion in completions)


def _params(name: str | None, **others: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, adapter=name, **others)


def _mixed(shift: int = 0) -> list[str | None]:
    return [NAMES[(index + shift) % len(NAMES)] for index in range(len(PROMPTS))]


def _check(rt: Runtime, names: list[str | None], weights: int = 0) -> None:
    """Check that each prompt has the answer of its adapter's merged weights, in one batch."""
    got = _tokens(rt.generate(list(PROMPTS), [_params(name) for name in names]))
    for index, name in enumerate(names):
        assert got[index] == _wanted(name, weights=weights)[index], (index, name)


def _load_all(rt: Runtime) -> None:
    for name in ADAPTERS:
        rt.load_adapter(name, _arrays(name), scale=SCALE)


@pytest.fixture(scope="module")
def rt():
    """A runtime with all adapters, which compiles nothing after its warm-up."""
    with Runtime(tiny_llama(), **OPTIONS | {"warmup": "full", "strict": True}) as runtime:
        _load_all(runtime)
        yield runtime


def test_adapters_change_answers():
    """The answers of merged weights differ, so that the tests below would notice a mistake."""
    answers = [_wanted(name) for name in NAMES]
    assert all(len(set(own)) == len(NAMES) for own in zip(*answers, strict=True))


@pytest.mark.parametrize("shift", some(range(len(NAMES))))
def test_each_row_of_a_batch_has_its_own_adapter(rt, shift):
    """Mixed steps and decode loops with three adapters and none; nothing compiles."""
    _check(rt, _mixed(shift))
    rt.check_integrity()


@pytest.mark.parametrize("name", NAMES)
def test_one_adapter_for_a_whole_batch(rt, name):
    """All rows have the same one, and one prompt alone has the answer that it has in a batch."""
    _check(rt, [name] * len(PROMPTS))
    assert rt.generate(PROMPTS[1], _params(name)).token_ids == _wanted(name)[1]


def test_loading_and_dropping_compiles_nothing(rt):
    """Another adapter takes the place and the name of a dropped one, while requests run."""
    pending = [rt.submit(prompt, _params("all")) for prompt in PROMPTS]
    for seed in (1, 2, 0):
        rt.drop_adapter("mlp")
        assert rt.adapters == ("all", "usual")
        rt.load_adapter("mlp", _arrays("mlp", seed), scale=SCALE)
        got = _tokens(rt.generate(list(PROMPTS), _params("mlp")))
        assert got == _wanted("mlp", seed)
    assert _tokens(one.result(60) for one in pending) == _wanted("all")
    assert rt.stats().num_compilations == 0


@pytest.mark.release
@pytest.mark.parametrize(
    "options",
    some(
        [
            dict(policy="pensieve", kv_memory="40kB", restore="both"),
            dict(policy="vllm_like", kv_memory="40kB", host_memory=0),
            dict(max_step_tokens=16, page_size=4, max_decode_iterations=1),
            dict(speculation="lookup"),
        ]
    ),
    ids=["restored", "recomputed", "chunks", "speculating"],
)
def test_how_a_request_is_computed_changes_nothing(options):
    """Preempted sequences, small chunks of prompts, and proposals."""
    with Runtime(tiny_llama(), **OPTIONS | options) as rt:
        _load_all(rt)
        for shift in range(2):
            _check(rt, _mixed(shift))
        assert "kv_memory" not in options or rt.stats().num_preemptions > 0
        rt.check_integrity()


@pytest.mark.release
def test_scanned_layers_have_adapters():
    model, flat = (
        tiny_llama(layer_layout="scanned"),
        dict(nnx.to_flat_state(nnx.state(tiny_llama()))),
    )
    stacked = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[0] == "blocks":
            own = jnp.stack([flat["blocks", layer, *path[1:]][...] for layer in range(2)])
        else:
            own = flat[path][...]
        stacked.append((path, variable.replace(own)))
    with Runtime(model, nnx.from_flat_state(stacked), **OPTIONS) as rt:
        _load_all(rt)
        _check(rt, _mixed())


@pytest.mark.release
def test_weights_in_panels_have_adapters():
    """Weights that are laid out for the CPU, as those of checkpoints are."""
    model = tiny_llama()
    panelled = Quantiser(model, Quantisation.in_panels(None)).model(nnx.state(model, nnx.Param))
    with Runtime(panelled, **OPTIONS) as rt:
        _load_all(rt)
        _check(rt, _mixed())
        rt.update_params(weights(1))
        _check(rt, _mixed(), weights=1)


@pytest.mark.release
def test_sampled_tokens_have_the_log_probabilities_of_merged_weights(rt):
    each = dict(temperature=0.8, seed=5, logprobs=0, prompt_logprobs=0)
    got = rt.generate(PROMPTS[3], _params("all", **each))
    with Runtime(_merged("all"), **tiny.OPTIONS) as merged:
        wanted = merged.generate(PROMPTS[3], _params(None, **each))
    assert got.token_ids == wanted.token_ids
    for name in ("logprobs", "prompt_logprobs"):
        own, others = (
            [each.logprob for each in getattr(done, name) if each] for done in (got, wanted)
        )
        np.testing.assert_allclose(own, others, atol=1e-4)


def test_scores_are_those_of_the_adapter(rt):
    """`score` with an adapter has the log-probabilities of merged weights."""
    each = SamplingParams(temperature=1.0, adapter="usual")
    got = rt.score(PROMPTS[2], each)
    with Runtime(_merged("usual"), **tiny.OPTIONS) as merged:
        wanted = merged.score(PROMPTS[2])
    np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_bits_do_not_depend_on_other_adapters(rt):
    """A request has the same log-probabilities alone and beside requests with other adapters."""

    def bits(completion) -> list[float]:
        return [each.logprob for each in completion.logprobs]

    params = [_params(name, logprobs=0) for name in _mixed()]
    together = [bits(done) for done in rt.generate(list(PROMPTS), params)]
    alone = [bits(rt.generate(*each)) for each in zip(PROMPTS, params, strict=True)]
    assert together == alone


@pytest.mark.release
def test_merged_weights_give_the_answers_of_the_adapter(rt):
    """Of a runtime that gets them as new weights, which all its requests have then."""
    with Runtime(tiny_llama(), **tiny.OPTIONS) as merged:
        for name in ADAPTERS:
            merged.update_params(merge_adapter(tiny_llama(), _arrays(name), scale=SCALE))
            got = _tokens(merged.generate(list(PROMPTS), SamplingParams(max_tokens=NUM_TOKENS)))
            assert got == _wanted(name)


# ---- pages ----


def test_pages_belong_to_one_adapter():
    """No adapter finds the pages of another, or of other contents under its name."""
    prompt = PROMPTS[0] * 3
    assert len(prompt) > 32
    with Runtime(tiny_llama(), **OPTIONS | {"policy": "auto"}) as rt:
        _load_all(rt)

        def hits(name: str | None) -> int:
            before = rt.stats().num_prefix_hit
            rt.generate(prompt, _params(name))
            return rt.stats().num_prefix_hit - before

        assert [hits(name) for name in NAMES] == [0] * len(NAMES)
        full = (len(prompt) - 1) // OPTIONS["page_size"] * OPTIONS["page_size"]
        assert [hits(name) for name in NAMES] == [full] * len(NAMES)
        rt.drop_adapter("all")
        rt.load_adapter("all", _arrays("all", 1), scale=SCALE)
        assert hits("all") == 0
        rt.drop_adapter("all")
        rt.load_adapter("all", _arrays("all"), scale=2 * SCALE)
        assert hits("all") == 0
        rt.check_integrity()


def test_answers_from_the_prefix_cache_are_the_same():
    """Prompts that the cache has, of each adapter and of none: each comes twice, then others do."""
    with Runtime(tiny_llama(), **OPTIONS | {"policy": "auto"}) as rt:
        _load_all(rt)
        for shift in range(len(NAMES)):
            _check(rt, _mixed(shift))
            before = rt.stats().num_prefix_hit
            _check(rt, _mixed(shift))
            assert rt.stats().num_prefix_hit > before


@pytest.mark.release
def test_a_disk_gives_back_pages_of_the_same_adapter_alone(tmp_path):
    """A later run finds the pages of an adapter with the same contents, whatever its name."""
    disk = {"disk_memory": "4MB", "disk_folder": tmp_path, "host_memory": "200kB"}
    disk["wrap_executor"] = FreeCopiesExecutor
    found = []
    for name, seed in (("first", 0), ("second", 0), ("first", 1)):
        with Runtime(tiny_llama(), **OPTIONS | {"policy": "pensieve"} | disk) as rt:
            rt.load_adapter(name, _arrays("all", seed), scale=SCALE)
            got = _tokens(rt.generate(list(PROMPTS), _params(name)))
            assert got == _wanted("all", seed)
            found.append(rt.stats().num_prefix_hit_on_disk > 0)
    assert found == [False, True, False]


# ---- new weights and memory ----


@pytest.mark.release
def test_new_weights_keep_the_adapters():
    """Whole and partial updates, and one after the weights were dropped."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        _load_all(rt)
        _check(rt, _mixed())
        new = weights(1)
        rt.update_params(new)
        _check(rt, _mixed(), weights=1)
        rt.update_params(weights(0), partial=True)
        _check(rt, _mixed(1))
        with pytest.raises(InvalidParamsError, match="is missing"):
            rt.update_params(nnx.State({"norm": nnx.state(tiny_llama().norm)}))
        rt.sleep(drops_weights=True)
        with pytest.raises(EngineBusyError):
            rt.load_adapter("late", _arrays("all"), scale=SCALE)
        rt.drop_adapter("mlp")
        rt.update_params(new)
        rt.wake_up()
        assert rt.adapters == ("all", "usual")
        rt.load_adapter("mlp", _arrays("mlp"), scale=SCALE)
        _check(rt, _mixed(2), weights=1)


# ---- refusals ----


def test_an_unknown_adapter_fails_its_request_alone(rt):
    """In a batch, the others have their answers; alone it is raised at once."""
    done = rt.generate(list(PROMPTS[:2]), [_params("absent"), _params("all")])
    assert isinstance(done[0].error, UnknownAdapterError) and done[1].error is None
    assert done[1].token_ids == _wanted("all")[1]
    with pytest.raises(UnknownAdapterError, match="loaded are: .*'usual'"):
        rt.submit(PROMPTS[0], _params("absent"))
    with pytest.raises(UnknownAdapterError):
        rt.drop_adapter("absent")
    with pytest.raises(InvalidSamplingParamsError, match="adapter=''"):
        _params("")


@pytest.mark.release
def test_an_adapter_in_use_is_not_dropped():
    """The call says how many requests have it; they end with its answer, and then it goes."""
    with Runtime(tiny_llama(), **OPTIONS, wrap_executor=partial(SlowExecutor, step_s=0.02)) as rt:
        _load_all(rt)
        pending = [rt.submit(prompt, _params("all")) for prompt in PROMPTS]
        with pytest.raises(EngineBusyError, match="requests with the adapter 'all'"):
            rt.drop_adapter("all")
        assert _tokens(one.result(60) for one in pending) == _wanted("all")
        rt.drop_adapter("all")
        cancelled = rt.submit(PROMPTS[0], _params("mlp"))
        cancelled.cancel()
        cancelled.result(60)
        rt.drop_adapter("mlp")
        assert rt.adapters == ("usual",)


def test_requests_that_are_refused_hold_no_adapter():
    """After a full queue and a prompt that is too long, the adapter can be dropped."""
    with Runtime(tiny_llama(), **OPTIONS, max_waiting=1) as rt:
        _load_all(rt)
        with pytest.raises(QueueFullError):
            rt.generate([PROMPTS[0]] * 9, _params("all"))
        done = rt.generate([PROMPTS[0] * 40], _params("all"))
        assert done[0].error is not None
        rt.drop_adapter("all")


def test_wrong_calls_change_nothing(rt):
    """A taken name, a full table, an adapter that does not fit."""
    with pytest.raises(InvalidConfigError, match="loaded already"):
        rt.load_adapter("all", _arrays("all"), scale=SCALE)
    with pytest.raises(InvalidConfigError, match="max_adapters"):
        rt.load_adapter("more", _arrays("all"), scale=SCALE)
    with pytest.raises(InvalidConfigError, match="name=''"):
        rt.load_adapter("", _arrays("all"), scale=SCALE)
    large = {
        name: np.concatenate([array] * 2, int("lora_B" in name))
        for name, array in _arrays("all").items()
    }
    with pytest.raises(InvalidParamsError, match="rank 8"):
        rt.load_adapter("large", large, scale=SCALE)
    _check(rt, _mixed())


def test_a_runtime_without_adapters_says_so():
    with Runtime(tiny_llama(), **tiny.OPTIONS) as rt:
        assert rt.adapters == ()
        with pytest.raises(InvalidConfigError, match="max_adapters"):
            rt.load_adapter("all", _arrays("all"), scale=SCALE)
        with pytest.raises(UnknownAdapterError, match="loaded are: none"):
            rt.generate(PROMPTS[0], _params("all"))


@pytest.mark.release
def test_adapters_in_bfloat16_are_rounded_and_nothing_else():
    """Answers and log-probabilities have the bits of rounded adapters in float32."""
    arrays = {
        name: {key: np.asarray(jnp.asarray(each, jnp.bfloat16)) for key, each in own.items()}
        for name, own in ((name, _arrays(name)) for name in ADAPTERS)
    }
    found = []
    for dtype in (None, "bfloat16"):
        with Runtime(tiny_llama(), **OPTIONS | {"adapter_dtype": dtype}) as rt:
            for name in ADAPTERS:
                own = _arrays(name) if dtype else arrays[name]
                rt.load_adapter(name, own, scale=SCALE)
            params = [_params(name, logprobs=2) for name in _mixed()]
            done = rt.generate(list(PROMPTS), params)
            found.append([(each.token_ids, each.logprobs) for each in done])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(mesh=lambda: make_mesh(tensor=2)), "a mesh"),
        (dict(mesh=lambda: make_mesh(data=2)), "a mesh"),
        (dict(mesh=lambda: StagePlan.of([1, 1])), "a mesh"),
        (dict(mesh=lambda: make_groups(encode=1, decode=1), policy="exegpt_waa_c"), "a mesh"),
        (dict(quantize="int8"), "weights in few bits"),
        (dict(max_adapters=-1), "max_adapters=-1"),
        (dict(max_adapters=10**9), "at most 65536"),
        (dict(max_adapter_rank=0), "max_adapter_rank=0"),
        (dict(max_adapter_rank=10**9), "at most 65536"),
        (dict(adapter_dtype="float16"), "adapter_dtype='float16'"),
    ],
)
def test_unsupported_runtimes_are_refused(options, message):
    """At construction, with what is allowed."""
    if "mesh" in options:
        options = options | {"mesh": options["mesh"]()}
    with pytest.raises(InvalidConfigError, match=message):
        Runtime(tiny_llama(), **OPTIONS | options)


def test_more_adapters_than_fit_are_refused():
    """Their size is computed before any of it is allocated."""
    with pytest.raises(DeviceMemoryError, match=r"need 17,592,\d{3},\d{3},\d{3} bytes"):
        Runtime(tiny_llama(), **OPTIONS | dict(max_adapters=1 << 16, max_adapter_rank=1 << 16))


def test_models_without_adapters_are_refused():
    """An encoder-decoder model, and parameters that lie on a mesh."""
    with pytest.raises(InvalidConfigError, match="encoder-decoder"):
        Runtime(tiny_t5(), **OPTIONS)
    params = weights()
    params = jax.device_put(params, state_shardings(params, make_mesh(tensor=2)))
    with pytest.raises(InvalidConfigError, match="a mesh"):
        Runtime(tiny_llama(), params, **OPTIONS)
