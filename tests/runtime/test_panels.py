"""Models whose float32 weights are laid out for the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.options import RuntimeOptions
from jaxserve.execution.sizes import nbytes
from jaxserve.kernels import dispatch
from jaxserve.models.loading import abstract_model
from jaxserve.models.quantisation import PanelledWeight, Quantisation, Quantiser, panels_dtype
from jaxserve.models.quantised import QuantisedWeight
from jaxserve.runtime.loading import is_in_bfloat16, panels_for
from jaxserve.sharding import make_mesh
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama
from tests.common.instructions import has_bfloat16_products
from tests.models.hf_checkpoints import write_checkpoint
from tests.runtime.serving import CHECKPOINT, weights

PROMPTS = random_prompts(4, longest=30)
EACH = SamplingParams(max_tokens=12)
IN_PANELS = Quantisation.in_panels(None)
BF16 = Quantisation.in_panels(None, "bfloat16")


def _panelled(seed: int = 0) -> nnx.Module:
    """Return the tiny model as it is after a checkpoint was loaded for one CPU."""
    model = tiny_llama(seed)
    return Quantiser(model, IN_PANELS).model(nnx.state(model, nnx.Param))


def _answers(rt: Runtime):
    return [completion.token_ids for completion in rt.generate(list(PROMPTS), EACH)]


@pytest.fixture(scope="module")
def wanted():
    """The answers of the dense model, by seed."""
    found = {}
    for seed in (0, 1):
        with Runtime(tiny_llama(seed), **OPTIONS) as rt:
            found[seed] = _answers(rt)
    return found


@pytest.mark.release
def test_answers_are_those_of_dense_weights(wanted):
    """The layout changes no token, the kernel serves it, and an update gets it too."""
    with Runtime(_panelled(), **OPTIONS | {"warmup": True, "strict": True}) as rt:
        assert _answers(rt) == wanted[0]
        before = rt.stats().num_compilations
        rt.update_params(weights(1))
        assert _answers(rt) == wanted[1]
        rt.update_params(nnx.state(_panelled(0), nnx.Param))
        assert _answers(rt) == wanted[0]
        assert rt.stats().num_compilations == before
        other = weights(num_layers=1)
        with pytest.raises(InvalidConfigError, match="do not fit"):
            rt.update_params(other)
    chosen = {c.implementation for c in dispatch.choices() if c.operation == "panel_matmul"}
    assert "cpu" in chosen


def test_which_weights_are_in_panels():
    """All matrices of layers and the embedding are; stacked layers and other dtypes are not."""
    config = tiny_llama().config
    for layout, dtype, found in (
        ("unrolled", "float32", True),
        ("scanned", "float32", False),
        ("unrolled", "bfloat16", False),
    ):
        graphdef, state = abstract_model(
            replace(config, dtype=dtype), layer_layout=layout, change=IN_PANELS.change
        )
        model = nnx.merge(graphdef, state)
        # The ends of a model are not stacked.
        assert panels_dtype(model) == ("float32" if dtype == "float32" else None)
        if found:
            weights = [m for _, m in nnx.iter_modules(model) if isinstance(m, PanelledWeight)]
            assert len(weights) == 4 * config.num_layers + 2


def test_when_a_checkpoint_is_loaded_in_panels():
    """On one CPU; a mesh, or blocks that are kept, have none. Other weights can be quantised."""
    dense = RuntimeOptions()
    alone = Quantisation.at_loading(dense, mesh=None)
    assert alone is not None and alone.panels == "float32" and not alone.rounds_weights
    assert Quantisation.at_loading(dense, mesh=make_mesh(tensor=2)) is None
    kept = Quantisation.at_loading(RuntimeOptions(quantize="keep"), mesh=None)
    assert kept is not None and kept.panels is None
    options = RuntimeOptions(quantize="int8", quantize_embeddings="none")
    both = Quantisation.at_loading(options, mesh=None)
    assert both is not None and both.panels and both.name != alone.name
    graphdef, state = abstract_model(tiny_llama().config, change=both.change)
    model = nnx.merge(graphdef, state)
    assert isinstance(model.embedding, PanelledWeight)
    assert isinstance(model.blocks[0].attention.wqkv, QuantisedWeight)


@pytest.mark.parametrize("name", ["embedding", "lm_head"])
def test_a_weight_comes_back(name):
    """Panels hold the numbers of the dense weight, and its rows."""
    dense, panelled = tiny_llama(), _panelled()
    array, weight = getattr(dense, name)[...], getattr(panelled, name)
    matrix = array.T if name == "embedding" else array
    np.testing.assert_array_equal(weight.matrix(), matrix)
    index = jax.numpy.asarray([3, 96, 0])
    rows = weight.rows(index, None, "float32")
    np.testing.assert_array_equal(rows, matrix.T[np.asarray(index)])


def _rounded(seed: int) -> nnx.State:
    """Return the tiny model's parameters, those rounded that have panels in bfloat16."""
    dense = weights(seed)
    stored = nnx.state(Quantiser(tiny_llama(seed), BF16).model(dense), nnx.Param)
    panels = {path[:-1] for path, _ in nnx.to_flat_state(stored) if path[-1] == "panels"}
    return nnx.from_flat_state(
        [
            (path, v.replace(v[...].astype("bfloat16").astype("float32")) if path in panels else v)
            for path, v in nnx.to_flat_state(dense)
        ]
    )


def _scores(rt: Runtime) -> np.ndarray:
    """Return the log-probability of each token of the prompts."""
    each = SamplingParams(max_tokens=1, prompt_logprobs=0)
    answers = rt.generate(list(PROMPTS), each)
    return np.array([entry.logprob for a in answers for entry in a.prompt_logprobs[1:]])


@pytest.mark.release
def test_weights_in_bfloat16_score_as_rounded_ones():
    """Scores are those of rounded dense weights, after an update too; memory is halved.

    They are the same to float32's precision where inputs of products are not rounded.
    """
    scores, closeness = [], 0.1 if has_bfloat16_products() else 1e-4
    for seed in (0, 1):
        with Runtime(tiny_llama(), params=_rounded(seed), **OPTIONS) as rt:
            scores.append(_scores(rt))
    assert np.abs(scores[0] - scores[1]).max() > 1
    with Runtime(tiny_llama(), quantize="bf16", deterministic=True, **OPTIONS) as rt:
        answers = _answers(rt)
        np.testing.assert_allclose(_scores(rt), scores[0], atol=closeness)
        alone = [rt.generate([prompt], EACH)[0].token_ids for prompt in PROMPTS]
        assert alone == answers
        rt.update_params(weights(1))
        updated = _answers(rt)
        np.testing.assert_allclose(_scores(rt), scores[1], atol=closeness)
        assert rt.stats().weights_bytes < 0.52 * nbytes(nnx.state(_panelled(), nnx.Param))
    stored = Quantiser(tiny_llama(), BF16).model(weights(1))
    with Runtime(stored, **OPTIONS) as rt:  # a model whose weights are stored so already
        assert _answers(rt) == updated
        rt.update_params(weights(0))
        assert _answers(rt) == answers


@pytest.mark.parametrize(
    ("settings", "said"), [({"mesh": make_mesh(tensor=2)}, "with a mesh"), ({}, "in bfloat16")]
)
def test_weights_in_bfloat16_are_for_a_float32_model_on_one_cpu(settings, said):
    model = tiny_llama() if settings else tiny_llama(dtype="bfloat16")
    with pytest.raises(InvalidConfigError, match=f"{said}.*pass dtype='bfloat16'"):
        Runtime(model, quantize="bf16", **settings, **OPTIONS)


NARROW = "bfloat16" if has_bfloat16_products() else "float32"


@pytest.mark.parametrize(
    ("options", "dtype", "wanted"),
    [
        ({}, None, NARROW),
        ({"kv_dtype": "int8"}, None, NARROW),
        ({"kv_dtype": "float32"}, None, "float32"),
        ({"quantize": "int8"}, None, "float32"),
        ({}, "float32", "float32"),
    ],
)
def test_what_is_asked_for_is_not_narrowed(options, dtype, wanted):
    assert panels_for(RuntimeOptions.parse(options), dtype, None) == wanted
    assert panels_for(RuntimeOptions(), None, make_mesh(tensor=2)) == "float32"


@pytest.mark.parametrize(
    ("config", "is_so"),
    [
        ({"dtype": "bfloat16"}, True),
        ({"torch_dtype": "bfloat16"}, True),
        ({"text_config": {"dtype": "bfloat16"}}, True),
        ({"dtype": "float16"}, False),
        ({}, False),
        (
            {
                "dtype": "bfloat16",
                "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32},
            },
            False,
        ),
    ],
)
def test_folders_in_bfloat16(tmp_path, config, is_so):
    """Those in few bits are not: they are read in the form that they have."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_in_bfloat16(tmp_path) == is_so


@pytest.mark.release
def test_a_checkpoint_in_bfloat16_stays_in_it(tmp_path):
    """Its keys and values, too, where the processor multiplies such numbers; another is float32."""
    serving = {k: v for k, v in CHECKPOINT.items() if k != "dtype"}
    folders = {"bfloat16": tmp_path / "half", "float32": tmp_path / "single"}
    for dtype, folder in folders.items():
        write_checkpoint("llama", folder, getattr(torch, dtype))
        with Runtime.from_pretrained(folder, **serving) as rt:
            kept, held = rt.config.kv_dtype, rt.stats().weights_bytes
            scores = _scores(rt)
        is_narrow = dtype == NARROW == "bfloat16"
        assert kept == ("bfloat16" if is_narrow else None)
        with Runtime.from_pretrained(folder, dtype="float32", **serving) as rt:
            assert rt.config.kv_dtype is None
            assert held < 0.6 * rt.stats().weights_bytes or not is_narrow
            np.testing.assert_allclose(scores, _scores(rt), atol=0.3)  # of -3 to -10
