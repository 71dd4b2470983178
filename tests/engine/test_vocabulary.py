"""Grammars whose texts spell a control token."""

from __future__ import annotations

import json
from pathlib import Path

import llguidance
import pytest
import tokenizers
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from jaxserve.engine.grammars import read_vocabulary
from jaxserve.models.tokenizer import Tokenizer

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("text", ["<end>", "a <end> b", "x<end", "é<end>", "<think>a</think>"])
@pytest.mark.parametrize("ends", [True, False])
def test_texts_of_control_tokens_are_spelt(tmp_path: Path, text: str, ends: bool):
    """What a grammar forces is text; llguidance 1.9.1 encodes it with control tokens by itself.

    Its grammar then refuses those tokens, so that the answer cannot go on. An added token that is
    not a control token is text, as Qwen3's <think>.
    """
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(BPE(letters, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), Decoder()
    backend.add_special_tokens(["<end>"])
    backend.add_tokens(["<think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"})
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    vocabulary = read_vocabulary(llguidance, tokenizer, (256,) if ends else (), 258)
    grammar = llguidance.LLMatcher.grammar_from_lark(f"start: {json.dumps(text)}")
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    forced = matcher.compute_ff_tokens()
    assert matcher.consume_tokens(forced) and matcher.is_stopped()
    assert [token for token in forced if token in tokenizer.control_token_ids] in ([], [256])
    spelt = [token for token in forced if token not in (256, 258)]
    assert tokenizer.decode(spelt, skip_special_tokens=False) == text
