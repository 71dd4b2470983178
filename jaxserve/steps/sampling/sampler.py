"""Choosing the next token, on the device."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt32

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.kernels import row_maximum
from jaxserve.steps.sampling.choice import RandomChoice, argmax, draw
from jaxserve.steps.sampling.logprobs import likeliest, log_normalizer, token_logprobs
from jaxserve.steps.sampling.processors import (
    PROCESSORS,
    Arrays,
    ChoiceProcessor,
    LogitsProcessor,
    Processor,
    RowArray,
    Rows,
)

# Sizes of RANDOM and FULL: at most _MAX_SIZES of them, each at most 1 / _RATIO of the one above and
# at least _MIN_SIZE. Few rows are hardly slower than one, since every step reads all weights: with
# SmolLM2-135M on a CPU an iteration took 44 ms for 1 row, 49 ms for 8 and 131 ms for 32.
_MAX_SIZES = 3
_MIN_SIZE = 4
_RATIO = 4


@final
class Variant(enum.IntEnum):
    """What a compiled step can do; each serves what those before it serve.

    GREEDY takes the largest logit, after the `LogitsProcessor`s whose arrays come with the step.
    RANDOM also draws, with every `ChoiceProcessor`. FULL applies the other `LogitsProcessor`s too,
    and returns log-probabilities.
    """

    GREEDY = 0
    RANDOM = 1
    FULL = 2

    def sizes(self, buckets: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `buckets` (increasing) that this variant is compiled for.

        GREEDY has all, the rarer and slower to compile variants a few. The largest is always
        included.
        """
        if self is Variant.GREEDY:
            return buckets
        sizes = [buckets[-1]]
        for size in reversed(buckets):
            if _MIN_SIZE <= size <= sizes[-1] // _RATIO and len(sizes) < _MAX_SIZES:
                sizes.append(size)
        return tuple(reversed(sizes))


@final
@dataclass(frozen=True)
class SamplingNeeds:
    """What the requests of some rows need of the sampler."""

    variant: Variant = Variant.GREEDY  # the cheapest one that serves them all
    logprobs: bool = False  # whether some row returns the log-probability of its token
    top_logprobs: bool = False  # whether some row returns those of the likeliest tokens

    @classmethod
    def of(
        cls, params: SamplingParams, processors: Sequence[Processor] = PROCESSORS
    ) -> SamplingNeeds:
        editing = [
            each
            for each in processors
            if isinstance(each, LogitsProcessor) and each.is_needed(params)
        ]
        if params.logprobs is not None or any(not each.step_arrays for each in editing):
            variant = Variant.FULL
        else:
            variant = Variant.GREEDY if params.is_greedy else Variant.RANDOM
        return cls(variant, params.logprobs is not None, bool(params.logprobs))

    @classmethod
    def union(cls, needs: Iterable[SamplingNeeds]) -> SamplingNeeds:
        """Return the needs of several rows together; without rows, those of a greedy one."""
        needs = list(needs)
        variant = max((each.variant for each in needs), default=Variant.GREEDY)
        if variant is not Variant.FULL:
            return cls(variant)
        logprobs = any(each.logprobs for each in needs)
        return cls(variant, logprobs, any(each.top_logprobs for each in needs))


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of slots."""

    # Whether the slot draws its tokens; otherwise it takes the likeliest.
    is_random: Bool[Array, " slots"]
    seed: UInt32[Array, " slots"]  # of the slot's random numbers
    prompt_length: Int32[Array, " slots"]
    stop_ids: Int32[Array, "slots stop_ids"]  # tokens that end the slot, padded with -1
    # Name of a processor -> its `slot_arrays`.
    processors: dict[str, dict[str, Shaped[Array, "slots ..."]]]


def empty_sampling(num_slots: int, processors: Sequence[Processor] = PROCESSORS) -> SlotSampling:
    """Return greedy slots in which every processor is neutral."""
    return jax.tree.map(
        lambda array: jnp.full((num_slots, *array.shape), array.neutral, array.dtype),
        _types(processors),
    )


def pack_sampling(
    requests: Sequence[tuple[Request, int]],
    num_rows: int,
    processors: Sequence[Processor] = PROCESSORS,
) -> SlotSampling:
    """Return the entries of requests and sample indices as NumPy arrays, then neutral entries."""
    packed = jax.tree.map(lambda array: array.full(num_rows), _types(processors))
    for row, (request, sample_index) in enumerate(requests):
        packed.is_random[row] = not request.params.is_greedy
        packed.seed[row] = sample_seed(request.seed, sample_index)
        packed.prompt_length[row] = len(request.prompt)
        packed.stop_ids[row, : len(request.stop_token_ids)] = request.stop_token_ids
        for processor in processors:
            is_ignored = request.params.is_greedy and isinstance(processor, ChoiceProcessor)
            if processor.is_needed(request.params) and not is_ignored:
                for name, entry in processor.pack(request).items():
                    _put(packed.processors[processor.name][name], row, entry)
    return packed


def sample_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one of a request's samples; the first one has the request's own."""
    return (seed + 0x9E3779B9 * sample_index) % 2**32


def _put(array: Shaped[np.ndarray, "slots ..."], row: int, entry: Any) -> None:
    entry = np.asarray(entry, array.dtype)
    array[(row, *(slice(size) for size in entry.shape))] = entry


def _types(processors: Sequence[Processor]) -> Any:
    """Return a `SlotSampling` whose leaves are `RowArray`s."""
    fields: dict[str, Any] = {
        "is_random": RowArray(np.bool_, False),
        "seed": RowArray(np.uint32, 0),
        "prompt_length": RowArray(np.int32, 1),
        "stop_ids": RowArray(np.int32, -1, (MAX_STOP_TOKEN_IDS,)),
        "processors": {each.name: dict(each.slot_arrays) for each in processors},
    }
    return SlotSampling(**fields)


_VOCAB_MULTIPLE = 256

# Name of a processor -> its `step_arrays`.
StepArrays = Mapping[str, Arrays]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The choice of each row.

    A row is not finite if its logits hold a NaN, +inf or nothing but -inf, or if no token is
    left to choose from; such a row's other fields are zeros.
    """

    token: Int32[Array, " rows"]
    finite: Bool[Array, " rows"]
    # None except in the FULL variant, like the three below.
    logprob: Float32[Array, " rows"] | None = None
    # The log-probability in the distribution that random rows draw from, after all processors. For
    # greedy rows, after those that change logits.
    processed_logprob: Float32[Array, " rows"] | None = None
    top_ids: Int32[Array, "rows top"] | None = None  # the likeliest tokens
    # -inf past the end of a smaller vocabulary.
    top_logprobs: Float32[Array, "rows top"] | None = None


def sample(
    logits: Float32[Array, "rows vocab"],
    sampling: SlotSampling,
    tokens: Int32[Array, "slots max_context"],  # prompt and output so far of every slot
    length: Int32[Array, " rows"],  # valid tokens, which is the position of the token to choose
    *,
    slot: Int32[Array, " rows"] | None = None,  # of each row; None if the rows are the slots
    variant: Variant,  # serves every row's needs; static
    step_arrays: StepArrays | None = None,
    processors: Sequence[Processor] = PROCESSORS,  # in the order of application; static
    first: Int32[Array, " rows"] | None = None,
) -> Sampled:
    """Choose one token a row. A row's choice depends on nothing outside the row.

    The semantics are those of `SamplingParams`. Can be called under jit and inside loops.

    Args:
      step_arrays: arrays that come with this step alone, for the processors that take some; a
        processor whose arrays are missing is left out.
      first: the first position that counts for penalties; None to count all.
    """
    token, largest, has_nan = row_maximum(logits)
    choice = None
    finite = jnp.isfinite(largest) & ~has_nan
    if variant is not Variant.GREEDY or step_arrays:
        slot = jnp.arange(length.shape[0]) if slot is None else slot
        rows = Rows(tokens, slot, length, sampling.prompt_length, first)
        active = _active(processors, sampling, step_arrays or {})
        edited, token, largest = _edited(logits, (token, largest), rows, active, variant)
        finite &= jnp.isfinite(largest)
        if variant is not Variant.GREEDY:
            choice = _choice(edited, largest, rows, active)
            # Greedy rows are drawn too, and the drawn tokens are discarded.
            drawn = draw(choice, _random_bits(sampling.seed, length))
            token = jnp.where(sampling.is_random, drawn, token)
    token = jnp.where(finite, token, 0)
    if variant is not Variant.FULL or choice is None:
        return Sampled(token, finite)
    normalizer = log_normalizer(logits)
    top_ids, top_logprobs = likeliest(logits, normalizer)
    return Sampled(
        token=token,
        finite=finite,
        logprob=jnp.where(finite, token_logprobs(logits, token, normalizer), 0.0),
        processed_logprob=jnp.where(finite, choice.logprob_of(token), 0.0),
        top_ids=jnp.where(finite[:, None], top_ids, 0),
        top_logprobs=jnp.where(finite[:, None], top_logprobs, 0.0),
    )


def processed_logprobs(
    logits: Float32[Array, "rows vocab"],
    token: Int32[Array, " rows"],
    sampling: SlotSampling,
    rows: Rows,
    processors: Sequence[Processor] = PROCESSORS,
) -> Float32[Array, " rows"]:
    """Return the `processed_logprob` that `sample` reports for rows that draw these tokens.

    Processors with `step_arrays` are left out. Differentiable: the truncation and the largest logit
    count as constants.
    """
    active = _active(processors, sampling, {})
    edited, _, largest = _edited(logits, argmax(logits), rows, active, Variant.FULL)
    return _choice(edited, largest, rows, active).logprob_of(token)


def _edited(
    logits: Float32[Array, "rows vocab"],
    before: tuple[Int32[Array, " rows"], Float32[Array, " rows"]],
    rows: Rows,
    active: Sequence[tuple[Processor, Arrays]],
    variant: Variant,
) -> tuple[Float32[Array, "rows padded_vocab"], Int32[Array, " rows"], Float32[Array, " rows"]]:
    """Return the changed logits, the likeliest tokens, and their logits.

    `before` has the likeliest tokens and their logits before the processors.
    """
    edited = _padded(logits)
    editing = [
        (processor, arrays)
        for processor, arrays in active
        if isinstance(processor, LogitsProcessor)
        if variant is Variant.FULL or processor.step_arrays
    ]
    for processor, arrays in editing:
        edited = processor.apply(edited, arrays, rows)
    return edited, *(argmax(edited) if editing else before)


def _choice(
    edited: Float32[Array, "rows padded_vocab"],
    largest: Float32[Array, " rows"],
    rows: Rows,
    active: Sequence[tuple[Processor, Arrays]],
) -> RandomChoice:
    """Return the distributions that rows draw from, after the `ChoiceProcessor`s."""
    # Log-probabilities do not depend on what is subtracted from all logits, so it has no gradient.
    gap = jax.lax.stop_gradient(largest)[:, None] - edited
    choice = RandomChoice(gap, jnp.full_like(largest, jnp.inf))
    for processor, arrays in active:
        if isinstance(processor, ChoiceProcessor):
            choice = processor.apply(choice, arrays, rows)
    return choice


def _active(
    processors: Sequence[Processor], sampling: SlotSampling, step_arrays: StepArrays
) -> list[tuple[Processor, Arrays]]:
    """Return the processors with their arrays, without those whose `step_arrays` are missing."""
    return [
        (each, {**sampling.processors.get(each.name, {}), **step_arrays.get(each.name, {})})
        for each in processors
        if not each.step_arrays or each.name in step_arrays
    ]


def _padded(logits: Float32[Array, "rows vocab"]) -> Float32[Array, "rows padded_vocab"]:
    """Pad the vocabulary once, so that the passes over it need not."""
    extra = -logits.shape[1] % _VOCAB_MULTIPLE
    return jnp.pad(logits, ((0, 0), (0, extra)), constant_values=-jnp.inf)


def _random_bits(
    seed: UInt32[Array, " rows"], position: Int32[Array, " rows"]
) -> UInt32[Array, " rows"]:
    """Return bits that depend on a row's seed and position only."""

    def bits(seed: UInt32[Array, ""], position: Int32[Array, ""]) -> UInt32[Array, ""]:
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), dtype=jnp.uint32)

    return jax.vmap(bits)(seed, position)
