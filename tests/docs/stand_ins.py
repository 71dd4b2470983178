"""Tiny models, adapters and predictors under the names that documentation uses.

A page runs in a folder that has those that it names, and finds them there as a user finds his own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.predictor import LengthBuckets, LengthProbe, ProbeConfig, Refinement
from jaxserve.predictor.probe import ProbeHead
from jaxserve.testing import write_chat_model
from tests.models import gguf_models, hf_checkpoints, t5_checkpoints
from tests.models.quantised_checkpoints import gptq, write_folders
from tests.predictor.tiny import examples, tiny_predictor

HIDDEN = 288


def _model(folder: Path, config: str, kind: str = "AutoModelForCausalLM", **fields: Any) -> None:
    """Write random weights, and a tokenizer of bytes with a chat template."""
    folder.mkdir(parents=True)
    write_chat_model(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "eos_token_id": 256, "pad_token_id": 257} | fields
    made = getattr(transformers, config)(**sizes)
    getattr(transformers, kind).from_config(made).save_pretrained(folder)


def _llama(folder: Path, heads: int, kv_heads: int, layers: int, **fields: Any) -> None:
    sizes = {
        "hidden_size": HIDDEN if heads == 9 else 8 * heads,
        "intermediate_size": 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
    }
    _model(folder, **{"config": "LlamaConfig"} | sizes | fields)


def _reranker(folder: Path) -> None:
    _llama(folder, 4, 2, 2)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["no", "yes"])
    backend.save(str(folder / "tokenizer.json"))


def _variant(folder: Path, name: str) -> None:
    config, fields, _ = hf_checkpoints.VARIANTS[name]
    _model(folder, config, **fields | {"vocab_size": 260})


def _t5(folder: Path) -> None:
    sizes = t5_checkpoints.SIZES | {"vocab_size": 260}
    _model(folder, "T5Config", "AutoModelForSeq2SeqLM", **sizes)


def _gptq(folder: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    folder.parent.mkdir(exist_ok=True)
    quantised, _, _ = write_folders(folder.parent, config, gptq, bits=4, group=32)
    quantised.rename(folder)


def _gguf(path: Path) -> None:
    gguf_models.write_gguf(path, tokenizer=gguf_models.TOKENIZER)


def _of_new_architecture(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "my_new_model", "hidden_size": 64}')


def _adapter(folder: Path, **settings: Any) -> None:
    """Write a LoRA or DoRA of the default model's stand-in, as PEFT does."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    rng, arrays = np.random.default_rng(0), {}
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        arrays[f"{module}.lora_A.weight"] = rng.normal(size=(8, HIDDEN)).astype(np.float32)
        arrays[f"{module}.lora_B.weight"] = rng.normal(size=(HIDDEN, 8)).astype(np.float32)
        if settings:
            arrays[f"{module}.lora_magnitude_vector"] = np.ones(HIDDEN, np.float32)
    save_file(arrays, folder / "adapter_model.safetensors")


def _predictor(folder: Path) -> None:
    predictor, held_out = tiny_predictor(), examples(70)
    predictor.calibrate([e.prompt for e in held_out], [e.output_length for e in held_out])
    predictor.save(folder)


def _probe(folder: Path) -> None:
    config = ProbeConfig(layer=1, width=HIDDEN, hidden_size=8)
    buckets = LengthBuckets.logarithmic(64, 6)
    head = ProbeHead(config, buckets.num, rngs=nnx.Rngs(3))
    chances = np.full(buckets.num, 1 / buckets.num)
    LengthProbe(config, head, Refinement(buckets=buckets, marginal=chances, interval=4)).save(
        folder
    )


# Heads are those of the real models, and layers where they are cut into stages: what a mesh refuses
# is refused here, too.
STAND_INS: dict[str, Callable[[Path], None]] = {
    "smollm2-135m": partial(_llama, heads=9, kv_heads=3, layers=2),
    "meta-llama/Llama-3.2-1B-Instruct": partial(_llama, heads=32, kv_heads=8, layers=16),
    "my-model": partial(_llama, heads=4, kv_heads=2, layers=1),
    "my-model.Q8_0.gguf": _gguf,
    "my-new-model": _of_new_architecture,
    "large": partial(_llama, heads=4, kv_heads=2, layers=2),
    "small": partial(_llama, heads=2, kv_heads=2, layers=1),
    "Qwen/Qwen3-Embedding-0.6B": partial(_llama, heads=16, kv_heads=8, layers=2, kind="AutoModel"),
    "Qwen/Qwen3-Reranker-0.6B": _reranker,
    "reviews": partial(
        _llama, heads=4, kv_heads=2, layers=1, kind="AutoModelForSequenceClassification"
    ),
    "Llama-3.1-8B-Instruct-GPTQ-INT4": _gptq,
    "bamba-9b": partial(_variant, name="bamba"),
    "flan-t5-small": _t5,
    "runs/poems": _adapter,
    "runs/dora": partial(_adapter, use_dora=True),
    "lengths": _predictor,
    "my-probe": _probe,
    "my-predictor": _predictor,
}


def write_stand_ins(text: str, folder: Path) -> None:
    """Write those whose names are in the text of a page."""
    for name, write in STAND_INS.items():
        if f'"{name}"' in text or f'"./{name}"' in text:
            write(folder / name)
