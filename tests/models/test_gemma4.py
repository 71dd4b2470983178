"""What Gemma 4 has and other families do not: shared keys, and layers of differing heads."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from jaxserve import Runtime
from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.batch import empty_cache
from jaxserve.models.families import config_from_hf
from jaxserve.sharding import StagePlan
from jaxserve.testing import OPTIONS
from tests.common.closeness import assert_close
from tests.models.hf_checkpoints import VARIANTS, VOCAB_SIZE, torch_logits, write_checkpoint
from tests.models.serving import Server


def _given(**changes):
    return transformers.Gemma4TextConfig(**VARIANTS["gemma4"][1] | changes).to_dict()


def test_layers_with_shared_keys_have_no_pages():
    """Four of seven layers have their own; the others read the last one of their type."""
    config = config_from_hf(_given())
    assert config.kv_sources == (None,) * 4 + (2, 3, 3)
    assert config.num_attention_layers == 4 and config.places == (0, 1, 2, 3, 2, 3, 3)
    assert len(empty_cache(config, 3, 4, "float32", "unrolled").k_pages) == 4


def test_published_sizes_and_those_that_transformers_writes_agree():
    """The former has global_head_dim, the latter a table of layers."""
    published = {"model_type": "gemma4_text"} | VARIANTS["gemma4"][1]
    config = config_from_hf(published)
    assert config == config_from_hf(_given())
    assert (config.whole.head_dim, config.whole.num_kv_heads) == (20, 1)
    assert (config.windowed.head_dim, config.windowed.num_kv_heads) == (12, 2)


@pytest.mark.fast
def test_a_null_table_of_layers_means_equal_heads():
    """A null is not absent: transformers has no heads of other sizes then, whatever the fields."""
    fields = {**VARIANTS["gemma4_plain"][1], "per_layer_config": None}
    config = config_from_hf({"model_type": "gemma4_text", **fields})
    layers = transformers.Gemma4TextConfig(**fields).per_layer_config
    assert [layer.head_dim for layer in layers] == [12, 12]
    assert config.whole == config.windowed and config.head_dim == 12


@pytest.mark.release
def test_tensors_of_shared_keys_are_not_read(tmp_path):
    """Published checkpoints have projections of keys in layers that read those of others."""
    model = write_checkpoint("gemma4", tmp_path)
    path = tmp_path / "model.safetensors"
    more = {f"model.layers.{layer}.self_attn.k_proj.weight": torch.ones(2, 3) for layer in (4, 6)}
    safetensors.torch.save_file(safetensors.torch.load_file(path) | more, path, {"format": "pt"})
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 20)
    (got,) = Server.from_folder(tmp_path).step([(0, tokens)])
    wanted = torch_logits(model, tokens)
    assert_close(got, wanted, 1e-4)


@pytest.mark.release
def test_stages_are_refused(tmp_path):
    """A later stage has neither tokens nor the keys of the layers before it."""
    write_checkpoint("gemma4", tmp_path)
    with pytest.raises(UnsupportedModelError, match="stages are not supported for Gemma 4"):
        Runtime.from_pretrained(str(tmp_path), mesh=StagePlan.of([4, 3]), **OPTIONS)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(enable_moe_block=True), "enable_moe_block=True"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(use_bidirectional_attention="all"), "'all' is not supported"),
        (dict(num_kv_shared_layers=6), "num_kv_shared_layers=6"),
        (dict(num_key_value_heads=3, num_global_key_value_heads=2), "3 and 2 .* divide"),
        (dict(per_layer_config={1: {"head_dim": 20}}), "per_layer_config"),
        (dict(per_layer_config={0: {"sliding_window": 3}}), "per_layer_config"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    """Each error names the field."""
    given = {"model_type": "gemma4_text"} | VARIANTS["gemma4"][1] | changes
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(given)
