"""The sampling parameters of every slot, and how the host packs them from a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from jaxserve.core.request import Request
from jaxserve.core.sampling_params import MAX_STOP_TOKEN_IDS
from jaxserve.steps.sampling.processors import PROCESSORS
from jaxserve.steps.sampling.processors.processor import ChoiceProcessor, Processor, RowArray


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of slots.

    Attributes:
      is_random: whether the slot draws its tokens; otherwise it takes the likeliest.
      seed: of the slot's random numbers.
      stop_ids: tokens that end the slot, padded with -1.
      processors: name of a processor -> its `slot_arrays`.
    """

    is_random: Bool[Array, " slots"]
    seed: UInt32[Array, " slots"]
    prompt_length: Int32[Array, " slots"]
    stop_ids: Int32[Array, "slots stop_ids"]
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
    """Return the entries of requests and sample indices in NumPy arrays, then neutral entries."""
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
