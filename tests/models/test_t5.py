"""T5 has the logits of PyTorch transformers, and reads each kind of config.json."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import T5Config as T5TheirConfig
from transformers.models.t5.modeling_t5 import T5Attention

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import CheckpointError, UnsupportedModelError
from jaxserve.kernels import Rows
from jaxserve.models.batch import AttentionBatch, empty_cache
from jaxserve.models.encoder_decoder import both_ways_biases, causal_biases
from jaxserve.models.families import config_from_hf
from jaxserve.models.families.t5 import T5Config
from jaxserve.models.store import load_model
from jaxserve.steps.encoding import pack_prompts, visible_rows
from tests.common.closeness import assert_close
from tests.common.tiers import some
from tests.models.t5_checkpoints import (
    VARIANTS,
    VOCAB_SIZE,
    random_prompts,
    torch_logits,
    write_checkpoint,
)

PAGE = 4
TABLES = np.random.default_rng(1).permutation(np.arange(1, 41, dtype=np.int32)).reshape(2, 20)
CONFIG = EngineConfig(
    page_size=PAGE, num_pages=41, max_slots=2, max_context=80, max_step_tokens=64, has_encoder=True
)
PROMPTS = [prompt[-30:] for prompt in random_prompts(2, seed=3, longest=60)]
DECODED = np.random.default_rng(2).integers(2, VOCAB_SIZE, (2, 30))


def _starts() -> list[int]:
    return [-(-len(prompt) // PAGE) * PAGE for prompt in PROMPTS]


@partial(jax.jit, static_argnums=0)
def _encode(graphdef, params, batch):
    return nnx.merge(graphdef, params).encode(batch)


@partial(jax.jit, static_argnums=0)
def _write_encoded(graphdef, params, encoded, batch, cache):
    return nnx.merge(graphdef, params).write_encoded(encoded, batch, cache)


@partial(jax.jit, static_argnums=0)
def _step(graphdef, params, tokens, batch, cache):
    model = nnx.merge(graphdef, params)
    hidden, cache = model(tokens, batch, cache)
    return model.logits(hidden), cache


class _Server:
    """Two sequences over a paged cache, whose prompts are encoded together."""

    def __init__(self, folder, layer_layout="unrolled"):
        loaded = load_model(folder, layer_layout=layer_layout, progress=False)
        self.model = nnx.merge(loaded.graphdef, loaded.params)
        self._parts = loaded.graphdef, loaded.params
        config = self.model.config
        self._cache = empty_cache(config, 41, PAGE, "float32", layer_layout)
        batch = jax.tree.map(jnp.asarray, pack_prompts(CONFIG, PROMPTS))
        self.encoded = _encode(*self._parts, batch)
        row, positions = np.asarray(batch.prompt), np.asarray(batch.positions)
        page = np.where(row < 2, TABLES[np.minimum(row, 1), positions // PAGE], 0)
        write = AttentionBatch(
            positions=batch.positions,
            page=jnp.asarray(page),
            offset=batch.positions % PAGE,
            rows=Rows(*np.zeros((4, 2), np.int32), page_table=jnp.asarray(TABLES)),
            max_query_length=None,
        )
        self._cache = _write_encoded(*self._parts, self.encoded, write, self._cache)

    def step(self, spans: list[tuple[int, int]]) -> list[np.ndarray]:
        """Compute [start, end) of each decoder's tokens; return logits of each."""
        lengths = [end - start for start, end in spans]
        row = np.repeat([0, 1], lengths)
        offset = np.concatenate([np.arange(*span) for span in spans])
        tokens = DECODED[row, offset]
        positions = np.asarray(_starts())[row] + offset
        fields = (
            np.cumsum([0, *lengths])[:2],
            lengths,
            np.add(_starts(), [start for start, _ in spans]),
        )
        query_start, query_length, first = (jnp.asarray(f, jnp.int32) for f in fields)
        rows, cross = visible_rows(
            CONFIG,
            jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32),
            query_start=query_start,
            query_length=query_length,
            first_position=first,
            page_table=jnp.asarray(TABLES),
        )
        batch = AttentionBatch(
            positions=jnp.asarray(positions, jnp.int32),
            page=jnp.asarray(TABLES[row, positions // PAGE]),
            offset=jnp.asarray(positions % PAGE, jnp.int32),
            rows=rows,
            max_query_length=1 if lengths == [1, 1] else None,
            cross_rows=cross,
        )
        logits, self._cache = _step(
            *self._parts, jnp.asarray(tokens, jnp.int32), batch, self._cache
        )
        return np.split(np.asarray(logits), [lengths[0]])


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    """A folder, and PyTorch's logits of both sequences."""
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, folder)
    both = zip(PROMPTS, DECODED, strict=True)
    return folder, [torch_logits(model, prompt, decoded.tolist()) for prompt, decoded in both]


@pytest.mark.parametrize("layer_layout", some(["unrolled", "scanned"]))
def test_logits_are_those_of_pytorch(checkpoint, layer_layout):
    """Ragged prompts encoded together, and decoder tokens in chunks and alone, agree."""
    folder, wanted = checkpoint
    server = _Server(folder, layer_layout)
    parts = [server.step([(0, 7), (0, 1)]), server.step([(7, 28), (1, 28)])]
    parts += [server.step([(i, i + 1), (i, i + 1)]) for i in (28, 29)]
    for row in range(2):
        got = np.concatenate([part[row] for part in parts])
        assert_close(got, wanted[row], 1e-4)


@pytest.mark.parametrize(
    "num_buckets, max_distance", some([(32, 128), (8, 20), (16, 9), (64, 1000)])
)
def test_buckets_are_those_of_pytorch(num_buckets, max_distance):
    """Every distance has the bucket of transformers, in both directions."""
    table = torch.arange(num_buckets, dtype=torch.float32)[:, None]
    ours, size = jnp.asarray(table.numpy()), 2 * max_distance + 1
    for both_ways in (True, False):
        config = T5TheirConfig(
            num_heads=1,
            is_decoder=not both_ways,
            relative_attention_num_buckets=num_buckets,
            relative_attention_max_distance=max_distance,
        )
        attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
        attention.load_state_dict({"relative_attention_bias.weight": table}, strict=False)
        # [queries, keys]; of the query in the middle, every offset that has a bucket of its own
        wanted = attention.compute_bias(size, size)[0, 0, max_distance].detach().numpy()
        if both_ways:
            got = np.asarray(both_ways_biases(ours, max_distance))[0]
        else:
            got = np.asarray(causal_biases(ours, max_distance))[0, ::-1]
            wanted = wanted[: max_distance + 1]
        np.testing.assert_array_equal(got, wanted)


# config.json of published models, without what does not matter here.
_SMALL = {
    **dict(model_type="t5", is_encoder_decoder=True, vocab_size=32128, n_positions=512),
    **dict(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8),
    **dict(decoder_start_token_id=0, pad_token_id=0, layer_norm_epsilon=1e-06),
}
_FLAN = _SMALL | dict(
    **dict(d_ff=1024, num_layers=8, num_decoder_layers=8, num_heads=6),
    **dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
)


def test_versions_differ_as_in_transformers():
    """Version 1.0 ties and scales; from 1.1 on, neither, in files of transformers 4 and 5."""
    small, flan = config_from_hf(_SMALL), config_from_hf(_FLAN)
    assert isinstance(small, T5Config) and isinstance(flan, T5Config)
    assert small.scales_logits and small.tie_word_embeddings and not small.is_gated
    assert (small.activation, small.default_context) == ("relu", 1024)
    assert not flan.scales_logits and not flan.tie_word_embeddings and flan.is_gated
    assert (flan.activation, flan.head_dim, flan.hidden_size) == ("gelu_new", 64, 512)
    new = config_from_hf(_FLAN | dict(tie_word_embeddings=True, scale_decoder_outputs=False))
    assert not new.fitted_to({"lm_head.weight": (9, 4)}).tie_word_embeddings
    assert new.fitted_to({"shared.weight": (9, 4)}).tie_word_embeddings
    assert small.fitted_to({"lm_head.weight": (9, 4)}).tie_word_embeddings
    mt5 = config_from_hf(_FLAN | dict(model_type="mt5", tie_word_embeddings=True))
    assert isinstance(mt5, T5Config) and not mt5.scales_logits
    uneven = config_from_hf(_SMALL | dict(num_decoder_layers=2, decoder_start_token_id=None))
    assert isinstance(uneven, T5Config)
    assert (uneven.num_layers, uneven.num_encoder_layers) == (2, 6)
    assert uneven.decoder_start_token_id == 0 and uneven.encoder.num_layers == 6


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(feed_forward_proj="gated-tanh"), "gated-tanh"),
        (dict(feed_forward_proj="glu-gelu"), "glu-gelu"),
        (dict(is_encoder_decoder=False), "is_encoder_decoder"),
        (dict(d_kv=None), "d_kv"),
        (dict(model_type="umt5"), "umt5"),
        (dict(relative_attention_num_buckets=30), "30 buckets"),
        (dict(relative_attention_max_distance=8), "up to 8"),
    ],
)
def test_what_is_not_supported_is_named(change, named):
    """A configuration that would be computed wrongly is refused."""
    with pytest.raises(UnsupportedModelError, match=named):
        config_from_hf(_SMALL | change)


def test_missing_tensors_are_listed(tmp_path):
    """A checkpoint of another depth says which tensors of encoder and decoder are missing."""
    write_checkpoint("t5", tmp_path)
    path = tmp_path / "config.json"
    given = json.loads(path.read_text()) | dict(num_layers=4, num_decoder_layers=3)
    path.write_text(json.dumps(given))
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path, progress=False)
    problems = "\n".join(caught.value.problems)
    assert "encoder.block.3.layer.0.SelfAttention.q.weight" in problems
    assert "decoder.block.2.layer.1.EncDecAttention.v.weight" in problems
    assert len(caught.value.problems) == 8 + 13


def test_whole_sequences_are_refused(tmp_path):
    """Training on one sequence has no meaning for an encoder-decoder model, and says so."""
    write_checkpoint("t5", tmp_path)
    loaded = load_model(tmp_path, progress=False)
    model = nnx.merge(loaded.graphdef, loaded.params)
    with pytest.raises(UnsupportedModelError, match="whole sequences"):
        model.whole_logits(jnp.zeros((1, 4), jnp.int32))
