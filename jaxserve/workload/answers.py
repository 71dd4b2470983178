"""Prompts and the lengths of their answers, for a length predictor to learn from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from jaxserve.core.assets import fetch
from jaxserve.core.errors import InvalidConfigError
from jaxserve.workload import recorded, sharegpt
from predictor.data import Example, read_jsonl

KNOWN = "sharegpt, recorded:FILE with a file written by --record, or a file of JSON lines"
_RECORDED = "recorded:"
# Answers that ended by themselves or at their limit; the length of others says nothing.
_WHOLE = ("stop", "length")


class Tokenizer(Protocol):
    """What counts answers' tokens, and reads recorded prompts."""

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
    """Examples of a source, in random order.

    Args:
      source: see `KNOWN`. Of `sharegpt` every question is a prompt, without what came before it;
        its conversation is the one that was shared. Of a recorded run every sample is an example;
        prompts are read back without control tokens.
      tokenizer: the served model's; asked for where it is needed. JSON lines need none.
      max_examples: a random draw of so many; all if None.
      seed: of the order and the draw.
      path: a ShareGPT file; the published one is fetched where None.

    Raises:
      InvalidConfigError: an unknown source, a file that cannot be read, or no example in it.
      DownloadError, ModelCacheError: ShareGPT cannot be fetched.
    """
    if max_examples is not None and max_examples < 1:
        raise InvalidConfigError(f"max_examples={max_examples}; give 1 or more")
    if source == "sharegpt":
        found = _of_sharegpt(path, tokenizer(), max_examples, seed, progress)
    elif source.startswith(_RECORDED):
        found = list(_of_trace(source.removeprefix(_RECORDED), tokenizer()))
    else:
        found = _of_lines(Path(source))
    if not found:
        raise InvalidConfigError(f"{source} holds no prompt with a whole answer; give other data")
    random.Random(seed).shuffle(found)
    return found[:max_examples]


def _of_sharegpt(
    path: Path | None, tokenizer: Tokenizer, max_examples: int | None, seed: int, progress: bool
) -> list[Example]:
    path = path or fetch(sharegpt.FILE, progress=progress)
    pairs = [
        (question, answer, talk.origin)
        for talk in sharegpt.read(path)
        for question, answer in turns(talk)
    ]
    # Counted are those that are drawn: all of them take minutes.
    random.Random(seed).shuffle(pairs)
    bar = tqdm(
        pairs[:max_examples], desc="counting tokens", unit="answer",
        delay=2, leave=False, disable=not progress,
    )  # fmt: skip
    lengths = ((question, len(tokenizer.encode(answer)), id) for question, answer, id in bar)
    return [Example(question, length, id) for question, length, id in lengths if length]


def turns(talk: sharegpt.Conversation) -> Iterator[tuple[str, str]]:
    """Every question that is answered at once, and its answer; neither is empty."""
    for (asker, question), (answerer, answer) in zip(
        talk.messages, talk.messages[1:], strict=False
    ):
        if (asker, answerer) == ("human", "gpt") and question.strip() and answer.strip():
            yield question, answer


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
            f"cannot read the data {str(path)!r}: {error}; give {KNOWN}"
        ) from error
    except ValueError as error:
        raise InvalidConfigError(str(error)) from error
