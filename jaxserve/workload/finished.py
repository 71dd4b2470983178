"""Finished answers with their tokens, as training data of a probe."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError

_log = logging.getLogger(__name__)

# Answers that stopped or reached their limit; the lengths of other answers are not used.
_WHOLE = ("stop", "length")
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
      conversation: id of its conversation, which a split keeps whole; "" stands for a conversation
        of this prompt alone.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    conversation: str = ""


def read(path: str | Path) -> list[FinishedAnswer]:
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
