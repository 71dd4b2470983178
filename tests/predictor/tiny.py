"""A tiny encoder with a tokenizer, and prompts whose answers have learnable lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import tokenizers

from jaxserve.predictor import (
    EncoderConfig,
    Example,
    LengthBuckets,
    LengthClassifier,
    LengthPredictor,
)

BUCKETS = LengthBuckets.equal_width(40, 4)
CONFIG = EncoderConfig(
    vocab_size=60,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    max_positions=64,
    dropout=0.0,
)
_WORDS = [f"w{i}" for i in range(50)]


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with one token per word."""
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *_WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


class FailingTokenizer:
    """A tokenizer that raises while `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._tokenizer = tiny_tokenizer()

    def encode_batch(self, texts: list[str]) -> list[tokenizers.Encoding]:
        if self.error is not None:
            raise self.error
        return self._tokenizer.encode_batch(texts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def tiny_predictor(seed: int = 0, tokenizer: Any = None) -> LengthPredictor:
    """Return an untrained predictor."""
    model = LengthClassifier.random(CONFIG, BUCKETS.num, seed=seed)
    return LengthPredictor(CONFIG, model, BUCKETS, tokenizer or tiny_tokenizer(), max_tokens=32)


def examples(num: int, seed: int = 0) -> list[Example]:
    """Return examples in which the first word decides the quarter of an answer's length."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(num):
        words = random.integers(0, len(_WORDS), random.integers(1, 20))
        quarter = int(words[0]) % 4
        length = 10 * quarter + int(random.integers(1, 11))
        prompt = " ".join(_WORDS[word] for word in words)
        made.append(Example(prompt, length, f"{seed}-{number // 2}"))
    return made
