"""The texts, bytes and offsets of tokens beside their log-probabilities."""

from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from jaxserve.core.request import TokenLogprob
from jaxserve.models.tokenizer import Tokenizer
from jaxserve.server.scores import LogprobFormatter, text_of
from tests.common.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.fast

SAID = [
    "some cat sat on the mat",
    "naïve 😀🦜漢\n\nwörld ",
    "  two  spaces\n",
    "😀",
    "é",
    "a\u200db\t",
    "e\u0301",
    "¡ÿĀ…",
]


def _scores(token_ids: list[int], top: tuple[tuple[int, float], ...] = ()) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id=token_id, logprob=-9.0, processed_logprob=-9.0, top=top)
        for token_id in token_ids
    ]


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text behind others."""
    return tokenizer.encode("a\n" + text, False)[len(tokenizer.encode("a\n", False)) :]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", SAID)
def test_tokens_have_the_text_and_its_bytes(make, text):
    """Joined texts are the text, joined bytes its bytes, and offsets count its characters.

    A token that ends inside a character adds nothing, and the one that completes it has it, as
    `_correct_decoded_token` of vLLM 0.30's `LogprobsProcessor` shows them.
    """
    tokenizer = make()
    token_ids = _tokens(tokenizer, text)
    scores = _scores(token_ids)
    whole = LogprobFormatter(tokenizer, after=token_ids, offset=3).of_completion(
        scores, token_ids, 0
    )
    assert "".join(whole.tokens) == text and whole.top_logprobs is None
    sizes = [3 + len("".join(whole.tokens[:i])) for i in range(len(token_ids))]
    assert whole.text_offset == sizes
    content = LogprobFormatter(tokenizer).of_chat(scores).content
    assert [each.token for each in content] == whole.tokens
    assert b"".join(bytes(each.bytes or ()) for each in content) == text.encode()
    assert all(each.bytes for each in content)

    in_pieces = LogprobFormatter(tokenizer)
    assert [one for score in scores for one in in_pieces.of_chat([score]).content] == content


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_an_echoed_prompt_goes_before(make):
    """The prompt begins a text, the answer goes on with it, and control tokens add nothing.

    Here the tokenizer has put one before the text of the prompt.
    """
    tokenizer = make()
    shown = "the cat"
    prompt = tokenizer.encode("<s>the cat", False)
    answer = [*_tokens(tokenizer, " on 漢"), *tokenizer.encode("</s>", False)[-1:]]
    before = LogprobFormatter.of_echo(
        tokenizer, shown, prompt, [None, *_scores(prompt[1:])], num_top=0
    )
    after = LogprobFormatter(tokenizer, after=prompt, offset=len(shown))
    both = before.followed_by(after.of_completion(_scores(answer), answer, 0))
    assert both.tokens[0] == "<s>" and both.tokens[-1] == "</s>"
    text = f"{shown} on 漢"
    assert "".join(both.tokens[1:-1]) == text
    for token, offset in zip(both.tokens[1:-1], both.text_offset[1:-1], strict=True):
        assert text[offset:].startswith(token)
    assert both.text_offset[:2] == [0, 0] and both.text_offset[-1] == len(text)
    assert both.token_logprobs[0] is None
    (ended,) = LogprobFormatter(tokenizer).of_chat(_scores(answer[-1:])).content
    assert (ended.token, ended.bytes) == ("</s>", None)
    shows = LogprobFormatter(tokenizer, skip_special_tokens=False).of_chat(_scores(answer[-1:]))
    assert shows.content[0].bytes == list(b"</s>")


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("as_text", [False, True])
def test_an_echoed_prompt_keeps_its_control_tokens(make, as_text: bool):
    """The joined tokens are the prompt, and offsets its places; vLLM echoes its text, too."""
    tokenizer = make()
    text = "the<|user|> cat</s> on"
    prompt = tokenizer.encode(text, False)
    given = text if as_text else prompt
    found = LogprobFormatter.of_echo(tokenizer, given, prompt, [None, *_scores(prompt[1:])], 0)
    shown = tokenizer.decode(prompt, False)
    assert "".join(found.tokens) == shown and {"<|user|>", "</s>"} <= set(found.tokens)
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert shown[offset:].startswith(token)
    if make is byte_level:
        assert shown == text


def test_the_likeliest_tokens_have_entries_of_their_own():
    """The drawn token is among them, and tokens that are shown alike do not share an entry.

    OpenAI: there may be up to logprobs + 1 elements. The names of others are vLLM's
    `return_tokens_as_token_ids`.
    """
    tokenizer = sentencepiece()
    (letter,), (cat,) = _tokens(tokenizer, "b"), _tokens(tokenizer, " cat")
    spelt = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    (byte,) = {i for i, each in enumerate(spelt) if each == b"b"} - {letter}
    begins = [spelt.index(b"\xe0"), spelt.index(b"\xe1")]
    top = ((byte, -1.0), (letter, -2.0), (begins[0], -3.0), (begins[1], -4.0), (cat, -5.0))
    cases = {
        letter: {f"token_id:{byte}": -1.0, "b": -2.0},
        byte: {"b": -1.0, f"token_id:{letter}": -2.0},
    }
    for drawn, own in cases.items():
        found = LogprobFormatter(tokenizer).of_completion(_scores([drawn], top), [drawn], 5)
        others = {"": -3.0, f"token_id:{begins[1]}": -4.0, " cat": -5.0}
        assert found.top_logprobs == [own | others]
    (the,) = _tokens(tokenizer, " the")
    found = LogprobFormatter(tokenizer).of_completion(_scores([the], top), [the], 1)
    assert found.top_logprobs == [{"b": -1.0, " the": -9.0}]
    (content,) = LogprobFormatter(tokenizer).of_chat(_scores([the], top)).content
    assert [each.token for each in content.top_logprobs] == ["b", "b", "", "", " cat", " the"]
    assert [each.bytes for each in content.top_logprobs][2:4] == [[0xE0], [0xE1]]
    (content,) = LogprobFormatter(tokenizer).of_chat(_scores([the])).content
    assert content.top_logprobs == []


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_likely_tokens_complete_the_character_that_has_begun(make):
    """A token in the place of another is shown as it would be there."""
    tokenizer = make()
    token_ids = _tokens(tokenizer, "漢")
    last = token_ids[-1]
    (space,) = _tokens(tokenizer, " the")
    other = next(i for i in range(330) if tokenizer.token_bytes(i) == b"\x80")
    scores = LogprobFormatter(tokenizer)
    scores.of_chat(_scores(token_ids[:-1]))
    (found,) = scores.of_chat(_scores([last], ((other, -1.0), (space, -2.0)))).content
    spelt = "漢".encode()[:-1] + b"\x80"
    assert [each.token for each in found.top_logprobs] == [spelt.decode(), " the", "漢"]
    assert [each.bytes for each in found.top_logprobs][::2] == [[0x80], [0xA2]]


def test_a_prompt_in_vllms_format():
    """Tokens are named by their ids, with the ranks of the likeliest and their texts in place."""
    tokenizer = byte_level()
    prompt = tokenizer.encode("<s>the 漢", False)
    (cat,) = _tokens(tokenizer, " cat")
    scores = [None, *_scores(prompt[1:], ((cat, -1.0), (prompt[2], -9.0)))]
    found = LogprobFormatter(tokenizer, after=()).of_prompt(scores, prompt)
    assert found[0] is None and list(found[1] or ()) == [str(prompt[1]), str(cat), str(prompt[2])]
    own = [each[str(token)] for each, token in zip(found[1:], prompt[1:], strict=True) if each]
    assert "".join(each.decoded_token for each in own) == "the 漢"
    assert [each.rank for each in own][:3] == [None, 2, None]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_bytes_of_every_token(make):
    """Each byte is a token, and the text of a token behind others is that of its bytes."""
    tokenizer = make()
    spelt = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= spelt
    assert len(pre_tokenizers.ByteLevel.alphabet()) == 256
    assert tokenizer.token_bytes(10**6) == b"" == text_of(10**6, tokenizer).encode()
    before = tokenizer.encode("a", False)
    for token_id in range(tokenizer.vocab_size):
        known = tokenizer.decode(before, False)
        assert (
            text_of(token_id, tokenizer)
            == tokenizer.decode([*before, token_id], False)[len(known) :]
        )
