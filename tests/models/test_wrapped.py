"""The text models of models of images and text, as transformers 5.24.0 computes them."""

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

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.families import WRAPPERS, config_from_hf
from jaxserve.models.store import load_model
from tests.common.tiers import some
from tests.models.hf_checkpoints import SIZES

TOKENS = [5, 7, 9, 11, 3, 2, 8, 5, 60, 1]
_WIDE = SIZES | {"head_dim": 16}
_TOWER = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=16,
    patch_size=8,
)
_QWEN_TOWER = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=48)
_ROTATION = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])

_YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=4)
_DELTA_RULE = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)

# By the model type: class, text, images.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        _WIDE | {"query_pre_attn_scalar": 8, "sliding_window": 4},
        _TOWER | {"model_type": "siglip_vision_model"},
    ),
    "gemma4": (
        "Gemma4",
        SIZES
        | dict(
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
            head_dim=12,
            global_head_dim=20,
            vocab_size_per_layer_input=101,
            hidden_size_per_layer_input=14,
        ),
        dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
        ),
    ),
    "mistral3": (
        "Mistral3",
        _WIDE
        | {"model_type": "ministral3", "pad_token_id": None}
        | {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.4}},
        _TOWER | {"model_type": "pixtral", "head_dim": 8},
    ),
    "llava": (
        "Llava",
        SIZES | {"model_type": "llama"},
        _TOWER | {"model_type": "clip_vision_model"},
    ),
    "llava_next": (
        "LlavaNext",
        SIZES | {"model_type": "mistral", "sliding_window": None},
        _TOWER | {"model_type": "clip_vision_model"},
    ),
    "llava_onevision": (
        "LlavaOnevision",
        SIZES | {"model_type": "qwen2"},
        _TOWER | {"model_type": "siglip_vision_model"},
    ),
    "internvl": ("InternVL", _WIDE | {"model_type": "qwen3"}, _TOWER),
    "qwen2_vl": (
        "Qwen2VL",
        SIZES | {"rope_parameters": _ROTATION},
        dict(depth=1, embed_dim=16, hidden_size=48, num_heads=2),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        SIZES | {"rope_parameters": _ROTATION},
        _QWEN_TOWER | {"fullatt_block_indexes": [0]},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        _WIDE | {"rope_parameters": _ROTATION | {"mrope_interleaved": True}},
        _QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {k: v for k, v in _WIDE.items() if k != "intermediate_size"}
        | _DELTA_RULE
        | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20)
        | {"rope_parameters": _ROTATION | {"mrope_interleaved": True}},
        _QWEN_TOWER,
    ),
    "qwen3_5": (
        "Qwen3_5",
        _WIDE | _DELTA_RULE | {"rope_parameters": _ROTATION | {"mrope_interleaved": True}},
        _QWEN_TOWER,
    ),
    "llama4": (
        "Llama4",
        _WIDE | dict(model_type="llama4_text", intermediate_size_mlp=60, num_local_experts=4),
        _TOWER
        | dict(
            model_type="llama4_vision_model",
            vision_output_dim=16,
            projector_input_dim=16,
            projector_output_dim=16,
        ),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _WIDE
        | dict(
            rope_parameters=_ROTATION | {"mrope_interleaved": True},
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,  # of square matrices as gates and ups
            mlp_only_layers=[1],
        ),
        _QWEN_TOWER | {"deepstack_visual_indexes": [0]},
    ),
}


def _saved(kind: str, folder: Path) -> np.ndarray:
    """Save a model of random weights, and return its logits of text."""
    name, text, images = MODELS[kind]
    torch.manual_seed(0)
    given = {"text_config": text, "vision_config": images}
    if kind == "gemma3":
        given |= {"mm_tokens_per_image": 4}
    config = getattr(transformers, f"{name}Config")(**given)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(folder)
    if kind == "llama4":  # the whole model of transformers 5.24.0 fails without images
        model = model.language_model
    with torch.no_grad():
        return model(input_ids=torch.tensor([TOKENS])).logits[0].numpy()


def _logits(folder: Path) -> np.ndarray:
    loaded = load_model(folder, dtype="float32", progress=False)
    model: Any = nnx.merge(loaded.graphdef, loaded.params)
    return np.asarray(model.whole_logits(jnp.array([TOKENS])))[0]


def _rename(folder: Path, *pairs: tuple[str, str]) -> None:
    """Replace the beginnings of the names of a folder's tensors."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for old, new in pairs:
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor
            for name, tensor in tensors.items()
        }
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def test_all_wrappers_are_tested():
    assert set(MODELS) == set(WRAPPERS)


@pytest.mark.parametrize("kind", some(MODELS, 0, 5))
def test_text_has_the_logits_of_transformers(kind: str, tmp_path: Path, caplog):
    """The text model is served; one line says that the tensors for images are ignored."""
    wanted = _saved(kind, tmp_path)
    np.testing.assert_allclose(_logits(tmp_path), wanted, atol=1e-4)
    said = [r.getMessage() for r in caplog.records if "tensors for images" in r.getMessage()]
    assert len(said) == 1 and "its text model is served" in said[0]


@pytest.mark.parametrize(
    ("kind", "pairs"),
    some(
        [
            # As transformers 4.52 and later save in memory, and 4.51 and earlier on disk.
            (
                "gemma3",
                [
                    ("language_model.model.", "model.language_model."),
                    ("vision_tower.", "model.vision_tower."),
                    ("multi_modal_projector.", "model.multi_modal_projector."),
                ],
            ),
            (
                "qwen3_vl",
                [("model.language_model.", "language_model.model."), ("lm_", "language_model.lm_")],
            ),
            (
                "qwen2_vl",
                [("visual.", "model.visual."), ("model.layers", "model.language_model.layers")],
            ),
        ]
    ),
)
def test_names_of_other_versions_are_read(kind: str, pairs: list[tuple[str, str]], tmp_path: Path):
    """Where all tensors of the text are under another beginning, the logits are the same."""
    wanted = _saved(kind, tmp_path)
    if kind == "qwen2_vl":
        pairs = [*pairs, ("model.embed", "model.language_model.embed")]
        pairs = [*pairs, ("model.norm", "model.language_model.norm")]
    _rename(tmp_path, *pairs)
    np.testing.assert_allclose(_logits(tmp_path), wanted, atol=1e-4)


@pytest.mark.release
def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path):
    """They stand beside the text model, whose names all have the wrapper's part."""
    wanted = _saved("qwen3_5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file) | {"mtp.fc.weight": torch.zeros(4, 8)}
    assert any(name.startswith("model.language_model.") for name in tensors)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    np.testing.assert_allclose(_logits(tmp_path), wanted, atol=1e-4)


def test_the_text_of_qwen_2_vl_may_be_outside(tmp_path: Path):
    """Its published folders have the text's fields beside vision_config, and "mrope" as a type."""
    wanted = _saved("qwen2_vl", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    del text["rope_parameters"]
    rotation = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    path.write_text(json.dumps({**text, **config, **rotation}))
    np.testing.assert_allclose(_logits(tmp_path), wanted, atol=1e-4)


@pytest.mark.fast
def test_a_wrapper_without_text_is_refused():
    """The error says what is missing; the wrapper's word on ties counts."""
    with pytest.raises(UnsupportedModelError, match=r"'gemma3' .* needs an object text_config"):
        config_from_hf({"model_type": "gemma3", "text_config": 3})
    with pytest.raises(UnsupportedModelError, match=r"'strange' is not supported"):
        config_from_hf({"model_type": "llava", "text_config": {"model_type": "strange"}})
    text = {"model_type": "mistral", "tie_word_embeddings": False}
    assert config_from_hf({"model_type": "mistral3", "text_config": text}).tie_word_embeddings
