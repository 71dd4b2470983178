"""What a history keeps of the tokens of an answer that a stop ended."""

from __future__ import annotations

import pytest

from jaxserve.conversations.prompts import kept_answer
from jaxserve.core.request import Sample
from jaxserve.engine.answers import TextAssembler
from jaxserve.models.thinking import TAGS, Thinking
from tests.common.vocabularies import byte_level, sentencepiece

pytestmark = pytest.mark.fast

SAID = "some cat sat\non the 好 mat"


def _sample(answer: list[int], text: str, reasoning: str | None = None) -> Sample:
    return Sample(text=text, token_ids=tuple(answer), finish_reason="stop", reasoning=reasoning)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize(
    "stop",
    [" sat", "on", "cat", "at\n", "t sat\no", "the ", "\n", "好", " mat", "s", "some", "mat"],
)
def test_a_history_has_the_text_before_a_stop_string(make, stop):
    """Its tokens decode to the text of the answer, wherever the stop string lies in the tokens.

    They are those that were generated, as far as they have nothing of the stop string.
    """
    tokenizer = make()
    tokens = tokenizer.encode(SAID, False)
    assembler = TextAssembler(tokenizer.stream_decoder(), (stop,))
    used = assembler.push(tokens)
    assert used is not None and assembler.text == SAID[: SAID.index(stop)]
    answer = tokens[:used]
    kept = kept_answer(
        tokenizer, _sample(answer, assembler.text), after=(), skip_special_tokens=True
    )
    assert tokenizer.decode(kept) == assembler.text
    begins = [n for n in range(used) if assembler.text.startswith(tokenizer.decode(tokens[:n]))]
    assert list(kept[: max(begins)]) == tokens[: max(begins)]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_what_ends_an_answer_and_what_stays(make):
    """The model's end token stays, as the template's end of a turn; other stop tokens do not."""
    tokenizer = make()
    said = tokenizer.encode("some cat", False)
    (end,), (user,) = (tokenizer.encode(text, False)[-1:] for text in ("</s>", "<|user|>"))

    def kept(answer: list[int], text: str, *, skip: bool = True) -> list[int]:
        sample = _sample(answer, text)
        return list(kept_answer(tokenizer, sample, after=(), skip_special_tokens=skip))

    assert kept([*said, end], "some cat") == [*said, end]
    assert kept([*said, user], "some cat") == said  # a stop token, or its text as a stop string
    assert kept([*said, user], "some cat", skip=False) == said
    assert kept([user, *said, user], "some cat") == [user, *said]
    assert kept([user], "") == kept([], "") == []
    assert kept([end], "") == [end]
    (broken,) = tokenizer.encode("好", False)[-3:-2]
    assert kept([*said, broken], "some cat\ufffd") == [*said, broken]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_the_thinking_before_a_stopped_answer_stays(make):
    """The history has the tokens of the thinking, and of the answer those before the stop."""
    tokenizer, thinking = make(), Thinking(TAGS, "undecided")
    tokens = tokenizer.encode("<think>\nhm\n</think>\n\nsome cat sat", False)
    assembler = TextAssembler(tokenizer.stream_decoder(), (" sat",), thinking=thinking)
    used = assembler.push(tokens)
    assert used is not None and assembler.parts() == ("hm", "some cat")
    sample = _sample(tokens[:used], "some cat", "hm")
    kept = kept_answer(tokenizer, sample, after=(), skip_special_tokens=True, thinking=thinking)
    assert tokenizer.decode(kept).strip() == "<think>\nhm\n</think>\n\nsome cat"
