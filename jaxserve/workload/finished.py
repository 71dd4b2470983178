"""Answers with their tokens, for a probe to learn from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jaxserve.core.errors import InvalidConfigError

_log = logging.getLogger(__name__)

# Answers that ended by themselves or at their limit; what is left of others says nothing.
_WHOLE = ("stop", "length")
_LINE = (
    'give a file written by record=... or --record, or lines of {"prompt_token_ids": [5, 6], '
    '"token_ids": [7, 8, 2]}, with "conversation" and "finish_reason" if wanted'
)


@final
@dataclass(frozen=True, kw_only=True)
class FinishedAnswer:
    """One answer that has ended.

    Attributes:
      output: the token that ended it included; at least one.
      conversation: what must not be torn apart from it; by default the prompt itself.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    conversation: str = ""


def read(path: str | Path) -> list[FinishedAnswer]:
    """The answers of a recorded run, or of any JSON lines that have prompts' and answers' tokens.

    A line is that of a trace (`jaxserve.workload.recorded`), or has the tokens of one answer as
    `token_ids`. Answers that were cancelled or failed are left out.

    Raises:
      InvalidConfigError: the file cannot be read, a line is not one, or no answer is whole.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"cannot read the answers {path}: {error}; {_LINE}") from error
    found = list(_answers(path, lines))
    if not found:
        raise InvalidConfigError(f"{path} holds no answer that ended by itself or at its limit")
    return found


def _answers(path: str | Path, lines: Sequence[str]) -> Iterator[FinishedAnswer]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                _log.warning("%s line %d was cut off and is left out", path, number)
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
