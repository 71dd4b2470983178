"""What a processor is: its arrays, when it is needed, and what it does on the device."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float32, Int32, Shaped

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.choice import RandomChoice

# Arrays of one processor by name.
Arrays = Mapping[str, Shaped[Array, "rows ..."]]


@final
@dataclass(frozen=True)
class RowArray:
    """The type of an array that has one entry a row.

    Attributes:
      dtype: of the array.
      neutral: the value that changes nothing, in every element.
      shape: of one entry; () for a number a row.
      has_vocab_bits: an entry of `step_arrays` has a bit a token of the vocabulary, and so as many
        elements as they fill; `shape` is then ().
    """

    dtype: npt.DTypeLike
    neutral: float
    shape: tuple[int, ...] = ()
    has_vocab_bits: bool = False

    def full(self, num_rows: int, vocab_size: int = 0) -> Shaped[np.ndarray, "{num_rows} ..."]:
        """Return the neutral array, [num_rows, *shape], or [num_rows, elements] of vocabulary."""
        shape = self.shape
        if self.has_vocab_bits:
            shape = (-(-vocab_size // (8 * np.dtype(self.dtype).itemsize)),)
        return np.full((num_rows, *shape), self.neutral, self.dtype)


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What a processor may read of the rows beside its own arrays.

    Attributes:
      tokens: prompt and output so far of every slot; read a part of it with `tokens_from`, since
        the whole is as wide as the longest context that there may be.
      slot: of each row.
      length: valid tokens, which is the position of the token to choose.
      prompt_length: tokens of the prompt alone.
      first: the first position that counts as the row's text: the decoder's, behind the prompt of
        an encoder; None for the first of all.
    """

    tokens: Int32[Array, "slots max_context"]
    slot: Int32[Array, " rows"]
    length: Int32[Array, " rows"]
    prompt_length: Int32[Array, " rows"]
    first: Int32[Array, " rows"] | None = None

    def tokens_from(self, start: Int32[Array, ""], count: int) -> Int32[Array, "rows {count}"]:
        """Return the tokens at `count` positions from `start` on; those past the context are 0."""
        positions = start + jnp.arange(count)
        return self.tokens.at[self.slot[:, None], positions].get(mode="fill", fill_value=0)


class Processor(abc.ABC):
    """One change to how tokens are chosen. A subclass is `LogitsProcessor` or `ChoiceProcessor`.

    A processor has no state: everything that differs between requests is in its arrays. A row
    that does not need a processor has neutral entries there, and the processor must then leave the
    row exactly as it is, since it runs for all rows of a step in which one row needs it.

    Attributes:
      name: unique among the processors.
      slot_arrays: arrays that stay with a slot while it serves a request.
      step_arrays: arrays that come with a step instead, such as masks of allowed tokens. A step
        that brings none leaves the processor out. A `LogitsProcessor` with such arrays runs in
        every variant.
    """

    name: str
    slot_arrays: Mapping[str, RowArray] = {}
    step_arrays: Mapping[str, RowArray] = {}

    @abc.abstractmethod
    def is_needed(self, params: SamplingParams) -> bool:
        """Whether this processor changes anything for a request with these parameters."""

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """Entries of `slot_arrays` for a request that needs this processor.

        An entry may be shorter than the array's; the rest stays neutral.
        """
        return {}


class LogitsProcessor(Processor):
    """A processor that changes logits, for greedy and random rows alike."""

    @abc.abstractmethod
    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        """Return the changed logits.

        Args:
          logits: `vocab` is rounded up; what is past the vocabulary is at -inf and must stay.
          arrays: of `slot_arrays` and `step_arrays`.
          rows: what else is known of the rows.
        """


class ChoiceProcessor(Processor):
    """A processor that changes the random choice; rows that choose greedily ignore it."""

    @abc.abstractmethod
    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        """Return the changed choice.

        Args:
          choice: what the processors before this one have left.
          arrays: of `slot_arrays` and `step_arrays`.
          rows: what else is known of the rows.
        """
