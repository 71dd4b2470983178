"""Which texts a grammar in llguidance's Lark matches, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import llguidance


class _Bytes:
    """A vocabulary of the 256 bytes and an end token."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


_bytes: Any = _Bytes()
_VOCABULARY = llguidance.LLTokenizer(_bytes)


def matching(lark: str, texts: Iterable[str]) -> list[str]:
    """Return the texts that are whole answers."""
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    matcher = llguidance.LLMatcher(_VOCABULARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return [text for text in texts if _takes(matcher.deep_copy(), list(text.encode()))]


def _takes(matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
    taken = matcher.try_consume_tokens(tokens) == len(tokens)
    return taken and (matcher.is_accepting() or matcher.is_stopped())
