"""Answers with their tokens, from recorded runs and other JSON lines."""

from __future__ import annotations

import json

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion, Request, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload.finished import FinishedAnswer, read
from jaxserve.workload.recorded import TraceWriter
from predictor import split_in_three


def test_whole_answers_of_a_recorded_run(tmp_path):
    """There is one answer per sample that ended by itself or at its limit."""
    writer = TraceWriter(tmp_path / "run.jsonl", origin_s=0.0)
    params = SamplingParams(n=3, temperature=1.0)
    request = Request(id="a", prompt=(5, 6), params=params, arrival_s=0.0)
    samples = tuple(
        Sample(text="", token_ids=tokens, finish_reason=reason)
        for tokens, reason in (((1, 2), "stop"), ((3,), "cancelled"), ((4, 4, 4), "length"))
    )
    timing = Timing(arrival_s=0.0, finished_s=1.0)
    writer.append(
        request,
        Completion(request_id="a", prompt_token_ids=(5, 6), samples=samples, timing=timing),
    )
    writer.close()
    assert read(tmp_path / "run.jsonl") == [
        FinishedAnswer(prompt=(5, 6), output=(1, 2)),
        FinishedAnswer(prompt=(5, 6), output=(4, 4, 4)),
    ]


def test_lines_of_ones_own(tmp_path, caplog):
    """A line has the tokens and conversation of one answer; a truncated line is skipped."""
    path = tmp_path / "answers.jsonl"
    line = {"prompt_token_ids": [5], "token_ids": [7, 2], "conversation": "x", "more": 1}
    path.write_text(json.dumps(line) + "\n\n" + json.dumps(line)[:20])
    assert read(path) == [FinishedAnswer(prompt=(5,), output=(7, 2), conversation="x")]
    assert "line 3 is cut off" in caplog.text


def test_answers_of_one_conversation_or_prompt_stay_together():
    """The split keeps them together; without a conversation, the prompt counts."""
    answers = [
        FinishedAnswer(prompt=(i % 20,), output=(i + 1,), conversation="c" * (i % 3))
        for i in range(200)
    ]
    parts = split_in_three(answers, held_out=0.2)
    assert sum(map(len, parts)) == 200
    names = [{a.conversation or a.prompt for a in part} for part in parts]
    assert not (names[0] & names[1] or names[0] & names[2] or names[1] & names[2])


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"prompt_token_ids": [1]}\n', "output_token_ids"),
        ('{"prompt_token_ids": [1], "token_ids": 5}\n', "TypeError"),
        ("no\n{}\n", "is not JSON"),
        ("", "no answer"),
    ],
)
def test_what_is_no_data_is_refused(tmp_path, text, said):
    """The error describes a valid line."""
    (tmp_path / "data").write_text(text)
    with pytest.raises(InvalidConfigError, match=said):
        read(tmp_path / "data")
    with pytest.raises(InvalidConfigError, match="cannot read"):
        read(tmp_path / "nowhere")
