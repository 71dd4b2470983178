"""Prompts and lengths of answers from conversations, recorded runs and files."""

from __future__ import annotations

import json

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion, Request, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.predictor import Example, split_in_three, write_jsonl
from jaxserve.workload.answers import FinishedAnswer, read_examples, read_finished, read_lengths
from jaxserve.workload.recorded import TraceWriter
from tests.workload.made_up import WordTokenizer, record_of, written


def _read(source: str, **settings) -> list[Example]:
    return read_examples(source, tokenizer=WordTokenizer, progress=False, **settings)


def test_every_answered_question_of_sharegpt(tmp_path):
    """Questions come without history; questions without an answer are skipped."""
    talk = ("human", "a"), ("gpt", "b b"), ("gpt", "more"), ("human", "c"), ("gpt", "d d d")
    rest = ("system", "x"), ("human", "unanswered"), ("human", "e"), ("gpt", " ")
    talks = (("first", talk), ("second", rest), ("third", talk[:2]))
    path = written(tmp_path / "sharegpt.json", [record_of(*each) for each in talks])
    found = _read("sharegpt", path=path)
    wanted = [Example("a", 2, "first"), Example("c", 3, "first"), Example("a", 2, "third")]
    assert sorted(found, key=str) == sorted(wanted, key=str)
    assert found == _read("sharegpt", path=path)
    assert len(_read("sharegpt", path=path, max_examples=2)) == 2
    with pytest.raises(InvalidConfigError, match="max_examples=0"):
        _read("sharegpt", path=path, max_examples=0)


def test_a_models_own_answers_to_sharegpt(tmp_path):
    """One file has the lengths, ShareGPT's has the questions; empty answers are skipped."""
    talk = ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e"), ("gpt", "f")
    own = tmp_path / "own.jsonl"
    shared = written(tmp_path / "sharegpt.json", [record_of("x_1", talk)])
    lines = [{"record": "x_1", "turn": turn, "output_length": 7 * turn} for turn in (2, 0, 1)]
    own.write_text("\n".join(map(json.dumps, lines)))
    found = _read(f"answered:{own}", path=shared)
    assert sorted(found, key=str) == [Example("c", 7, "x"), Example("e", 14, "x")]
    own.write_text('{"record": "x_1"}')
    with pytest.raises(InvalidConfigError, match="benchmarks.lengths.answers"):
        _read(f"answered:{own}", path=shared)


def test_answers_of_a_recorded_run(tmp_path):
    """Answers that were cancelled or failed are skipped; each sample counts separately."""
    path = tmp_path / "run.jsonl"
    writer = TraceWriter(path, origin_s=0.0)
    ends = [("stop", 3), ("length", 5), ("cancelled", 2), ("error", 0)]
    for number, (reason, length) in enumerate([*ends, ("stop", 7)]):
        several = 2 if length == 7 else 1
        params = SamplingParams(n=several, temperature=1.0)
        request = Request(id=str(number), prompt=(number, 9), params=params, arrival_s=1.0)
        sample = Sample(text="", token_ids=(1,) * length, finish_reason=reason)
        writer.append(
            request,
            Completion(
                request_id=request.id,
                prompt_token_ids=request.prompt,
                samples=(sample,) * several,
                timing=Timing(arrival_s=1.0, finished_s=2.0),
            ),
        )
    writer.close()
    found = _read(f"recorded:{path}")
    assert sorted((e.prompt, e.output_length) for e in found) == [
        ("0 9", 3),
        ("1 9", 5),
        ("4 9", 7),
        ("4 9", 7),
    ]


def test_json_lines_need_no_tokenizer(tmp_path):
    """They come in a random order that depends on the seed."""
    wanted = [Example(f"p{i}", i + 1, str(i)) for i in range(50)]
    write_jsonl(tmp_path / "data.jsonl", wanted)

    def refused():
        raise AssertionError("asked for a tokenizer")

    found = read_examples(str(tmp_path / "data.jsonl"), tokenizer=refused, max_examples=20)
    assert len(found) == 20 and set(found) < set(wanted)
    assert found == read_examples(str(tmp_path / "data.jsonl"), tokenizer=refused, max_examples=20)


def test_data_that_cannot_be_used(tmp_path):
    """Errors name files that are missing, invalid, or empty."""
    with pytest.raises(InvalidConfigError, match="cannot read the data .*; pass sharegpt"):
        _read(str(tmp_path / "missing.jsonl"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    with pytest.raises(InvalidConfigError, match="bad.jsonl:1"):
        _read(str(tmp_path / "bad.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidConfigError, match="no prompt with a whole answer"):
        _read(str(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidConfigError, match="cannot read the trace"):
        _read("recorded:missing")


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
        request, Completion(request_id="a", prompt_token_ids=(5, 6), samples=samples, timing=timing)
    )
    writer.close()
    assert read_finished(tmp_path / "run.jsonl") == [
        FinishedAnswer(prompt=(5, 6), output=(1, 2)),
        FinishedAnswer(prompt=(5, 6), output=(4, 4, 4)),
    ]


def test_lines_of_ones_own(tmp_path, caplog):
    """A line has the tokens and conversation of one answer; a truncated line is skipped."""
    path = tmp_path / "answers.jsonl"
    line = {"prompt_token_ids": [5], "token_ids": [7, 2], "conversation": "x", "more": 1}
    path.write_text(json.dumps(line) + "\n\n" + json.dumps(line)[:20])
    assert read_finished(path) == [FinishedAnswer(prompt=(5,), output=(7, 2), conversation="x")]
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
        read_finished(tmp_path / "data")
    with pytest.raises(InvalidConfigError, match="cannot read"):
        read_finished(tmp_path / "nowhere")


_LINE = {
    "id": "a",
    "arrival_s": 0.0,
    "prompt_token_ids": [5, 6, 7],
    "params": {"max_tokens": 9, "n": 3, "temperature": 1.0},
    "priority": 0,
    "deadline_s": None,
    "num_output_tokens": [4, 2, 9],
    "finish_reasons": ["stop", "cancelled", "length"],
    "finished_s": 1.0,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3,4\n5, 6\n\n", [(3, 4), (5, 6)]),
        ("prompt,output\n3,4\n", [(3, 4)]),
        ("[[3, 4], [5, 6]]", [(3, 4), (5, 6)]),
        (json.dumps(_LINE) + "\n", [(3, 4), (3, 9)]),
    ],
    ids=["CSV", "CSV with a header", "JSON", "trace, without the cancelled sample"],
)
def test_each_form_is_read(tmp_path, text, expected):
    """Every form gives prompt and output tokens of each whole answer."""
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no lengths"),
        ("[]", "has no lengths"),
        ("[[3, 4]", "is not JSON"),
        ("[[3, 4], [5]]", r"item 2: \[5\] is not allowed"),
        ("[[3, 0]]", r"item 1: \[3, 0\]"),
        ("[[3, true]]", "item 1"),
        ("3,4\n5,x\n", "line 2"),
        ("3,4\n5,6,7\n", "line 2"),
        ("5,\u00b2\n", "line 1"),
        ("5," + "9" * 5000, "line 1"),
        ("5,6\n5," + "9" * 200_000, "is not CSV"),
        ("[[5, " + "9" * 5000 + "]]", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"id": 1}\n', "line 1"),
        (json.dumps(_LINE | {"finish_reasons": ["cancelled"] * 3}) + "\n", "has no lengths"),
    ],
)
def test_other_files_are_refused(tmp_path, text, said):
    """The message names the file and the place, and what is allowed."""
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(InvalidConfigError, match=said):
        read_lengths(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidConfigError, match="cannot read lengths"):
        read_lengths(tmp_path / "none")
