"""Which texts a grammar in llguidance's Lark matches, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import llguidance

# A token that stands for a mark in texts.
MARK = 257


class _Bytes:
    """A vocabulary of the 256 bytes, an end token, and a mark."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256, MARK)
    tokens = (*(bytes([i]) for i in range(256)), b"<end>", b"<mark>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


_bytes: Any = _Bytes()
_VOCABULARY = llguidance.LLTokenizer(_bytes)


def matching(lark: str, texts: Iterable[str], mark: str | None = None) -> list[str]:
    """Return the texts that are whole answers; a `mark` in them is the token MARK."""
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    matcher = llguidance.LLMatcher(_VOCABULARY, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return [text for text in texts if _takes(matcher.deep_copy(), _tokens(text, mark))]


def _tokens(text: str, mark: str | None) -> list[int]:
    found: list[int] = []
    for i, part in enumerate([text] if mark is None else text.split(mark)):
        found += [*([MARK] if i else ()), *part.encode()]
    return found


def _takes(matcher: llguidance.LLMatcher, tokens: list[int]) -> bool:
    taken = matcher.try_consume_tokens(tokens) == len(tokens)
    return taken and (matcher.is_accepting() or matcher.is_stopped())
