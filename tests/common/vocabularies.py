"""Small tokenizers of the two kinds that models have: byte-level, and SentencePiece with bytes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxserve.models.tokenizer import Tokenizer

CORPUS = ["the cat sat on the mat and then some hello world a b c d e f g"] * 5
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>")


def byte_level(**options: Any) -> Tokenizer:
    """Return a tokenizer whose tokens are bytes and what the corpus merges of them."""
    return _tokenizer(byte_level_json(), options)


def sentencepiece(**options: Any) -> Tokenizer:
    """Return a tokenizer as Llama 2's: a space before the text, tokens of single bytes."""
    return _tokenizer(_sentencepiece(), options)


def _tokenizer(text: str, options: dict[str, Any]) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(text)
    return Tokenizer(backend, eos_token_ids=(SPECIAL.index("</s>"),), **options)


@cache
def byte_level_json() -> str:
    """Return the tokenizer.json of `byte_level`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def with_sentencepiece_ends(model: models.Model) -> tokenizers.Tokenizer:
    """Return a tokenizer with the normalizer and the decoder of Llama 2."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


@cache
def _sentencepiece() -> str:
    backend = with_sentencepiece_ends(models.BPE(unk_token="<unk>"))
    # Words alone are merged, as SentencePiece trains; the finished tokenizer splits nothing.
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    data = json.loads(backend.to_str())
    data["pre_tokenizer"] = None
    data["added_tokens"] = data["added_tokens"][: len(SPECIAL)]
    data["model"].update(byte_fallback=True, fuse_unk=True)
    return json.dumps(data)
