"""Tiny random checkpoints written by PyTorch transformers, and its logits for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB_SIZE = 101

_SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    # Wide enough that logits differ by more than rounding.
    initializer_range=0.3,
)

# Family -> (config class, what it sets beside _SIZES, arguments of save_pretrained).
FAMILIES = {
    "llama": ("LlamaConfig", dict(head_dim=16, attention_bias=True, mlp_bias=True), {}),
    "llama3_rope": (
        "LlamaConfig",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
        dict(max_shard_size="40KB"),
    ),
    "linear_rope": (
        "LlamaConfig",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)),
        {},
    ),
    "yarn_rope": (
        "LlamaConfig",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=500.0,
                factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
        {},
    ),
    "mistral": ("MistralConfig", dict(sliding_window=7, head_dim=16), {}),
    "qwen2": (
        "Qwen2Config",
        dict(use_sliding_window=True, sliding_window=9, max_window_layers=1),
        {},
    ),
    "qwen3": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True), {}),
    "smollm2": ("LlamaConfig", dict(tie_word_embeddings=True, rope_theta=1e5), {}),
}


def write_checkpoint(family: str, folder: Path, dtype: torch.dtype = torch.float32):
    """Write a random checkpoint of `family` to `folder`; returns it in float32."""
    config_class, extra, save_options = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**{**_SIZES, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        # Biases and norms start at constants, which would hide a mistake.
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.2)
    model.to(dtype).save_pretrained(folder, **save_options)
    # Read back, because .to(bfloat16) rounds the rotary frequencies for good.
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def torch_logits(model, tokens: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocab] of one sequence."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].numpy()


def greedy_shortfall(model, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """How far, at most, PyTorch's logit of a token of `answer` is below its best one there.

    0 means that PyTorch's own greedy answer is the same.
    """
    logits = torch_logits(model, np.asarray([*prompt, *answer[:-1]]))[len(prompt) - 1 :]
    return float((logits.max(-1) - logits[np.arange(len(answer)), answer]).max())
