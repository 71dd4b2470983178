"""A tiny pre-trained encoder in a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.predictor.tiny import tiny_tokenizer


def write_encoder(folder: Path) -> Path:
    """Write random weights and a tokenizer with one token per word."""
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
