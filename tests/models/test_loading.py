"""Loading parameters: problems are reported at once, layouts agree, shards go where they belong."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxserve.core.errors import CheckpointError
from jaxserve.models.families.llama import LlamaConfig
from jaxserve.models.loading import (
    abstract_model,
    fitted,
    load_params,
    random_params,
    under_own_names,
)
from jaxserve.models.store import load_model
from jaxserve.sharding import make_mesh, state_shardings
from tests.models.hf_checkpoints import write_checkpoint

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    tie_word_embeddings=True,
)


class _Arrays:
    """A `WeightSource` over a dictionary that counts the elements that are read."""

    where = "a dictionary"

    def __init__(self, arrays):
        self.arrays = arrays
        self.num_reads = 0

    def shapes(self):
        return {name: array.shape for name, array in self.arrays.items()}

    def dtypes(self):
        return {name: str(array.dtype) for name, array in self.arrays.items()}

    def read(self, name, index=None):
        self.num_reads += 1
        return self.arrays[name][index or ()]


def _arrays() -> dict[str, np.ndarray]:
    shapes = {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)}
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (24, 8),
            "self_attn.k_proj": (12, 8),
            "self_attn.v_proj": (12, 8),
            "self_attn.o_proj": (8, 24),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
            "input_layernorm": (8,),
            "post_attention_layernorm": (8,),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype("f") for name, shape in shapes.items()}


def test_every_problem_is_reported_before_data_is_read():
    """Missing, misshapen and surplus tensors are in one error; buffers and tied heads are not."""
    arrays = _arrays()
    del arrays["model.norm.weight"], arrays["model.layers.1.mlp.up_proj.weight"]
    arrays["model.layers.0.self_attn.k_proj.weight"] = np.zeros((12, 9), "f")
    arrays["model.layers.2.input_layernorm.weight"] = np.zeros(8, "f")
    arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(3, "f")
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    source = _Arrays(arrays)
    with pytest.raises(CheckpointError) as caught:
        load_params(abstract_model(CONFIG)[1], CONFIG, source)
    problems = caught.value.problems
    assert [problem.split()[0] for problem in problems] == [
        "missing",
        "missing",
        "tensor",
        "surplus",
    ]
    assert source.num_reads == 0


def test_scanned_layout_stacks_the_unrolled_one():
    """Both layer layouts hold the same numbers."""
    unrolled, scanned = (
        load_params(abstract_model(CONFIG, layer_layout=layout)[1], CONFIG, _Arrays(_arrays()))
        for layout in ("unrolled", "scanned")
    )
    for layer, single in nnx.to_pure_dict(unrolled)["blocks"].items():
        stacked = jax.tree.map(lambda x, i=layer: x[i], nnx.to_pure_dict(scanned)["blocks"])
        jax.tree.map(np.testing.assert_array_equal, stacked, single)


def test_loads_in_the_dtype_and_onto_the_mesh_asked_for():
    """Arrays have the configuration's dtype and the given shardings; progress reaches 100 %."""
    config = replace(CONFIG, dtype="bfloat16")
    _, abstract = abstract_model(config)
    shardings = state_shardings(abstract, make_mesh())
    seen = []
    params = load_params(
        abstract,
        config,
        _Arrays(_arrays()),
        shardings,
        progress=lambda done, count: seen.append((done, count)),
    )
    leaves = jax.tree.leaves(params)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    assert all(isinstance(leaf.sharding, jax.sharding.NamedSharding) for leaf in leaves)
    assert seen[-1] == (len(leaves), len(leaves))


def test_random_params_fit_the_abstract_state():
    """Random parameters have the abstract state's structure and depend on the seed."""
    config = replace(CONFIG, dtype="bfloat16")
    first, again, other = (random_params(config, seed) for seed in (1, 1, 2))
    assert jax.tree.structure(first) == jax.tree.structure(abstract_model(CONFIG)[1])
    embeddings = [np.asarray(x["embedding"].get_value(), "f") for x in (first, again, other)]
    np.testing.assert_array_equal(embeddings[0], embeddings[1])
    assert (embeddings[0] != embeddings[2]).any()


@pytest.mark.parametrize(
    "begin",
    ["_orig_mod.", "module.", "base_model.model.", "language_model.", "module._orig_mod.", ""],
)
@pytest.mark.parametrize(
    "inside", ["model.", "model._fsdp_wrapped_module.", "model.language_model."]
)
def test_names_of_wrappers_are_dropped(begin, inside):
    """What wrappers put before names is no part of them, a bare model's missing prefix included."""
    arrays = _arrays() | {"lm_head.weight": _arrays()["model.embed_tokens.weight"]}
    named = {begin + name.replace("model.", inside, 1): each for name, each in arrays.items()}
    source = under_own_names(_Arrays(named), CONFIG)
    assert source.shapes().keys() == arrays.keys()
    np.testing.assert_array_equal(source.read("model.norm.weight"), arrays["model.norm.weight"])
    bare = {name.removeprefix("model."): each for name, each in _arrays().items()}
    wrapped = _Arrays({begin + name: each for name, each in bare.items()})
    assert under_own_names(wrapped, CONFIG).shapes().keys() == _arrays().keys()


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (lambda a: {"text." + n: x for n, x in a.items()} | {"eye.w": np.ones(2)}, "'text.'"),
        (lambda a: a | {"model.layers.0.self_attn.q_proj.lora_A.weight": np.ones(2)}, "merge"),
        (lambda a: a | {"model.layers.0.mlp.up_proj.qweight": np.ones(2)}, "quantization_config"),
        (
            lambda a: a | {"model.embed_tokens.weight": np.ones((64, 8), "f")},
            "set vocab_size in config.json",
        ),
    ],
)
def test_layouts_that_are_not_read_get_advice_of_their_own(change, advice):
    """The remedy names the prefix, the adapter, the missing format or the padded vocabulary."""
    source = _Arrays(change(_arrays()))
    with pytest.raises(CheckpointError, match=advice):
        load_params(abstract_model(CONFIG)[1], CONFIG, source)


def test_a_head_that_differs_from_the_embedding_counts(caplog):
    """tie_word_embeddings ties what is equal or missing (transformers 5.24.0, `tie_weights`)."""
    arrays = _arrays()
    embedding = arrays["model.embed_tokens.weight"]
    assert fitted(CONFIG, _Arrays(arrays)) is CONFIG
    assert fitted(CONFIG, _Arrays(arrays | {"lm_head.weight": embedding.copy()})) is CONFIG
    head = embedding.copy()
    head[-1, -1] += 1
    assert not fitted(CONFIG, _Arrays(arrays | {"lm_head.weight": head})).tie_word_embeddings
    assert "which differ" in caplog.text
    untied = replace(CONFIG, tie_word_embeddings=False)
    assert fitted(untied, _Arrays(arrays | {"lm_head.weight": embedding})) is untied


def test_a_head_alone_is_the_embedding_too():
    """A file that kept only the head of two tied tensors has both (transformers 5.24.0)."""
    arrays = _arrays()
    head = arrays.pop("model.embed_tokens.weight")
    source = under_own_names(_Arrays(arrays | {"lm_head.weight": head}), CONFIG)
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight"), head)
    assert "lm_head.weight" not in source.shapes()


def test_layers_that_predict_several_tokens_are_not_read(tmp_path):
    """GLM-4.5's folders have one after the last; tensors of other layers are still surplus."""
    write_checkpoint("glm4_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    more = {name.replace(".1.", ".3.", 1): t for name, t in tensors.items() if ".layers.1." in name}
    save_file(tensors | more | {"model.layers.3.eh_proj.weight": np.zeros((2, 2))}, file)
    load_model(tmp_path, progress=False)
    save_file(tensors | {"model.layers.2.eh_proj.weight": np.zeros((2, 2))}, file)
    with pytest.raises(CheckpointError, match="surplus tensor model.layers.2.eh_proj"):
        load_model(tmp_path, progress=False)
