"""Prompts and the lengths of their answers: reading, writing, splitting, batching."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar, final

import numpy as np
import tokenizers

# Sizes that batches are padded to, in tokens: each is compiled once.
TOKEN_BUCKETS = (32, 64, 128, 256, 512)


@final
@dataclass(frozen=True)
class Example:
    """One prompt, and how many tokens its answer had.

    Attributes:
      conversation: what prompts must not be torn apart from; by default the prompt itself.
    """

    prompt: str
    output_length: int
    conversation: str = ""

    def __post_init__(self) -> None:
        if self.output_length < 1:
            raise ValueError(f"output_length={self.output_length}; an answer has a token at least")


def read_jsonl(path: Path) -> Iterator[Example]:
    """Lines of {"prompt": text, "output_length": tokens, "conversation": id or absent}.

    Raises:
      ValueError: naming the file and the line that is not such an object.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                given = json.loads(line)
                yield Example(
                    str(given["prompt"]),
                    int(given["output_length"]),
                    str(given.get("conversation", "")),
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}:{number}: {type(error).__name__}: {error}; a line is "
                    '{"prompt": "...", "output_length": 12}'
                ) from error


def write_jsonl(path: Path, examples: Iterable[Example]) -> None:
    """What `read_jsonl` reads."""
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(vars(example), ensure_ascii=False) + "\n")


def columns(examples: Sequence[Example]) -> tuple[list[str], np.ndarray]:
    """Prompts, and output lengths, int [examples]."""
    return [e.prompt for e in examples], np.asarray([e.output_length for e in examples])


def clipped(examples: Iterable[Example], max_length: int) -> list[Example]:
    """Answers that would be longer end at `max_length`, as they do where they are served."""
    return [replace(one, output_length=min(one.output_length, max_length)) for one in examples]


class Splittable(Protocol):
    """What has a place in a split, by its conversation's name or else by its prompt."""

    @property
    def conversation(self) -> str: ...

    @property
    def prompt(self) -> object: ...


_T = TypeVar("_T", bound=Splittable)


def split(examples: Sequence[_T], *, held_out: float, seed: int = 0) -> tuple[list[_T], list[_T]]:
    """Those to learn from and those held out, conversations left whole.

    A conversation's side depends on its name and the seed alone, so more data moves none over.
    """
    learned, kept, rest = _split(examples, (held_out, 0.0), seed)
    assert not rest
    return learned, kept


def split_in_three(
    examples: Sequence[_T], *, held_out: float, seed: int = 0
) -> tuple[list[_T], list[_T], list[_T]]:
    """As `split`: to learn from, to stop early and calibrate by, and to test on.

    Args:
      held_out: share of each of the latter two; under a half.
    """
    return _split(examples, (held_out, held_out), seed)


def _split(
    examples: Sequence[_T], shares: tuple[float, float], seed: int
) -> tuple[list[_T], list[_T], list[_T]]:
    """What is left over, and the two shares."""
    if not 0.0 < shares[0] < 1.0 or sum(shares) >= 1.0:
        largest = "1" if not shares[1] else "a half"
        raise ValueError(f"held_out={shares[0]}: give a share between 0 and {largest}")
    sides: tuple[list[_T], list[_T], list[_T]] = ([], [], [])
    for example in examples:
        name = f"{seed}:{example.conversation or example.prompt}".encode()
        drawn = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64
        sides[1 if drawn < shares[0] else 2 if drawn < sum(shares) else 0].append(example)
    return sides


@final
class PromptEncoder:
    """Prompts as padded arrays of tokens.

    Long prompts lose their middle: what is asked for stands at the beginning or at the end.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int):
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.max_tokens = max_tokens

    def tokens(self, prompts: Sequence[str]) -> list[np.ndarray]:
        """Token ids (int32) of each prompt, at most `max_tokens`."""
        encoded = self._tokenizer.encode_batch(list(prompts))
        return [self.shortened(np.asarray(one.ids, np.int32)) for one in encoded]

    def shortened(self, ids: np.ndarray) -> np.ndarray:
        """Token ids (int32) without those in the middle that are too many."""
        if len(ids) <= self.max_tokens:
            return ids
        head = self.max_tokens // 2
        return np.concatenate([ids[:head], ids[len(ids) - (self.max_tokens - head) :]])


def width_of(num_tokens: int) -> int:
    """The smallest bucket that holds a text."""
    return next((size for size in TOKEN_BUCKETS if num_tokens <= size), num_tokens)


def padded(
    tokens: Sequence[np.ndarray], num_rows: int, width: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """int32 tokens and bool mask [num_rows, width]; by default as wide as the longest needs."""
    width = width or width_of(max((len(ids) for ids in tokens), default=1))
    ids, mask = np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), bool)
    for row, own in enumerate(tokens):
        ids[row, : len(own)], mask[row, : len(own)] = own, True
    # A row without tokens attends to its padding: to nothing at all would not be a number.
    mask[len(tokens) :, 0] = True
    return ids, mask


def shuffled_batches(
    lengths: np.ndarray, batch_size: int, random: np.random.Generator, pool: int = 20
) -> list[np.ndarray]:
    """Indices of batches in random order, each of texts of about the same length.

    Args:
      lengths: int [texts].
      pool: batches that are drawn together and then sorted by length.
    """
    order = random.permutation(len(lengths))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), pool * batch_size):
        some = order[start : start + pool * batch_size]
        some = some[np.argsort(lengths[some], kind="stable")]
        batches += [some[i : i + batch_size] for i in range(0, len(some), batch_size)]
    random.shuffle(batches)  # type: ignore[arg-type]
    return batches
