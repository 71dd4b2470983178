"""Lengths of answers are read from traces, CSV and JSON, and anything else is refused."""

from __future__ import annotations

import json

import pytest

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.length_pairs import read_lengths

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
    """A file that cannot be read is refused with a typed error."""
    with pytest.raises(InvalidConfigError, match="cannot read lengths"):
        read_lengths(tmp_path / "none")
