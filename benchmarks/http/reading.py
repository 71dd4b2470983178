"""The CPU time that reading an answer for thinking and calls of tools takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common.repeats import summary

# Says that the model writes thinking and calls as Qwen3 does.
_TEMPLATE = '<think></think>{{ tools }}<tool_call>{"name": "", "arguments": {}}</tool_call>'
_SENTENCE = "The| weather| in| Paris| is| mild|,| with| a| few| clouds| and| no| rain|.| \n"
_CALL = (
    '<tool_call>|\n|{"|name|":| "|weather|",| "|arguments|":'
    '| {"|city|":| "|Paris|"}}|\n|</tool_call>'
)
_ANSWERS = {
    "text": 8 * _SENTENCE,
    "thinking, text and a call": f"<think>|\n{4 * _SENTENCE}|</think>|\n\n{2 * _SENTENCE}|{_CALL}",
}
_NUM_ANSWERS, _NUM_RUNS = 100, 7


def cpu_s_per_piece() -> dict[str, Any]:
    """Return the CPU seconds of both readers for each piece of an answer, by kind of answer."""
    found = {}
    for kind, answer in _ANSWERS.items():
        pieces = answer.split("|")
        each = [_read_s(pieces) / (_NUM_ANSWERS * len(pieces)) for _ in range(_NUM_RUNS)]
        found[kind] = summary([{"cpu_s": seconds} for seconds in each])
    return found


def _read_s(pieces: Sequence[str]) -> float:
    from jaxserve.models.thinking import thinking_of
    from jaxserve.models.tool_calls import format_of
    from jaxserve.models.tool_reader import CallReader

    thinking, form = thinking_of(_TEMPLATE), format_of(_TEMPLATE)
    assert thinking is not None and form is not None
    begun_s = time.process_time()
    for _ in range(_NUM_ANSWERS):
        reader, calls = thinking.reader(thinking.opening("")), CallReader(form)
        for piece in pieces:
            _, text = reader.push(piece)
            calls.push(text)
        _, text = reader.finish()
        calls.push(text)
        calls.finish()
    return time.process_time() - begun_s
