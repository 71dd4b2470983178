"""Folders of gpt-oss with experts in mxfp4: all numbers are kept exactly, in eight bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from flax import nnx
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import CheckpointError
from jaxserve.models.quantised import QuantisedWeight
from jaxserve.models.store import load_model
from jaxserve.sharding import make_mesh
from tests.common.closeness import assert_close

TOKENS = [5, 7, 9, 11, 3, 2, 8, 5, 60, 1]
EXPERTS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor], np.ndarray]:
    """A folder, the numbers of its experts, and PyTorch's logits with these."""
    path = tmp_path_factory.mktemp("mxfp4")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=64,  # as wide as the residual stream, like gpt-oss itself
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=7,
        max_position_embeddings=256,
        initializer_range=0.2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    )
    model = transformers.GptOssForCausalLM(config).eval()
    model.save_pretrained(path)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    numbers = {}
    for name, tensor in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            count, width, out = tensor.shape
            groups = (count, out, width // 32)
            blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, groups, dtype=torch.uint8)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.load_state_dict(model.state_dict() | numbers)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()
    safetensors.torch.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((path / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    about["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=skipped)
    (path / "config.json").write_text(json.dumps(about))
    return path, numbers, logits


@pytest.mark.parametrize("mesh", [None, pytest.param("two", marks=pytest.mark.release)])
def test_numbers_are_those_of_transformers(folder, mesh):
    """Experts stay in few bits, and are restored without an error."""
    path, numbers, logits = folder
    loaded = load_model(path, progress=False, mesh=None if mesh is None else make_mesh(tensor=2))
    model: Any = nnx.merge(loaded.graphdef, loaded.params)
    for layer, block in enumerate(model.blocks):
        own = block.mlp.experts
        for weight, name in ((own.gate_up, "gate_up_proj"), (own.down, "down_proj")):
            assert isinstance(weight, QuantisedWeight)
            wanted = numbers[f"model.layers.{layer}.mlp.experts.{name}"].numpy()
            got = np.asarray(weight.dequantised())  # [experts, *out, in]
            if name == "gate_up_proj":
                got = got.transpose(0, 3, 2, 1).reshape(wanted.shape)
            else:
                got = got.transpose(0, 2, 1)
            np.testing.assert_array_equal(got, wanted)
    if mesh is None:
        got = np.asarray(model.whole_logits(jnp.asarray([TOKENS])))[0]
        # On a CPU, products with weights in few bits round activations to eight bits.
        assert_close(got, logits, 0.05)


@pytest.mark.release
def test_answers_do_not_depend_on_the_batch(folder):
    """A runtime serves the folder, with a prompt alone and in a batch."""
    prompts = [TOKENS, TOKENS[3:], TOKENS[:4] * 5]
    options: dict[str, Any] = dict(max_slots=3, max_context=64, progress=False, warmup=False)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with Runtime.from_pretrained(str(folder[0]), dtype="float32", **options) as rt:
        together = [each.token_ids for each in rt.generate(prompts, params)]
        assert [rt.generate(prompt, params).token_ids for prompt in prompts] == together


def test_missing_scales_are_named(folder, tmp_path):
    """The error names the tensor whose shape is wrong, or which is missing."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder[0] / name).read_bytes())
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="layers.1.mlp.experts.down_proj_scales .* None"):
        load_model(tmp_path, progress=False)
