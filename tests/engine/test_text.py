"""Text is delivered as tokens come, and not past a stop string."""

import itertools

import pytest

from jaxserve.engine.text import TextAssembler

pytestmark = pytest.mark.fast


class _Letters:
    """A decoder of letters that holds the last letter of each push back, as UTF-8 decoders may."""

    def __init__(self):
        self._waiting = ""

    def push(self, token_ids):
        text = self._waiting + "".join(chr(97 + i) for i in token_ids)
        self._waiting = text[-1:]
        return text[:-1]

    def kept(self):
        return self._waiting

    def flush(self):
        text, self._waiting = self._waiting, ""
        return text


def _ids(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def test_text_without_stop_strings_is_everything():
    """The joined pieces are the text of all tokens."""
    assembler = TextAssembler(_Letters(), ())
    pieces = []
    for part in ("abc", "d", "ef"):
        assert assembler.push(_ids(part)) is None
        pieces.append(assembler.take(is_final=False))
    assembler.finish()
    pieces.append(assembler.take(is_final=True))
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
            shown += assembler.take(is_final=used is not None)
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
    assert assembler.take(is_final=False) == "a"
    assembler.push(_ids("dd"))
    assert assembler.take(is_final=False) == "bccd"
