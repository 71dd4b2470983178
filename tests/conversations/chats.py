"""A tokenizer for chats with one token per letter."""

from __future__ import annotations

import tokenizers

from jaxserve.models.tokenizer import Tokenizer
from tests.conversations.fakes import END_ID

START, END = "<|s|>", "<|e|>"
START_ID = END_ID - 1
LETTERS = [" ", *map(chr, range(33, 127))]
TEMPLATE = (
    "{% for m in messages %}<|s|>{{ m.role }} {{ m.content }}<|e|>{% endfor %}"
    "{% if add_generation_prompt %}<|s|>assistant {% endif %}"
)


def chat_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """Return a tokenizer with one token per letter; the last two tokens open and end a turn."""
    vocab = {letter: i for i, letter in enumerate([*LETTERS, START, END])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([START, END])
    return Tokenizer(backend, eos_token_ids=(END_ID,), chat_template=template)
