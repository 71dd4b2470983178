"""Finished answers as data: examples of a predictor or a probe, and pairs of lengths."""

from __future__ import annotations

import csv
import io
import json
import logging
import random
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from tqdm import tqdm

from jaxserve.core.assets import fetch
from jaxserve.core.errors import InvalidConfigError
from jaxserve.predictor.data import Example, read_jsonl
from jaxserve.workload import recorded, sharegpt

_log = logging.getLogger(__name__)

KNOWN = (
    "sharegpt, answered:FILE with answer lengths that benchmarks.lengths.answers wrote, "
    "recorded:FILE with a file written by --record, or a file of JSON lines"
)
_ANSWERED = "answered:"
_RECORDED = "recorded:"
# Answers that stopped or reached their limit; the lengths of other answers are not used.
_WHOLE = ("stop", "length")


class AnswerTokenizer(Protocol):
    """A tokenizer that counts the tokens of answers and decodes recorded prompts."""

    def encode(self, text: str, /) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int], /) -> str: ...


def read_examples(
    source: str,
    *,
    tokenizer: Callable[[], AnswerTokenizer],
    max_examples: int | None = None,
    seed: int = 0,
    path: Path | None = None,
    progress: bool = True,
) -> list[Example]:
    """Read the examples of a source, in random order.

    Args:
      source: see `KNOWN`. In `sharegpt`, every question is a prompt, without its history, and its
        conversation is the shared one; `answered:` has answers to some of these questions. In a
        recorded run, every sample is an example, and prompts are decoded without control tokens.
      tokenizer: makes the served model's tokenizer; not called for JSON lines.
      max_examples: size of a random draw; None for all examples.
      seed: seed of the order and the draw.
      path: a ShareGPT file; None to fetch the published one.

    Raises:
      InvalidConfigError: the source is unknown or cannot be read, or has no example.
      DownloadError, ModelCacheError: ShareGPT cannot be fetched.
    """
    if max_examples is not None and max_examples < 1:
        raise InvalidConfigError(f"max_examples={max_examples} is not allowed; pass 1 or more")
    if source == "sharegpt":
        found = _of_sharegpt(path, tokenizer(), max_examples, seed, progress)
    elif source.startswith(_ANSWERED):
        found = _with_lengths(Path(source.removeprefix(_ANSWERED)), path, progress)
    elif source.startswith(_RECORDED):
        found = list(_of_trace(source.removeprefix(_RECORDED), tokenizer()))
    else:
        found = _of_jsonl(Path(source))
    if not found:
        raise InvalidConfigError(f"{source} has no prompt with a whole answer; pass other data")
    random.Random(seed).shuffle(found)
    return found[:max_examples]


def _of_sharegpt(
    path: Path | None,
    tokenizer: AnswerTokenizer,
    max_examples: int | None,
    seed: int,
    progress: bool,
) -> list[Example]:
    path = path or fetch(sharegpt.FILE, progress=progress)
    found = list(questions(path))
    # Only drawn answers are tokenized, because all of them would take minutes.
    random.Random(seed).shuffle(found)
    bar = tqdm(
        found[:max_examples],
        desc="counting tokens",
        unit="answer",
        delay=2,
        leave=False,
        disable=not progress,
    )
    lengths = ((one, len(tokenizer.encode(one.answer))) for one in bar)
    return [Example(one.text, length, one.origin) for one, length in lengths if length]


@final
@dataclass(frozen=True)
class Question:
    """A question of ShareGPT and the answer that follows it; neither is empty.

    `record` and `origin` are the ids of the record and of the shared conversation, and `turn`
    counts such questions before it in the record.
    """

    record: str
    turn: int
    origin: str
    text: str
    answer: str


def questions(path: Path) -> Iterator[Question]:
    for talk in sharegpt.read(path):
        for turn, (question, answer) in enumerate(turns(talk)):
            yield Question(talk.id, turn, talk.origin, question, answer)


def turns(talk: sharegpt.SharedConversation) -> Iterator[tuple[str, str]]:
    """Yield every question that an answer follows, with the answer; neither is empty."""
    for (asker, question), (answerer, answer) in zip(
        talk.messages, talk.messages[1:], strict=False
    ):
        if (asker, answerer) == ("human", "gpt") and question.strip() and answer.strip():
            yield question, answer


def _with_lengths(path: Path, shared: Path | None, progress: bool) -> list[Example]:
    """Read lines of {"record": id, "turn": n, "output_length": tokens}, with ShareGPT's prompts."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        lengths = {
            (line["record"], line["turn"]): line["output_length"]
            for line in lines
            if line["output_length"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(
            f"{path} does not hold answer lengths ({type(error).__name__}: {error}); pass a file "
            "that benchmarks.lengths.answers wrote"
        ) from error
    shared = shared or fetch(sharegpt.FILE, progress=progress)
    return [
        Example(one.text, length, one.origin)
        for one in questions(shared)
        if (length := lengths.get((one.record, one.turn)))
    ]


def _of_trace(path: str, tokenizer: AnswerTokenizer) -> Iterable[Example]:
    for request in recorded.read(path):
        prompt = tokenizer.decode(request.prompt_token_ids)
        lengths = zip(request.num_output_tokens, request.finish_reasons, strict=True)
        for length, reason in lengths:
            if reason in _WHOLE and length:
                yield Example(prompt, length)


def _of_jsonl(path: Path) -> list[Example]:
    try:
        return list(read_jsonl(path))
    except OSError as error:
        raise InvalidConfigError(
            f"cannot read the data {str(path)!r}: {error}; pass {KNOWN}"
        ) from error
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error


_LINE = (
    'pass a file written by record=... or --record, or lines of {"prompt_token_ids": [5, 6], '
    '"token_ids": [7, 8, 2]}, optionally with "conversation" and "finish_reason"'
)


@final
@dataclass(frozen=True, kw_only=True)
class FinishedAnswer:
    """A finished answer.

    Attributes:
      prompt: token ids.
      output: token ids with the stop token, at least one.
      conversation: id of its conversation, which a split keeps whole; "" for a conversation of this
        prompt alone.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    conversation: str = ""


def read_finished(path: str | Path) -> list[FinishedAnswer]:
    """Read the answers of a recorded run, or of other JSON lines with prompts' and answers' tokens.

    A line is one of a trace (`jaxserve.workload.recorded`), or has one answer's tokens as
    `token_ids`. Answers that were cancelled or failed are skipped.

    Raises:
      InvalidConfigError: the file cannot be read, a line is malformed, or no answer is left.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"cannot read the answers {path}: {error}; {_LINE}") from error
    found = list(_answers(path, lines))
    if not found:
        raise InvalidConfigError(
            f"{path} has no answer that stopped or reached its limit; pass other data"
        )
    return found


def _answers(path: str | Path, lines: Sequence[str]) -> Iterator[FinishedAnswer]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                _log.warning("%s line %d is cut off and is skipped", path, number)
                return
            raise InvalidConfigError(f"{path}:{number} is not JSON: {error}; {_LINE}") from error
        try:
            yield from _of_line(given)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidConfigError(
                f"{path}:{number}: {type(error).__name__}: {error}; {_LINE}"
            ) from error


def _of_line(given: dict[str, Any]) -> Iterator[FinishedAnswer]:
    if "token_ids" in given:
        outputs, reasons = [given["token_ids"]], [given.get("finish_reason", "stop")]
    else:
        outputs, reasons = given["output_token_ids"], given["finish_reasons"]
    for output, reason in zip(outputs, reasons, strict=True):
        if reason in _WHOLE and output:
            yield FinishedAnswer(
                prompt=tuple(map(int, given["prompt_token_ids"])),
                output=tuple(map(int, output)),
                conversation=str(given.get("conversation") or ""),
            )


_FORMS = (
    "pass a file written by record=..., a CSV file with two columns, or a JSON list of [prompt "
    "tokens, output tokens]"
)
# A number with more digits is not a length.
_MAX_DIGITS = 18


def read_lengths(path: str | Path) -> list[tuple[int, int]]:
    """Return (prompt tokens, output tokens) of each answer in a file.

    A recorded trace has lines of JSON objects; each sample counts, except cancelled and failed
    ones. A CSV file has two columns, with or without a header. A JSON file has a list of pairs.

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
        pairs = _pairs_of_trace(path)
    elif begin == "[":
        pairs = _pairs_of_json(path, text)
    else:
        pairs = _pairs_of_csv(path, text)
    if not pairs:
        raise InvalidConfigError(f"{path} has no lengths of answers; {_FORMS}")
    return pairs


def _pairs_of_trace(path: str | Path) -> list[tuple[int, int]]:
    return [
        (len(request.prompt_token_ids), num_output)
        for request in recorded.read(path)
        for num_output, reason in zip(
            request.num_output_tokens, request.finish_reasons, strict=True
        )
        if reason in _WHOLE and num_output
    ]


def _pairs_of_json(path: str | Path, text: str) -> list[tuple[int, int]]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfigError(f"{path} is not JSON: {error}; {_FORMS}") from error
    return [_pair(path, f"item {number}", item) for number, item in enumerate(given, start=1)]


def _pairs_of_csv(path: str | Path, text: str) -> list[tuple[int, int]]:
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
    """Return a field's whole number; the field itself if it is not one, or has too many digits."""
    return int(field) if field.isdecimal() and len(field) <= _MAX_DIGITS else field


def _pair(path: str | Path, where: str, given: Any) -> tuple[int, int]:
    is_pair = isinstance(given, list) and len(given) == 2
    if not is_pair or not all(type(length) is int and length >= 1 for length in given):
        raise InvalidConfigError(
            f"{path} {where}: {reprlib.repr(given)} is not allowed; use two whole numbers of at "
            "least 1, prompt tokens and output tokens"
        )
    return given[0], given[1]
