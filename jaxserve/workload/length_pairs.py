"""Files of prompt and output lengths: recorded traces, CSV, or JSON."""

from __future__ import annotations

import csv
import io
import json
import reprlib
from pathlib import Path
from typing import Any

from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import recorded

_FORMS = (
    "pass a file written by record=..., a CSV file with two columns, or a JSON list of [prompt "
    "tokens, output tokens]"
)
# Answers that ended by themselves or at their limit; others say nothing of lengths.
_WHOLE = ("stop", "length")
_MAX_DIGITS = 18


def read_lengths(path: str | Path) -> list[tuple[int, int]]:
    """Return (prompt tokens, output tokens) of each answer in a file.

    A recorded trace has lines of JSON objects; each sample counts, cancelled and failed ones do
    not. A CSV file has two columns, with or without a header. A JSON file has a list of pairs.

    Raises:
      InvalidConfigError: the file cannot be read, has another form or no lengths, or a length is
        below 1.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"cannot read lengths from {path}: {error}; {_FORMS}") from error
    begin = text.lstrip()[:1]
    if begin == "{":
        pairs = _of_trace(path)
    elif begin == "[":
        pairs = _of_json(path, text)
    else:
        pairs = _of_csv(path, text)
    if not pairs:
        raise InvalidConfigError(f"{path} has no lengths of answers; {_FORMS}")
    return pairs


def _of_trace(path: str | Path) -> list[tuple[int, int]]:
    return [
        (len(request.prompt_token_ids), num_output)
        for request in recorded.read(path)
        for num_output, reason in zip(
            request.num_output_tokens, request.finish_reasons, strict=True
        )
        if reason in _WHOLE and num_output
    ]


def _of_json(path: str | Path, text: str) -> list[tuple[int, int]]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfigError(f"{path} is not JSON: {error}; {_FORMS}") from error
    return [_pair(path, f"item {number}", item) for number, item in enumerate(given, start=1)]


def _of_csv(path: str | Path, text: str) -> list[tuple[int, int]]:
    try:
        rows = [
            (number, [field.strip() for field in row])
            for number, row in enumerate(csv.reader(io.StringIO(text)), start=1)
            if any(field.strip() for field in row)
        ]
    except csv.Error as error:
        raise InvalidConfigError(f"{path} is not CSV: {error}; {_FORMS}") from error
    if rows and not any(field.isdecimal() for field in rows[0][1]):
        rows = rows[1:]  # a header
    return [_pair(path, f"line {number}", list(map(_number, fields))) for number, fields in rows]


def _number(field: str) -> int | str:
    """Return a field's whole number; the field itself if it is none, or longer than any length."""
    return int(field) if field.isdecimal() and len(field) <= _MAX_DIGITS else field


def _pair(path: str | Path, where: str, given: Any) -> tuple[int, int]:
    is_pair = isinstance(given, list) and len(given) == 2
    if not is_pair or not all(type(length) is int and length >= 1 for length in given):
        raise InvalidConfigError(
            f"{path} {where}: {reprlib.repr(given)} is not allowed; use two whole numbers of at "
            "least 1, prompt tokens and output tokens"
        )
    return given[0], given[1]
