"""Tiny random T5 checkpoints written by PyTorch transformers, and PyTorch's answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB_SIZE = 101
END = 1

SIZES = dict(
    vocab_size=VOCAB_SIZE,
    d_model=48,
    d_kv=16,  # not d_model / num_heads
    d_ff=80,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    decoder_start_token_id=0,
)

# Part of a name -> standard deviation of random weights, so that answers do not repeat themselves.
_SPREADS = {
    "relative": 1.0,
    "shared": 0.2,
    "lm_head": 0.5,
    ".q.": 0.2,
    ".k.": 0.2,
    "Attention": 0.6,
}

# Variant -> (config class, fields beside SIZES, whether the head has weights of its own).
VARIANTS = {
    "t5": ("T5Config", {}, False),
    "t5_v1_1": (
        "T5Config",
        dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        True,
    ),
    "t5_v1_1_tied": (
        "T5Config",
        dict(feed_forward_proj="gated-silu", tie_word_embeddings=False, num_decoder_layers=3),
        False,
    ),
    "mt5": ("MT5Config", dict(decoder_start_token_id=2), True),
}


def write_checkpoint(variant: str, folder: Path, seed: int = 7):
    """Write a random checkpoint of `variant` to `folder`; return the model, read back."""
    config_class, fields, has_head = VARIANTS[variant]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**SIZES, **fields})
    kind = getattr(transformers, config_class.replace("Config", "ForConditionalGeneration"))
    model = kind(config)
    if has_head:
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB_SIZE, config.d_model))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
        else:
            spreads = [std for part, std in _SPREADS.items() if part in name]
            torch.nn.init.normal_(parameter, std=spreads[0] if spreads else 0.2)
    model.save_pretrained(folder)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def random_prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Return prompts of 1 to `longest` tokens, the last of them the end token."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest, count)
    return [[*rng.integers(2, VOCAB_SIZE, length).tolist(), END] for length in lengths]


def torch_logits(model, prompt: Sequence[int], decoder: Sequence[int]) -> np.ndarray:
    """Return the logits of a decoder's tokens after a prompt, float32 [tokens, vocab]."""
    with torch.no_grad():
        return (
            model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([decoder]))
            .logits[0]
            .numpy()
        )


def torch_encoded(model, prompt: Sequence[int]) -> np.ndarray:
    """Return the encoder's output for a prompt, float32 [tokens, d_model]."""
    with torch.no_grad():
        return model.encoder(torch.tensor([prompt])).last_hidden_state[0].numpy()


def greedy(model, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return PyTorch's greedy answer of `num_tokens` tokens, whether it ends before or not."""
    tokens = torch.tensor([[model.config.decoder_start_token_id]])
    with torch.no_grad():
        encoded = model.encoder(torch.tensor([prompt]))
        for _ in range(num_tokens):
            logits = model(encoder_outputs=encoded, decoder_input_ids=tokens).logits
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, 1:].tolist()
