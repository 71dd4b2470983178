"""Prompts and lengths of answers from conversations, recorded runs and files."""

from __future__ import annotations

import json

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion, Request, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload import answers
from jaxserve.workload.recorded import TraceWriter
from predictor import Example, write_jsonl


class WordTokenizer:
    """A tokenizer with one token per word; ids decode to their numbers."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, token_ids) -> str:
        return " ".join(map(str, token_ids))


def _read(source: str, **settings) -> list[Example]:
    return answers.read(source, tokenizer=WordTokenizer, progress=False, **settings)


def test_every_answered_question_of_sharegpt(tmp_path):
    """Questions come without history; questions without an answer are skipped."""
    talk = ("human", "a"), ("gpt", "b b"), ("gpt", "more"), ("human", "c"), ("gpt", "d d d")
    rest = ("system", "x"), ("human", "unanswered"), ("human", "e"), ("gpt", " ")
    records = [
        {"id": name, "conversations": [{"from": who, "value": text} for who, text in turns]}
        for name, turns in (("first", talk), ("second", rest), ("third", talk[:2]))
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(records))
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
    record = {"id": "x_1", "conversations": [{"from": who, "value": text} for who, text in talk]}
    shared, own = tmp_path / "sharegpt.json", tmp_path / "own.jsonl"
    shared.write_text(json.dumps([record]))
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
        ("0 9", 3), ("1 9", 5), ("4 9", 7), ("4 9", 7),
    ]  # fmt: skip


def test_json_lines_need_no_tokenizer(tmp_path):
    """They come in a random order that depends on the seed."""
    wanted = [Example(f"p{i}", i + 1, str(i)) for i in range(50)]
    write_jsonl(tmp_path / "data.jsonl", wanted)

    def refused():
        raise AssertionError("asked for a tokenizer")

    found = answers.read(str(tmp_path / "data.jsonl"), tokenizer=refused, max_examples=20)
    assert len(found) == 20 and set(found) < set(wanted)
    assert found == answers.read(str(tmp_path / "data.jsonl"), tokenizer=refused, max_examples=20)


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
