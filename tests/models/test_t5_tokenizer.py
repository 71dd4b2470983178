"""The tokenizer of a T5 folder gives the token ids and texts of transformers."""

from __future__ import annotations

import pytest
import transformers

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import CheckpointError
from jaxserve.models.store import load_tokenizer
from tests.models.t5_checkpoints import VOCAB_SIZE, torch_encoded, write_checkpoint

_TEXTS = ("translate English to German: the cat", "a", " two  spaces ", "ünknown", "x </s> y")


def write_tokenizer(folder):
    """Write a unigram tokenizer with words and letters; return transformers' own."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = "▁the ▁cat ▁to ▁English ▁German ▁translate ▁ : lish".split()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?"
    pieces = [(piece, -float(i + 1)) for i, piece in enumerate((*words, *letters))]
    extra = VOCAB_SIZE - len(specials) - len(pieces)
    sentinels = [(f"<extra_id_{i}>", 0.0) for i in range(extra - 1, -1, -1)]
    tokenizer = transformers.T5Tokenizer(vocab=specials + pieces + sentinels, extra_ids=extra)
    tokenizer.save_pretrained(folder)
    return tokenizer


def test_texts_and_tokens_are_those_of_transformers(tmp_path):
    """Texts get the same ids with the end token, and decode to the same text, also in pieces."""
    theirs = write_tokenizer(tmp_path)
    write_checkpoint("t5", tmp_path)
    ours = load_tokenizer(str(tmp_path))
    assert ours is not None and ours.eos_token_ids == (1,)
    for text in _TEXTS:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids and ids[-1] == 1
        wanted = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == wanted
        stream = ours.stream_decoder()
        assert stream.push(ids) + stream.flush() == wanted


@pytest.mark.release
def test_texts_are_served(tmp_path):
    """A text prompt is encoded with its end token, and the answer has PyTorch's text."""
    theirs = write_tokenizer(tmp_path)
    model = write_checkpoint("t5", tmp_path)
    options = dict(max_slots=4, max_step_tokens=64, page_size=8, max_context=128)
    with Runtime.from_pretrained(
        str(tmp_path), dtype="float32", warmup=False, progress=False, **options
    ) as rt:
        answer = rt.generate(_TEXTS[0], SamplingParams(max_tokens=10, temperature=0))
        pieces = list(rt.stream(_TEXTS[0], SamplingParams(max_tokens=10, temperature=0)))
        encoded = rt.encode(list(_TEXTS))
    ids = theirs(_TEXTS[0]).input_ids
    assert list(answer.prompt_token_ids) == ids
    assert answer.text == theirs.decode(answer.token_ids, skip_special_tokens=True)
    assert "".join(piece.text for piece in pieces) == answer.text
    assert [len(each) for each in encoded] == [len(theirs(text).input_ids) for text in _TEXTS]
    assert abs(encoded[0] - torch_encoded(model, ids)).max() < 1e-3


def test_a_sentencepiece_file_alone_says_what_to_do(tmp_path):
    """Without a fast tokenizer's file, the error names the file that is missing."""
    write_checkpoint("t5", tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
