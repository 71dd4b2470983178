"""Folders with weights in few bits for vLLM, in the format that llm-compressor writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from jaxserve.models.gguf_source import GGUFSource

# Inputs that share a scale with 4 bits, as in Q4_0.
_GROUP = 32


def write_config(model: GGUFSource, folder: Path, **more: Any) -> None:
    """Make a folder with the model's config.json."""
    folder.mkdir()
    # Without it vLLM takes the model for one that embeds.
    architectures = [f"{model.config['model_type'].capitalize()}ForCausalLM"]
    config = {**model.config, "architectures": architectures, **more}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_compressed_tensors(model: GGUFSource, folder: Path, bits: int) -> None:
    """Write a model with its layers' weights in few bits; embedding and head stay in float32.

    8 bits: W8A8, with a scale for each output and, of activations, for each token. 4 bits: W4A16,
    with a scale for each group of an output.
    """
    is_group = bits == 4
    weights = {
        **{"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False},
        **{"strategy": "group" if is_group else "channel", "observer": "minmax"},
        "group_size": _GROUP if is_group else None,
    }
    inputs = {
        **{"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True},
        "strategy": "token",
    }
    format = "pack-quantized" if is_group else "int-quantized"
    group = {
        **{"targets": ["Linear"], "weights": weights, "format": format},
        "input_activations": None if is_group else inputs,
    }
    write_config(
        model,
        folder,
        quantization_config={
            **{"quant_method": "compressed-tensors", "format": format},
            **{"quantization_status": "compressed", "ignore": ["lm_head"]},
            "config_groups": {"group_0": group},
        },
    )
    tensors: dict[str, np.ndarray] = {}
    for name in tqdm(model.shapes(), desc="writing compressed tensors", leave=False, delay=2):
        values = np.ascontiguousarray(model.read(name), np.float32)
        module, _, last = name.rpartition(".")
        if values.ndim == 2 and last == "weight" and ".layers." in name:
            rounded = _packed(values) if is_group else _rounded(values)
            tensors |= {f"{module}.{part}": each for part, each in rounded.items()}
        else:
            tensors[name] = values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _rounded(weight: np.ndarray) -> dict[str, np.ndarray]:
    scales = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-10) / 127
    return {"weight": np.round(weight / scales).astype(np.int8), "weight_scale": scales}


def _packed(weight: np.ndarray) -> dict[str, np.ndarray]:
    groups = weight.reshape(len(weight), -1, _GROUP)
    scales = np.maximum(np.abs(groups).max(axis=-1), 1e-10) / 7.5
    codes = np.clip(np.round(groups / scales[..., None]), -8, 7).astype(np.int8) + 8
    nibbles = codes.astype(np.uint32).reshape(len(weight), -1, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    return {
        "weight_packed": words.view(np.int32),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape, np.int64),
    }
