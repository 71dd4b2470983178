"""Encoders agree with PyTorch's, loaded from folders that PyTorch wrote."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxserve.predictor import EncoderConfig, LengthClassifier
from jaxserve.predictor.encoder import SIZES, Encoder, config_of, load_encoder
from tests.common.tiers import some

SHAPE = dict(vocab_size=99)
BERT = transformers.BertConfig(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=50,
    **SHAPE,
)
DISTILBERT = transformers.DistilBertConfig(
    dim=24, hidden_dim=40, n_layers=3, n_heads=4, max_position_embeddings=50, **SHAPE
)
MODELS = {
    "bert": (transformers.BertModel, BERT),
    "bert with a head": (transformers.BertForSequenceClassification, BERT),
    "distilbert": (transformers.DistilBertModel, DISTILBERT),
    "distilbert with a head": (transformers.DistilBertForSequenceClassification, DISTILBERT),
}


@nnx.jit
def _apply(model: nnx.Module, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    return model(tokens, mask)


@pytest.mark.parametrize("name", some(MODELS))
def test_hidden_states_are_pytorch_s(name, tmp_path):
    """They are equal for ragged texts, whatever the checkpoint's prefix."""
    model_class, config = MODELS[name]
    torch.manual_seed(0)
    theirs = model_class(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(tmp_path)
    ours = Encoder(config_of(tmp_path), rngs=nnx.Rngs(0))
    load_encoder(ours, tmp_path)
    ours.eval()
    random = np.random.default_rng(0)
    tokens = random.integers(0, 99, (4, 13))
    mask = np.arange(13) < np.asarray([13, 1, 7, 12])[:, None]
    base = getattr(theirs, theirs.base_model_prefix, theirs)
    with torch.no_grad():
        wanted = base(torch.tensor(tokens), attention_mask=torch.tensor(mask)).last_hidden_state
    got = np.asarray(_apply(ours, jnp.asarray(tokens), jnp.asarray(mask)))
    wanted = wanted.numpy()
    assert np.linalg.norm((got - wanted)[mask]) < 1e-5 * np.linalg.norm(wanted[mask])


@pytest.mark.release
def test_padding_changes_nothing():
    """A text's logits are the same in a wider batch, whatever the padding is."""
    config = EncoderConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2
    )
    model = LengthClassifier.random(config, 5)
    model.eval()
    tokens, mask = np.full((1, 6), 7), np.ones((1, 6), bool)
    wanted = _apply(model, jnp.asarray(tokens), jnp.asarray(mask))
    tokens = np.random.default_rng(0).integers(0, 50, (3, 16))
    tokens[1, :6] = 7
    mask = np.arange(16) < np.asarray([16, 6, 3])[:, None]
    got = _apply(model, jnp.asarray(tokens), jnp.asarray(mask))[1:2]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_what_a_folder_lacks_is_listed_at_once(tmp_path):
    """All missing and misshapen tensors are named; for folders without files the error says so."""
    with pytest.raises(ValueError, match="no config.json"):
        config_of(tmp_path)
    transformers.BertModel(BERT).save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**given, "num_hidden_layers": 4, "vocab_size": 98})
    )
    encoder = Encoder(config_of(tmp_path), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"word_embeddings.*\(99, 24\), not \(98, 24\).*layer.3"):
        load_encoder(encoder, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no model.safetensors"):
        load_encoder(encoder, tmp_path)


def test_other_models_are_refused():
    """Only the implemented encoders are read."""
    with pytest.raises(ValueError, match="'gpt2' is not supported; use a 'bert'"):
        EncoderConfig.from_hf({"model_type": "gpt2"})
    with pytest.raises(ValueError, match="'relu' is not supported"):
        EncoderConfig.from_hf({"model_type": "bert", "hidden_act": "relu"})


@pytest.mark.parametrize(
    ("size", "wanted"), some([("22m", 22), ("66m", 66), ("110m", 109), ("340m", 335)])
)
def test_sizes_are_the_paper_s(size, wanted):
    """They agree with table 5 of S3, in millions of parameters."""
    shapes = nnx.eval_shape(lambda: Encoder(SIZES[size], rngs=nnx.Rngs(0)))
    leaves = nnx.to_flat_state(nnx.state(shapes, nnx.Param)).leaves
    count = sum(int(np.prod(leaf.shape)) for leaf in leaves)
    assert count / 1e6 == pytest.approx(wanted, abs=1.5)
