"""Every family gives the logits that PyTorch transformers gives for the same checkpoint."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxserve.models.families import config_from_hf
from jaxserve.models.loading import is_bare
from jaxserve.models.safetensors_source import SafetensorsSource
from tests.common.tiers import some
from tests.models.hf_checkpoints import (
    FURTHER,
    MAIN,
    VARIANTS,
    VOCAB_SIZE,
    torch_logits,
    write_checkpoint,
)
from tests.models.serving import Server

PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 37)


def _relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.fixture(
    scope="module",
    params=some(VARIANTS, *(i for i, name in enumerate(VARIANTS) if name not in FURTHER)),
)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(request.param, folder)
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    assert not is_bare(SafetensorsSource(folder), config), "it is taken for a model without a head"
    return folder, torch_logits(model, PROMPT)


_for_main = pytest.mark.parametrize(
    "checkpoint", some(VARIANTS, *map(list(VARIANTS).index, MAIN)), indirect=True
)


@pytest.mark.release
def test_prefill_in_one_go(checkpoint):
    """A whole prompt in one step, with padding after it, has PyTorch's logits."""
    folder, wanted = checkpoint
    (got,) = Server.from_folder(folder).step([(0, PROMPT)])
    assert _relative_error(got, wanted) < 1e-4


@_for_main
def test_chunked_prefill_then_decode(checkpoint):
    """Chunks of a prompt, then single tokens, have PyTorch's logits through the paged cache."""
    folder, wanted = checkpoint
    server = Server.from_folder(folder)
    got = [*server.step([(0, PROMPT[:14])]), *server.step([(0, PROMPT[14:29])])]
    for i in range(29, 37):
        got += server.decode({0: PROMPT[i]})
    assert _relative_error(np.concatenate(got), wanted) < 1e-4


def test_mixed_batch(checkpoint):
    """A sequence that decodes beside another's prefill has the logits that it has alone."""
    folder, wanted = checkpoint
    server = Server.from_folder(folder)
    server.step([(0, PROMPT[:20]), (1, PROMPT[:3])])
    got = server.step([(0, PROMPT[20:21]), (1, PROMPT[3:12]), (2, PROMPT[:17])])
    for logits, part in zip(got, (slice(20, 21), slice(3, 12), slice(0, 17)), strict=True):
        assert _relative_error(logits, wanted[part]) < 1e-4


@pytest.mark.release
def test_whole_sequences(checkpoint):
    """Without a cache, as in training, logits are PyTorch's; padding has no effect."""
    folder, wanted = checkpoint
    tokens = jnp.stack([jnp.asarray(PROMPT), jnp.asarray(PROMPT).at[30:].set(0)])
    model = Server.from_folder(folder).model
    got = np.asarray(nnx.jit(lambda model: model.whole_logits(tokens))(model))
    assert _relative_error(got[0], wanted) < 1e-4
    assert _relative_error(got[1, :30], wanted[:30]) < 1e-4


@pytest.mark.parametrize(
    "variant", some(["llama3_rope", "mixtral", "mamba2", "mistral", "gpt2", "gpt_neox"], 0, 1, 2)
)
def test_scanned_layers(tmp_path, variant):
    """Scanned layers over one cache buffer have PyTorch's logits too."""
    model = write_checkpoint(variant, tmp_path)
    server = Server.from_folder(tmp_path, layer_layout="scanned")
    got = server.step([(0, PROMPT[:36])]) + server.decode({0: PROMPT[36]})
    assert _relative_error(np.concatenate(got), torch_logits(model, PROMPT)) < 1e-4


def test_bfloat16_checkpoint_computed_in_float32(tmp_path):
    """bfloat16 weights widen to float32 without loss, so the same tolerance holds."""
    model = write_checkpoint("smollm2", tmp_path, torch.bfloat16)
    (got,) = Server.from_folder(tmp_path).step([(0, PROMPT)])
    assert _relative_error(got, torch_logits(model, PROMPT)) < 1e-4


def test_sharded_checkpoint_is_tested(tmp_path):
    """At least one of the variants above is written as several safetensors files."""
    write_checkpoint("llama3_rope", tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
