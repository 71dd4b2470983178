"""The model that fleets of tests serve, and their options."""

from __future__ import annotations

from typing import Any

from jaxserve.testing.tiny import VOCAB_SIZE

CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
OPTIONS: dict[str, Any] = dict(
    load="random",
    max_slots=4,
    max_step_tokens=32,
    kv_memory="8MB",
    seed=3,
    warmup=False,
    progress=False,
)
