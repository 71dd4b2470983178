"""Text is delivered as tokens come, and not past a stop string."""

import itertools

import pytest

from jaxserve.engine.answers import TextAssembler

pytestmark = pytest.mark.fast


class _Letters:
    """A decoder of letters that holds the last letter of each push back, as UTF-8 decoders may.

    Tokens of `HIDDEN` are control tokens, which it leaves out.
    """

    def __init__(self):
        self._waiting = ""

    def push(self, token_ids):
        text = self._waiting + "".join(chr(97 + i) for i in token_ids if i not in HIDDEN)
        self._waiting = text[-1:]
        return text[:-1]

    def kept(self):
        return self._waiting

    def hidden(self, token_id):
        return HIDDEN.get(token_id, "")

    def flush(self):
        text, self._waiting = self._waiting, ""
        return text


HIDDEN = {100: "<|user|>", 101: "<|end|>"}


def _ids(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def test_text_without_stop_strings_is_everything():
    """The joined pieces are the text of all tokens."""
    assembler = TextAssembler(_Letters(), ())
    pieces = []
    for part in ("abc", "d", "ef"):
        assert assembler.push(_ids(part)) is None
        pieces.append(assembler.take(is_final=False)[1])
    assembler.finish()
    pieces.append(assembler.take(is_final=True)[1])
    assert "".join(pieces) == assembler.text == "abcdef"


@pytest.mark.parametrize("stops", [("cd",), ("d", "cd"), ("xyz", "cde"), ("ef", "de")])
def test_stop_string_cuts_the_text_however_tokens_arrive(stops):
    """The text ends before the first complete stop string, however the tokens are split.

    No part of the stop string was delivered before.
    """
    text = "abcdefghij"
    ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    end = min(ends.values())
    expected = text[: min(text.find(stop) for stop, at in ends.items() if at == end)]
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        parts, part = [], ""
        for letter, cut in zip(text, (*cuts, True), strict=True):
            part += letter
            if cut:
                parts.append(part)
                part = ""
        assembler, shown, used = TextAssembler(_Letters(), stops), "", None
        num_before = 0
        for part in parts:
            used = assembler.push(_ids(part))
            shown += assembler.take(is_final=used is not None)[1]
            if used is not None:
                break
            num_before += len(part)
        assert used is not None
        assert assembler.text == shown == expected
        assert num_before + used == end  # although the decoder holds one letter back


def test_a_beginning_of_a_stop_string_is_shown_once_it_is_none():
    """Held-back text is delivered when it can no longer become a stop string."""
    assembler = TextAssembler(_Letters(), ("bcx",))
    assembler.push(_ids("abcc"))
    assert assembler.take(is_final=False)[1] == "a"
    assembler.push(_ids("dd"))
    assert assembler.take(is_final=False)[1] == "bccd"


@pytest.mark.parametrize(
    ("min_tokens", "num_used", "text"),
    [(0, 2, ""), (1, 2, ""), (2, 5, "abc"), (3, 5, "abc"), (4, 5, "abc"), (5, None, "abcabcd")],
)
def test_a_stop_string_before_min_tokens_does_not_count(min_tokens, num_used, text):
    """One counts that ends after them, also where it began before.

    As vLLM 0.32's `IncrementalDetokenizer.update`, which begins its search where the text of the
    first `min_tokens` tokens ends, and reaches back by the length of the string less one.
    """
    assembler = TextAssembler(_Letters(), ("ab",), min_tokens)
    assert assembler.push(_ids("abcabcd")) == num_used
    if num_used is None:
        assembler.finish()
    assert assembler.text == assembler.take(is_final=True)[1] == text


@pytest.mark.parametrize(
    ("stop", "token_ids", "num_used", "text"),
    [
        ("<|user|>", [0, 1, 100, 2], 3, "ab"),
        ("<|user|>", [100], 1, ""),
        ("<|user|>", [101, 0, 101, 100], 4, "a"),
        ("b<|user|>", [0, 1, 100, 2], 3, "a"),
        ("<|user|>cd", [0, 100, 2, 3, 4], 4, "a"),
        ("<|end|><|user|>", [0, 101, 1, 101, 100], 5, "ab"),
        ("user", [0, 100, 1], None, "ab"),
        ("|>", [0, 100, 1], None, "ab"),
        ("ab", [0, 100, 1], 3, ""),
    ],
)
def test_a_stop_string_with_a_hidden_control_token(stop, token_ids, num_used, text):
    """A control token that the text leaves out counts where a stop string has its whole text.

    `stop_strings` of transformers 5.24.0 end at such a token too, since they are searched in the
    tokens; what is not shown ends nothing else, as in vLLM 0.32. Streamed text never passes it.
    """
    for step in (1, len(token_ids)):
        assembler, shown, used = TextAssembler(_Letters(), (stop,)), "", None
        for start in range(0, len(token_ids), step):
            used = assembler.push(token_ids[start : start + step])
            if used is not None:
                used += start
                break
            shown += assembler.take(is_final=False)[1]
        if used is None:
            assembler.finish()
        shown += assembler.take(is_final=True)[1]
        assert (used, assembler.text, shown) == (num_used, text, text)
