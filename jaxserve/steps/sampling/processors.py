"""The processors, which change how tokens are chosen, and the order in which they are applied.

To add one, see docs/adding_a_processor.md.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.steps.sampling.choice import RandomChoice, least_gap, quantize, quantum

# Arrays of one processor by name.
Arrays = Mapping[str, Shaped[Array, "rows ..."]]


@final
@dataclass(frozen=True)
class RowArray:
    """The type of an array that has one entry a row."""

    dtype: npt.DTypeLike
    neutral: float  # the value that changes nothing, in every element
    shape: tuple[int, ...] = ()  # of one entry; () for a number a row
    # An entry of `step_arrays` has a bit per token of the vocabulary, packed into elements; `shape`
    # is then ().
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
    """What a processor may read of the rows in addition to its own arrays."""

    # Prompt and output so far of every slot; read a part of it with `tokens_from`, since the whole
    # is as wide as the longest possible context.
    tokens: Int32[Array, "slots max_context"]
    slot: Int32[Array, " rows"]
    length: Int32[Array, " rows"]  # valid tokens, which is the position of the token to choose
    prompt_length: Int32[Array, " rows"]  # tokens of the prompt alone
    # The first position that counts as the row's text: the decoder's, after the prompt of an
    # encoder; None to count all.
    first: Int32[Array, " rows"] | None = None

    def tokens_from(self, start: Int32[Array, ""], count: int) -> Int32[Array, "rows {count}"]:
        """Return the tokens at `count` positions from `start` on; those past the context are 0."""
        positions = start + jnp.arange(count)
        return self.tokens.at[self.slot[:, None], positions].get(mode="fill", fill_value=0)


class Processor(abc.ABC):
    """One change to how tokens are chosen. A subclass is `LogitsProcessor` or `ChoiceProcessor`.

    A processor has no state: everything that differs between requests is in its arrays. A row
    that does not need a processor has neutral entries there, and the processor must then leave the
    row exactly unchanged, since it runs for all rows of a step in which one row needs it.
    """

    name: str  # unique among the processors
    # Arrays that stay with a slot while it serves a request.
    slot_arrays: Mapping[str, RowArray] = {}
    # Arrays that come with a step instead, such as masks of allowed tokens. A step that brings none
    # leaves the processor out. A `LogitsProcessor` with such arrays runs in every variant.
    step_arrays: Mapping[str, RowArray] = {}

    @abc.abstractmethod
    def is_needed(self, params: SamplingParams) -> bool:
        """Return whether this processor changes anything for a request with these parameters."""

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        """Return entries of `slot_arrays` for a request that needs this processor.

        An entry may be shorter than the array's; the rest stays neutral.
        """
        return {}


class LogitsProcessor(Processor):
    """A processor that changes logits, for greedy and random rows alike."""

    @abc.abstractmethod
    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        """Return the changed logits; those of padding, past the vocabulary, must stay at -inf."""


class ChoiceProcessor(Processor):
    """A processor that changes the random choice; rows that choose greedily ignore it."""

    @abc.abstractmethod
    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        """Return the changed choice.

        Args:
          choice: the result of the processors before this one.
          arrays: of `slot_arrays` and `step_arrays`.
        """


_WORD_BITS = 32


@final
class AllowedTokens(LogitsProcessor):
    """Allows only tokens with a bit: bit t % 32 of a row's word t // 32 is token t's."""

    name = "allowed_tokens"
    step_arrays = {"words": RowArray(np.uint32, 2**_WORD_BITS - 1, has_vocab_bits=True)}

    def is_needed(self, params: SamplingParams) -> bool:
        return params.is_followed

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        words, vocab = arrays["words"], logits.shape[1]
        missing = max(0, -(-vocab // _WORD_BITS) - words.shape[1])
        words = jnp.pad(words, ((0, 0), (0, missing)))
        bits = words[:, :, None] >> jnp.arange(_WORD_BITS, dtype=jnp.uint32) & 1
        is_allowed = bits.reshape(words.shape[0], -1)[:, :vocab] > 0
        return jnp.where(is_allowed, logits, -jnp.inf)


# Tokens of each row that are counted at once.
_TOKENS_AT_ONCE = 256


@final
class Penalties(LogitsProcessor):
    """Lowers the logits of tokens that the prompt or the output has; see `SamplingParams`."""

    name = "penalties"
    slot_arrays = {
        "repetition": RowArray(np.float32, 1),
        "presence": RowArray(np.float32, 0),
        "frequency": RowArray(np.float32, 0),
    }

    def is_needed(self, params: SamplingParams) -> bool:
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        params = request.params
        return {
            "repetition": params.repetition_penalty,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
        }

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        factor, presence, frequency = (
            arrays[name][:, None] for name in ("repetition", "presence", "frequency")
        )
        needed = (factor != 1) | (presence != 0) | (frequency != 0)
        seen, count = _occurrences(rows, needed[:, 0], logits.shape[1])
        repeated = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(seen, repeated, logits)
        return logits - count * frequency - jnp.where(count > 0, presence, 0.0)


def _occurrences(
    rows: Rows, needed: Bool[Array, " rows"], vocab: int
) -> tuple[Bool[Array, "rows vocab"], Float32[Array, "rows vocab"]]:
    """Return which tokens the text of a row has, and how often its output has each.

    The text is read in pieces up to the longest row that needs it, so the cost follows its length,
    not the largest context.
    """
    row = jnp.arange(rows.length.shape[0])[:, None]
    size = min(_TOKENS_AT_ONCE, rows.tokens.shape[1])

    def read(
        piece: Int32[Array, ""],
        found: tuple[Bool[Array, "rows vocab"], Float32[Array, "rows vocab"]],
    ) -> tuple[Bool[Array, "rows vocab"], Float32[Array, "rows vocab"]]:
        seen, count = found
        position = piece * size + jnp.arange(size)
        counts = position < rows.length[:, None]
        if rows.first is not None:
            counts &= position >= rows.first[:, None]
        token = jnp.where(counts, rows.tokens_from(piece * size, size), vocab)
        output = jnp.where(position >= rows.prompt_length[:, None], token, vocab)
        return (
            seen.at[row, token].set(True, mode="drop"),
            count.at[row, output].add(1.0, mode="drop"),
        )

    shape = (rows.length.shape[0], vocab)
    nothing = jnp.zeros(shape, jnp.bool_), jnp.zeros(shape, jnp.float32)
    num_pieces = -(-jnp.max(jnp.where(needed, rows.length, 0)) // size)
    return jax.lax.fori_loop(0, num_pieces, read, nothing)


@final
class LogitBias(LogitsProcessor):
    """Adds `SamplingParams.logit_bias`; `ids` are padded with -1."""

    name = "logit_bias"
    slot_arrays = {
        "ids": RowArray(np.int32, -1, (MAX_LOGIT_BIAS,)),
        "values": RowArray(np.float32, 0, (MAX_LOGIT_BIAS,)),
    }

    def is_needed(self, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        bias = request.params.logit_bias or {}
        return {"ids": list(bias), "values": list(bias.values())}

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        row = jnp.arange(logits.shape[0])[:, None]
        biased = jnp.where(arrays["ids"] >= 0, arrays["ids"], logits.shape[1])
        return logits.at[row, biased].add(arrays["values"], mode="drop")


_INT32_MAX = 2**31 - 1


@final
class MinTokens(LogitsProcessor):
    """Forbids the row's stop tokens while prompt and output have fewer tokens than `length`.

    As in vLLM, this includes the model's end tokens if the row ignores them. `ids` are padded with
    -1.
    """

    name = "min_tokens"
    slot_arrays = {
        "length": RowArray(np.int32, 0),
        "ids": RowArray(np.int32, -1, (MAX_STOP_TOKEN_IDS,)),
    }

    def is_needed(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        return {
            "length": min(len(request.prompt) + request.params.min_tokens, _INT32_MAX),
            "ids": list(dict.fromkeys((*request.stop_token_ids, *request.end_token_ids))),
        }

    def apply(
        self, logits: Float32[Array, "rows vocab"], arrays: Arrays, rows: Rows
    ) -> Float32[Array, "rows vocab"]:
        row = jnp.arange(logits.shape[0])[:, None]
        is_short = (rows.length < arrays["length"])[:, None]
        forbidden = jnp.where(is_short & (arrays["ids"] >= 0), arrays["ids"], logits.shape[1])
        return logits.at[row, forbidden].set(-jnp.inf, mode="drop")


# Devices flush smaller numbers to zero.
_COLDEST = float(np.finfo(np.float32).tiny)


@final
class Temperature(ChoiceProcessor):
    """Divides every gap by the temperature."""

    name = "temperature"
    slot_arrays = {"temperature": RowArray(np.float32, 1)}

    def is_needed(self, params: SamplingParams) -> bool:
        return not params.is_greedy

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        return {"temperature": max(request.params.temperature, _COLDEST)}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        return replace(choice, gap=choice.gap / arrays["temperature"][:, None])


@final
class TopK(ChoiceProcessor):
    """Keeps the k likeliest tokens, and all that tie with the last of them."""

    name = "top_k"
    slot_arrays = {"k": RowArray(np.int32, 0)}

    def is_needed(self, params: SamplingParams) -> bool:
        return params.top_k > 0

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        return {"k": request.params.top_k}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        k, nearest = arrays["k"], choice.nearest
        num_nearest = nearest.shape[1]
        last = jnp.clip(k - 1, 0, num_nearest - 1)[:, None]
        limit = jnp.take_along_axis(nearest, last, axis=1)[:, 0]
        is_wide = k > num_nearest
        ones = jnp.ones(choice.gap.shape, jnp.int32)
        limit = jax.lax.cond(
            jnp.any(is_wide),
            lambda: jnp.where(is_wide, least_gap(choice.gap, ones, k), limit),
            lambda: limit,
        )
        return choice.limited(jnp.where(k > 0, limit, jnp.inf))


@final
class TopP(ChoiceProcessor):
    """Keeps the likeliest remaining tokens whose probabilities reach p.

    Tokens that tie with the last one are kept too (Holtzman et al., 2020, section 3.1).
    """

    name = "top_p"
    slot_arrays = {"p": RowArray(np.float32, 1)}

    def is_needed(self, params: SamplingParams) -> bool:
        return params.top_p < 1

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        return {"p": request.params.top_p}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        p, nearest = arrays["p"], choice.nearest
        num_nearest = nearest.shape[1]
        likelihood = choice.likelihood
        unit = quantum(likelihood)
        weights = quantize(likelihood, unit)
        total = jnp.sum(weights, axis=-1)
        target = jnp.ceil(p * total.astype(jnp.float32)).astype(jnp.int32)
        target = jnp.clip(target, 1, total)
        reached = jnp.cumsum(quantize(choice.likelihood_of(nearest), unit), axis=-1)
        place = jnp.sum(reached < target[:, None], axis=-1, dtype=jnp.int32)
        last = jnp.minimum(place, num_nearest - 1)[:, None]
        limit = jnp.take_along_axis(nearest, last, axis=1)[:, 0]
        is_wide = (p < 1) & (place == num_nearest)
        limit = jax.lax.cond(
            jnp.any(is_wide),
            lambda: jnp.where(is_wide, least_gap(choice.gap, weights, target), limit),
            lambda: limit,
        )
        return choice.limited(jnp.where(p < 1, limit, jnp.inf))


@final
class MinP(ChoiceProcessor):
    """Keeps the tokens of at least `ratio` times the probability of the likeliest one."""

    name = "min_p"
    slot_arrays = {"ratio": RowArray(np.float32, 0)}

    def is_needed(self, params: SamplingParams) -> bool:
        return params.min_p > 0

    def pack(self, request: Request) -> Mapping[str, npt.ArrayLike]:
        return {"ratio": request.params.min_p}

    def apply(self, choice: RandomChoice, arrays: Arrays, rows: Rows) -> RandomChoice:
        return choice.at_least(arrays["ratio"])


# In the order of application, which `SamplingParams` guarantees; those that change logits come
# before those that change the random choice.
PROCESSORS: tuple[Processor, ...] = (
    AllowedTokens(),
    Penalties(),
    LogitBias(),
    MinTokens(),
    Temperature(),
    TopK(),
    TopP(),
    MinP(),
)
