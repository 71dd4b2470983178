"""Models that are served with weights in few bits."""

from __future__ import annotations

import gc
import logging
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.kernels import dispatch
from jaxserve.kernels.cross import targeting
from jaxserve.models.linear import WeightAxes, replace_weights
from jaxserve.models.quantisation import Quantisation, Quantiser
from jaxserve.sharding import StagePlan, make_mesh, state_shardings
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.tiers import some
from tests.runtime.serving import weights

PROMPTS = random_prompts(5, longest=30)
EACH = SamplingParams(max_tokens=12)
FORMATS = ("int8", "int4")


def _answers(rt: Runtime, prompts=PROMPTS):
    return [completion.token_ids for completion in rt.generate(list(prompts), EACH)]


def _runtime(seed: int = 0, **options) -> Runtime:
    return Runtime(tiny_llama(seed), **OPTIONS | options)


@pytest.fixture(scope="module")
def served():
    """The answers and the bytes of the weights by format and seed; None for dense weights."""
    found = {}
    for format in (None, *FORMATS):
        for seed in (0, 1):
            with _runtime(seed, quantize=format) as rt:
                found[format, seed] = _answers(rt), rt.stats().weights_bytes
    return found


@pytest.mark.parametrize("format", some(FORMATS))
def test_answers_are_the_same_alone_and_in_any_batch(format, served):
    """A request's tokens do not depend on the other requests."""
    with _runtime(quantize=format) as rt:
        alone = [_answers(rt, [prompt])[0] for prompt in PROMPTS]
        assert alone == _answers(rt, PROMPTS[::-1])[::-1] == served[format, 0][0]


def test_weights_take_the_memory_of_their_format(served):
    """Fewer bits take less, although the tiny model's narrow heads fill up panels and groups."""
    dense, eight, four = (served[format, 0][1] for format in (None, *FORMATS))
    assert four < eight < dense


@pytest.mark.release
def test_weights_in_float8(served):
    """They take the memory of int8, and an update is rounded as the first weights were."""
    with _runtime(1, quantize="fp8") as rt:
        wanted = _answers(rt)
    with _runtime(quantize="fp8") as rt:
        assert rt.stats().weights_bytes == served["int8", 0][1]
        assert _answers(rt) != wanted
        rt.update_params(weights(1))
        assert _answers(rt) == wanted


def test_the_kernel_is_chosen_and_recorded():
    """On a CPU the kernel serves every product with a quantised weight."""
    with _runtime(quantize="int4") as rt:
        _answers(rt)
    chosen = {c.implementation for c in dispatch.choices() if c.operation == "quantised_matmul"}
    assert "cpu" in chosen


@pytest.mark.release
@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"]))
@pytest.mark.parametrize("format", some(FORMATS))
def test_updates_are_quantised(format, dtype, served):
    """Dense weights of a trainer, in 32 or 16 bits, serve as if the runtime began with them."""
    new = weights(1)
    with _runtime(quantize=format, warmup=True, strict=True) as rt:
        assert _answers(rt) == served[format, 0][0]
        before = rt.stats().num_compilations
        rt.update_params(jax.tree.map(lambda x: x.astype(dtype), new))
        if dtype == "float32":
            assert _answers(rt) == served[format, 1][0]
        assert rt.stats().num_compilations == before
        rt.update_params(weights(0))
        assert _answers(rt) == served[format, 0][0]


class _Watching:
    """How weights are stored; notes the bytes of float32 arrays whenever one is changed."""

    keeps_blocks = False

    def __init__(self, how: Quantisation):
        self._how = how
        self.num_bytes: list[int] = []

    def change(self, weight: nnx.Param, axes: WeightAxes) -> Any:
        self.num_bytes.append(_float32_bytes())
        return self._how.change(weight, axes)


def _float32_bytes() -> int:
    """Return the bytes of all matrices in float32."""
    gc.collect()
    found = (x for x in jax.live_arrays() if x.ndim > 1 and x.dtype == "float32")
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in found}.values())


@pytest.mark.release
def test_an_update_is_cast_weight_by_weight():
    """Of a trainer's weights in 16 bits, only the one that is being rounded is in 32 bits."""
    wide = weights(1)
    trained = jax.tree.map(lambda x: x.astype("bfloat16"), wide)
    how = Quantisation.of(RuntimeOptions(quantize="int8"))
    assert how is not None
    whole = sum(x.nbytes for x in jax.tree.leaves(wide) if x.ndim > 1)
    watching = _Watching(how)
    quantiser = Quantiser(tiny_llama(0), cast(Any, watching))
    before = _float32_bytes()
    stored = quantiser.params(trained)
    assert len(watching.num_bytes) > 5
    assert max(watching.num_bytes) - before < whole / 2
    rounded = jax.tree.map(lambda x: x.astype("float32"), trained)
    wanted = Quantiser(tiny_llama(0), how).params(rounded)
    jax.tree.map(np.testing.assert_array_equal, stored, wanted)


def test_an_update_that_does_not_fit_is_refused(served):
    with _runtime(quantize="int8") as rt:
        with pytest.raises(InvalidConfigError, match="do not fit this model"):
            rt.update_params(weights(0, num_layers=3))
        assert _answers(rt) == served["int8", 0][0]


@pytest.mark.release
@pytest.mark.parametrize("format", some(FORMATS))
def test_two_devices_share_the_weights(format, served, caplog):
    """Under tensor parallelism answers are those of one device; what is not shared is logged."""
    with (
        caplog.at_level(logging.INFO, "jaxserve.models.quantisation"),
        _runtime(quantize=format, mesh=make_mesh(tensor=2)) as rt,
    ):
        # 32 inputs are one group of 32; the vocabulary of 97 is 7 panels.
        assert "attention.wo has 1 groups, which 2 devices cannot share" in caplog.text
        assert "lm_head has 7 panels" in caplog.text
        assert _answers(rt) == served[format, 0][0]
        rt.update_params(weights(1))
        assert _answers(rt) == served[format, 1][0]


@pytest.mark.release
def test_orbax_saves_and_restores_quantised_weights(served, tmp_path):
    """Restored onto the shards of a mesh, in their dtypes, they give the same answers."""
    how = Quantisation.of(RuntimeOptions(quantize="int4"))
    assert how is not None
    model = tiny_llama(1)
    replace_weights(model, how.change)
    params = nnx.state(model, nnx.Param)
    mesh = make_mesh(tensor=2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", nnx.to_pure_dict(params))
        checkpointer.wait_until_finished()
        wanted = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            nnx.to_pure_dict(params),
            nnx.to_pure_dict(state_shardings(params, mesh)),
        )
        found = checkpointer.restore(tmp_path / "weights", wanted)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, wanted)
    restored = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(restored, found)
    with _runtime(quantize="int4", mesh=mesh) as rt:
        rt.update_params(restored)
        assert _answers(rt) == served["int4", 1][0]


def test_activations_in_int8_are_rounded_as_the_platform_does(served):
    """On a CPU "w8a8" is "int8"; for a GPU each token has one scale."""
    with _runtime(quantize="w8a8") as rt:
        assert _answers(rt) == served["int8", 0][0]
    with targeting():
        how = Quantisation.of(RuntimeOptions(quantize="w8a8"))
    assert how is not None and how.layers is not None and how.embeddings is not None
    assert how.layers.rounds_activations == "tokens"
    assert how.embeddings.rounds_activations is None


@pytest.mark.release
def test_embeddings_can_stay_dense(served):
    """quantize_embeddings="none" leaves the embedding and the head in the model's dtype."""
    with _runtime(quantize="int8", quantize_embeddings="none") as rt:
        assert rt.stats().weights_bytes > served["int8", 0][1]
        assert len(_answers(rt)) == len(PROMPTS)


def test_what_is_not_supported_is_refused():
    with pytest.raises(InvalidConfigError, match="quantize='int3' is not supported; pass one of"):
        _runtime(quantize="int3")
    with pytest.raises(InvalidConfigError, match="quantize_embeddings='int2'"):
        _runtime(quantize="int8", quantize_embeddings="int2")
    for other in (None, "keep", "bf16"):
        with pytest.raises(InvalidConfigError, match="omit quantize_embeddings"):
            _runtime(quantize=other, quantize_embeddings="int8")
    with pytest.raises(InvalidConfigError, match="keeps the blocks of a GGUF file"):
        _runtime(quantize="keep")
    with pytest.raises(InvalidConfigError, match="cut into stages"):
        _runtime(quantize="int8", mesh=StagePlan.of([1, 1]))
