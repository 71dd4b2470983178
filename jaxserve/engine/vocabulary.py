"""A model's vocabulary as llguidance reads it: the bytes of every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from jaxserve.core.errors import InvalidGrammarError
from jaxserve.models.tokenizer import Tokenizer


def read_vocabulary(
    package: Any, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int
) -> Any:
    """Return an `llguidance.LLTokenizer` of a tokenizer from a folder or a GGUF file.

    llguidance reads the bytes of byte-level and byte-fallback vocabularies itself. Of others, the
    tokens are decoded one by one. Where the model has no end token, one
    stands behind the vocabulary, which the model cannot choose.

    Args:
      vocab_size: of the model, whose embedding may have more rows than there are tokens.

    Raises:
      InvalidGrammarError: the tokenizer has more tokens than the model.
    """
    if tokenizer.num_own_tokens > vocab_size:
        raise InvalidGrammarError(
            f"the tokenizer has {tokenizer.num_own_tokens} tokens and the model {vocab_size}; "
            "grammars need a tokenizer of the model's own"
        )
    try:
        read = package.LLTokenizer(
            tokenizer.to_json(vocab_size), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        spelt = [read.decode_bytes([token]) for token in range(vocab_size)]
    except ValueError:
        spelt = None
    # Its own encoding of a text that must come next makes control tokens of their names, which
    # the grammar then refuses.
    decoded = _Decoded(tokenizer, eos_token_ids, vocab_size, spelt)
    return package.LLTokenizer(decoded, eos_token=list(eos_token_ids) or None)


def outline(
    tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[int, dict[int, str], int]:
    """Return what `GrammarTrials` needs to know of a vocabulary.

    It is the number of tokens, the text of each control token, and the end token.
    """
    control = {
        token: tokenizer.decode([token], skip_special_tokens=False)
        for token in tokenizer.control_token_ids
        if token < vocab_size
    }
    return vocab_size, control, eos_token_ids[0] if eos_token_ids else vocab_size


@final
class _Decoded:
    """What `LLTokenizer` reads of a tokenizer in Python."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        spelt: Sequence[bytes] | None = None,
    ):
        self._tokenizer = tokenizer
        self.special_token_ids = sorted(i for i in tokenizer.control_token_ids if i < vocab_size)
        size = min(tokenizer.vocab_size, vocab_size)
        texts = spelt or [
            tokenizer.decode([token], skip_special_tokens=False).encode() for token in range(size)
        ]
        self.tokens = [*texts[:size], *(b"",) * (vocab_size - size)]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else len(self.tokens)
        if not eos_token_ids:
            self.tokens.append(b"")

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False, parse_special=False)
