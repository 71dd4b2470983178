"""Checkpoints of random tensors, adapters of theirs as PEFT stores them, and PEFT's formula."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import transformers
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.models.families import config_from_hf, family_of
from jaxserve.models.loading import abstract_model, load_params
from tests.models.hf_checkpoints import VARIANTS

RANK, SCALE = 3, 0.7
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none"}
# Families that name, order and transpose their matrices differently.
FAMILIES = (
    *("llama", "qwen3_moe", "qwen2_moe", "gpt2", "opt", "gptj", "gpt_neox", "phi3"),
    *("gemma4", "gemma2"),
)
# Families with recurrent layers, which serve merged adapters only.
RECURRENT = ("lfm2", "bamba", "mamba", "qwen3_5", "qwen3_next", "nemotron_h")


class Arrays:
    """A checkpoint of random arrays."""

    where = "a test"

    def __init__(self, arrays):
        self.arrays = arrays

    def shapes(self):
        return {name: array.shape for name, array in self.arrays.items()}

    def dtypes(self):
        return {name: "F32" for name in self.arrays}

    def read(self, name, index=None):
        return self.arrays[name] if index is None else self.arrays[name][index]


def config_of(variant: str):
    kind, fields, _ = VARIANTS[variant]
    return config_from_hf(getattr(transformers, kind)(**fields).to_dict())


def checkpoint_of(config, rng) -> dict[str, np.ndarray]:
    """Return random tensors of every name that the family reads."""
    table = family_of(config).weights(config)
    arrays = {}
    for path, variable in nnx.to_flat_state(abstract_model(config)[1]):
        weight = table[".".join(part for part in path if not isinstance(part, int))]
        layer = {"layer": path[1]} if path[0] == "blocks" else {}
        for name, shape in weight.needed(variable.get_value().shape, **layer):
            arrays[name] = rng.standard_normal(shape).astype(np.float32)
    return arrays


def _is_adapted(name: str, array: np.ndarray) -> bool:
    """Return whether a tensor is a matrix of a layer, and neither an expert's nor a router's."""
    in_layer = re.search(r"\.\d+\.", name) is not None
    others = (".experts.", ".gate.weight", ".gate.wg.", "expert_gate.weight", "norm", "router")
    is_matrix = array.ndim == 2 and name.endswith("weight")
    return in_layer and is_matrix and not any(part in name for part in others)


def adapter_of(checkpoint, variant: str, rng) -> dict[str, np.ndarray]:
    """Return A [rank, in] and B [out, rank] for every matrix; GPT-2 stores [in, out]."""
    found = {}
    for name, array in checkpoint.items():
        if _is_adapted(name, array):
            width, height = array.shape if variant == "gpt2" else array.shape[::-1]
            module = name.removesuffix(".weight")
            found[f"{module}.lora_A.weight"] = rng.standard_normal((RANK, width))
            found[f"{module}.lora_B.weight"] = rng.standard_normal((height, RANK))
    return {name: array.astype(np.float32) for name, array in found.items()}


def magnitudes_of(adapter, rng) -> dict[str, np.ndarray]:
    """Return the vector [out] that makes a DoRA of each module's matrices."""
    return {
        name.replace(".lora_B.weight", ".lora_magnitude_vector"): np.abs(
            rng.standard_normal(len(array)).astype(np.float32)
        )
        for name, array in adapter.items()
        if name.endswith(".lora_B.weight")
    }


def merged_checkpoint(checkpoint, adapter, variant: str, scale: float = SCALE):
    """Return the checkpoint with PEFT's formulas of LoRA and DoRA applied to its tensors."""
    merged = dict(checkpoint)
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            weight = checkpoint[f"{module}.weight"]
            new = weight.T if variant == "gpt2" else weight
            new = new + scale * adapter[f"{module}.lora_B.weight"] @ adapter[name]
            if (magnitude := adapter.get(f"{module}.lora_magnitude_vector")) is not None:
                new = magnitude[:, None] * new / np.linalg.norm(new, axis=1, keepdims=True)
            merged[f"{module}.weight"] = new.T if variant == "gpt2" else new
    return merged


def params_of(config, arrays, layer_layout="unrolled"):
    _, abstract = abstract_model(config, layer_layout=layer_layout)
    return dict(nnx.to_flat_state(load_params(abstract, config, Arrays(arrays))))


def folder_of(path, arrays, **settings):
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | settings))
    named = {f"base_model.model.{name}": array for name, array in arrays.items()}
    save_file(named, path / "adapter_model.safetensors")
    return path
