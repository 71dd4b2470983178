"""Loading of encoder weights from Hugging Face folders, without PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from predictor.encoder import Encoder, EncoderConfig

_BERT = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_DISTILBERT = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "mlp_norm": "output_layer_norm",
}


def config_of(folder: Path) -> EncoderConfig:
    """Read the encoder's configuration from a Hugging Face folder.

    Raises:
      ValueError: config.json is missing, or its model type is not supported.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no config.json; pass the folder of a BERT or DistilBERT model"
        )
    return EncoderConfig.from_hf(json.loads(path.read_text(encoding="utf-8")))


def load_encoder(encoder: Encoder, folder: Path) -> None:
    """Set the encoder's parameters to those of model.safetensors.

    Raises:
      ValueError: the file is missing, or tensors are missing or have other shapes; the message
        lists all of them.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no model.safetensors; pass the folder of a BERT or DistilBERT model"
        )
    problems: list[str] = []
    with safe_open(path, framework="numpy") as file:
        names = {_without_prefix(name): name for name in file.keys()}  # noqa: SIM118

        def put(variable: Any, name: str, *, transposed: bool = False) -> None:
            if name not in names:
                problems.append(f"{name} is missing")
                return
            tensor = file.get_tensor(names[name])
            tensor = tensor.T if transposed else tensor
            if tensor.shape != variable.shape:
                problems.append(f"{name} has shape {tensor.shape}, not {variable.shape}")
                return
            variable[...] = jnp.asarray(tensor.astype(np.float32))

        def put_module(module: Any, name: str) -> None:
            if isinstance(module, nnx.LayerNorm):
                put(module.scale, f"{name}.weight")
            else:
                put(module.kernel, f"{name}.weight", transposed=True)
            put(module.bias, f"{name}.bias")

        put(encoder.words.embedding, "embeddings.word_embeddings.weight")
        put(encoder.positions.embedding, "embeddings.position_embeddings.weight")
        if encoder.types is not None:
            put(encoder.types.embedding, "embeddings.token_type_embeddings.weight")
        put_module(encoder.norm, "embeddings.LayerNorm")
        is_distil = any(name.startswith("transformer.layer.") for name in names)
        start, table = ("transformer", _DISTILBERT) if is_distil else ("encoder", _BERT)
        for number, layer in enumerate(encoder.layers):
            for ours, theirs in table.items():
                put_module(getattr(layer, ours), f"{start}.layer.{number}.{theirs}")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))


def _without_prefix(name: str) -> str:
    for prefix in ("bert.", "distilbert."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
