"""Prompts and their output lengths, as training data of a length predictor."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from tqdm import tqdm

from jaxserve.core.assets import fetch
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import recorded, sharegpt
from predictor.data import Example, read_jsonl

KNOWN = (
    "sharegpt, answered:FILE with answer lengths that benchmarks.lengths.answers wrote, "
    "recorded:FILE with a file written by --record, or a file of JSON lines"
)
_ANSWERED = "answered:"
_RECORDED = "recorded:"
# Answers that stopped or reached their limit; the lengths of other answers are not used.
_WHOLE = ("stop", "length")


class Tokenizer(Protocol):
    """A tokenizer that counts the tokens of answers and decodes recorded prompts."""

    def encode(self, text: str, /) -> Sequence[int]: ...

    def decode(self, token_ids: Sequence[int], /) -> str: ...


def read(
    source: str,
    *,
    tokenizer: Callable[[], Tokenizer],
    max_examples: int | None = None,
    seed: int = 0,
    path: Path | None = None,
    progress: bool = True,
) -> list[Example]:
    """Read the examples of a source, in random order.

    Args:
      source: see `KNOWN`. In `sharegpt`, every question is a prompt, without its history, and its
        conversation is the one that was shared; `answered:` has answers to some of these questions.
        In a recorded run, every sample is an example, and prompts are decoded without control
        tokens.
      tokenizer: makes the served model's tokenizer; not called for JSON lines.
      max_examples: size of a random draw; None for all examples.
      seed: seed of the order and the draw.
      path: a ShareGPT file; the published one is fetched if None.

    Raises:
      InvalidConfigError: the source is unknown or cannot be read, or has no example.
      DownloadError, ModelCacheError: ShareGPT cannot be fetched.
    """
    if max_examples is not None and max_examples < 1:
        raise InvalidConfigError(f"max_examples={max_examples} is not allowed; pass 1 or more")
    if source == "sharegpt":
        found = _of_sharegpt(path, tokenizer(), max_examples, seed, progress)
    elif source.startswith(_ANSWERED):
        found = _answered(Path(source.removeprefix(_ANSWERED)), path, progress)
    elif source.startswith(_RECORDED):
        found = list(_of_trace(source.removeprefix(_RECORDED), tokenizer()))
    else:
        found = _of_lines(Path(source))
    if not found:
        raise InvalidConfigError(f"{source} has no prompt with a whole answer; pass other data")
    random.Random(seed).shuffle(found)
    return found[:max_examples]


def _of_sharegpt(
    path: Path | None, tokenizer: Tokenizer, max_examples: int | None, seed: int, progress: bool
) -> list[Example]:
    path = path or fetch(sharegpt.FILE, progress=progress)
    found = list(questions(path))
    # Only drawn answers are tokenized; all of them would take minutes.
    random.Random(seed).shuffle(found)
    bar = tqdm(
        found[:max_examples], desc="counting tokens", unit="answer",
        delay=2, leave=False, disable=not progress,
    )  # fmt: skip
    lengths = ((one, len(tokenizer.encode(one.answer))) for one in bar)
    return [Example(one.text, length, one.origin) for one, length in lengths if length]


@final
@dataclass(frozen=True)
class Question:
    """A question of ShareGPT and the answer that follows it; neither is empty.

    Attributes:
      record: id of the record.
      turn: number of such questions before it in the record.
      origin: id of the conversation as it was shared.
    """

    record: str
    turn: int
    origin: str
    text: str
    answer: str


def questions(path: Path) -> Iterator[Question]:
    """Yield the questions of a ShareGPT file, in its order."""
    for talk in sharegpt.read(path):
        for turn, (question, answer) in enumerate(turns(talk)):
            yield Question(talk.id, turn, talk.origin, question, answer)


def turns(talk: sharegpt.Conversation) -> Iterator[tuple[str, str]]:
    """Yield every question that an answer follows, with the answer; neither is empty."""
    for (asker, question), (answerer, answer) in zip(
        talk.messages, talk.messages[1:], strict=False
    ):
        if (asker, answerer) == ("human", "gpt") and question.strip() and answer.strip():
            yield question, answer


def _answered(path: Path, shared: Path | None, progress: bool) -> list[Example]:
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


def _of_trace(path: str, tokenizer: Tokenizer) -> Iterable[Example]:
    for request in recorded.read(path):
        prompt = tokenizer.decode(request.prompt_token_ids)
        lengths = zip(request.num_output_tokens, request.finish_reasons, strict=True)
        for length, reason in lengths:
            if reason in _WHOLE and length:
                yield Example(prompt, length)


def _of_lines(path: Path) -> list[Example]:
    try:
        return list(read_jsonl(path))
    except OSError as error:
        raise InvalidConfigError(
            f"cannot read the data {str(path)!r}: {error}; pass {KNOWN}"
        ) from error
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error
