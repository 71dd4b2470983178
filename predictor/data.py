"""Reading, writing, splitting and batching of prompts and their output lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar, final

import numpy as np
import tokenizers
from jaxtyping import Bool, Int, Int32

# Widths in tokens that batches are padded to; each is compiled once.
TOKEN_BUCKETS = (32, 64, 128, 256, 512)


@final
@dataclass(frozen=True)
class Example:
    """A prompt and the number of tokens of its answer.

    A split keeps a `conversation` id whole; "" stands for a conversation of this prompt alone.
    """

    prompt: str
    output_length: int
    conversation: str = ""

    def __post_init__(self) -> None:
        if self.output_length < 1:
            raise ValueError(f"output_length={self.output_length} is not allowed; pass 1 or more")


def read_jsonl(path: Path) -> Iterator[Example]:
    """Read lines of {"prompt": text, "output_length": tokens, "conversation": optional id}.

    Raises:
      ValueError: a line is not such an object; the message names the file and the line.
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
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(vars(example), ensure_ascii=False) + "\n")


def columns(examples: Sequence[Example]) -> tuple[list[str], Int[np.ndarray, " examples"]]:
    return [e.prompt for e in examples], np.asarray([e.output_length for e in examples])


def clipped(examples: Iterable[Example], max_length: int) -> list[Example]:
    """Return examples with output lengths of at most `max_length`, as serving limits them."""
    return [replace(one, output_length=min(one.output_length, max_length)) for one in examples]


class Splittable(Protocol):
    """An example that a split assigns by its conversation's id, or by its prompt without one."""

    @property
    def conversation(self) -> str: ...

    @property
    def prompt(self) -> object: ...


_T = TypeVar("_T", bound=Splittable)


def split(examples: Sequence[_T], *, held_out: float, seed: int = 0) -> tuple[list[_T], list[_T]]:
    """Split examples into those to learn from and those held out; conversations stay whole.

    A conversation's side depends on its id and the seed alone, so added data moves no conversation.
    `held_out` is the share of the conversations, between 0 and 1.
    """
    learned, kept, rest = _split(examples, (held_out, 0.0), seed)
    assert not rest
    return learned, kept


def split_in_three(
    examples: Sequence[_T], *, held_out: float, seed: int = 0
) -> tuple[list[_T], list[_T], list[_T]]:
    """Split as `split` does, into examples to learn from, to calibrate with, and to test on.

    `held_out` is the share of each of the last two, between 0 and a half.
    """
    return _split(examples, (held_out, held_out), seed)


def _split(
    examples: Sequence[_T], shares: tuple[float, float], seed: int
) -> tuple[list[_T], list[_T], list[_T]]:
    if not 0.0 < shares[0] < 1.0 or sum(shares) >= 1.0:
        largest = "1" if not shares[1] else "a half"
        raise ValueError(
            f"held_out={shares[0]} is not allowed; pass a share between 0 and {largest}"
        )
    sides: tuple[list[_T], list[_T], list[_T]] = ([], [], [])
    for example in examples:
        name = f"{seed}:{example.conversation or example.prompt}".encode()
        drawn = int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64
        sides[1 if drawn < shares[0] else 2 if drawn < sum(shares) else 0].append(example)
    return sides


@final
class PromptEncoder:
    """A tokenizer of prompts, which removes the middle of a prompt that is too long.

    The question is at its beginning or its end.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int):
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.max_tokens = max_tokens

    def tokens(self, prompts: Sequence[str]) -> list[Int32[np.ndarray, " _"]]:
        """Return the token ids of each prompt, at most `max_tokens` of them."""
        encoded = self._tokenizer.encode_batch(list(prompts))
        return [self.shortened(np.asarray(one.ids, np.int32)) for one in encoded]

    def shortened(self, ids: Int32[np.ndarray, " tokens"]) -> Int32[np.ndarray, " kept"]:
        """Return `ids` without the middle tokens that exceed `max_tokens`."""
        if len(ids) <= self.max_tokens:
            return ids
        head = self.max_tokens // 2
        return np.concatenate([ids[:head], ids[len(ids) - (self.max_tokens - head) :]])


def width_of(num_tokens: int) -> int:
    """Return the smallest of `TOKEN_BUCKETS` that holds a text; `num_tokens` if none does."""
    return next((size for size in TOKEN_BUCKETS if num_tokens <= size), num_tokens)


def padded(
    tokens: Sequence[np.ndarray], num_rows: int, width: int | None = None
) -> tuple[Int32[np.ndarray, "rows width"], Bool[np.ndarray, "rows width"]]:
    """Return tokens and a mask, padded to `width`, by default `width_of` the longest text."""
    width = width or width_of(max((len(ids) for ids in tokens), default=1))
    ids, mask = np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), bool)
    for row, own in enumerate(tokens):
        ids[row, : len(own)], mask[row, : len(own)] = own, True
    # A row without tokens attends to one padding token: attention to none would give NaN.
    mask[len(tokens) :, 0] = True
    return ids, mask


def shuffled_batches(
    lengths: Int[np.ndarray, " texts"], batch_size: int, random: np.random.Generator, pool: int = 20
) -> list[np.ndarray]:
    """Return the indices of each batch, in random order; texts of a batch have similar lengths.

    Args:
      pool: number of batches that are drawn together and then sorted by length.
    """
    order = random.permutation(len(lengths))
    batches: list[np.ndarray] = []
    for start in range(0, len(order), pool * batch_size):
        some = order[start : start + pool * batch_size]
        some = some[np.argsort(lengths[some], kind="stable")]
        batches += [some[i : i + batch_size] for i in range(0, len(some), batch_size)]
    random.shuffle(batches)
    return batches
