"""The ShareGPT reader, and samples drawn from it, on small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import sharegpt
from tests.workload.made_up import WordTokenizer, record_of


def _record(number: int, question: str, answer: str, first: str = "human") -> dict:
    turns = [(first, question), ("gpt", answer), ("human", "thanks")]
    return record_of(f"talk-{number}", turns)


def _write(path: Path, records: list[dict], cut_bytes: int = 0) -> Path:
    data = json.dumps(records, indent=2, ensure_ascii=False).encode()
    path.write_bytes(data[: len(data) - cut_bytes])
    return path


def test_whole_array_is_read_to_its_end(tmp_path):
    """Every record of a complete file is read in order, with its messages."""
    records = [_record(i, f"question {i} é", f"answer {i} 🙂") for i in range(5)]
    talks = list(sharegpt.read(_write(tmp_path / "all.json", records)))
    assert [talk.id for talk in talks] == [f"talk-{i}" for i in range(5)]
    assert talks[3].first_turn == ("question 3 é", "answer 3 🙂")


@pytest.mark.parametrize("cut_bytes", [1, 2, 10, 80, 131, 132, 133, 134, 200])
def test_truncated_array_gives_its_whole_records(tmp_path, cut_bytes):
    """A file that is cut anywhere, even inside a character, gives the records before the cut."""
    records = [_record(i, "one two three four", "ü🙂" * 30) for i in range(4)]
    talks = list(sharegpt.read(_write(tmp_path / "cut.json", records, cut_bytes)))
    assert len(talks) == (4 if cut_bytes <= 2 else 3)
    assert talks[-1].first_turn == ("one two three four", "ü🙂" * 30)


def test_records_may_cross_chunks(tmp_path):
    """A record longer than the reader's chunk is read from several chunks."""
    long = "word " * 500_000
    path = _write(tmp_path / "long.json", [_record(0, long, "a"), _record(1, "b", long)])
    talks = list(sharegpt.read(path))
    assert [talk.first_turn for talk in talks] == [(long, "a"), ("b", long)]


@pytest.mark.parametrize("text", ['{"id": 1}', "", '[{"id": 1}]', "[3]"])
def test_other_files_are_refused(tmp_path, text):
    """A file that is not an array of ShareGPT records raises a typed error."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidConfigError):
        list(sharegpt.read(path))


def test_sample_keeps_its_bounds(tmp_path):
    """Only opening turns are drawn; long prompts are skipped and long answers are cut."""
    records = [
        _record(0, "w " * 10, "w " * 20),
        _record(1, "w " * 11, "w " * 300),
        _record(2, "w " * 600, "w " * 20),
        _record(3, "w " * 12, "w " * 20, first="gpt"),
        _record(4, "hi", "w " * 20),
    ]
    path = _write(tmp_path / "all.json", records)
    items = sharegpt.sample(2, 0, tokenizer=WordTokenizer(), path=path)
    lengths = sorted((len(item.prompt_token_ids), item.num_output_tokens) for item in items)
    assert lengths == [(10, 20), (11, 256)]
    with pytest.raises(InvalidConfigError, match="num=3 is more than"):
        sharegpt.sample(3, 0, tokenizer=WordTokenizer(), path=path)


def test_sample_depends_on_its_seed(tmp_path):
    """The same seed draws the same items, another seed draws others."""
    records = [_record(i, "w " * (4 + i), "w " * 8) for i in range(40)]
    path = _write(tmp_path / "all.json", records)

    def draw(seed: int) -> list[int]:
        items = sharegpt.sample(10, seed, tokenizer=WordTokenizer(), path=path)
        return [len(item.prompt_token_ids) for item in items]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_lengths_are_forced(tmp_path):
    """An item's parameters generate exactly its length, also after the model's end token."""
    path = _write(tmp_path / "one.json", [_record(0, "w " * 5, "w " * 9)])
    params = sharegpt.sample(1, 0, tokenizer=WordTokenizer(), path=path)[0].params()
    assert (params.forced_length, params.ignore_eos, params.is_greedy) == (9, True, True)
    assert params.max_tokens == 256
