"""The variants of a step that are compiled, and which of them a request needs.

A step computes what its variant offers for all of its rows, so the executor picks the cheapest
variant that serves every row. A row's token is the same in every variant that serves it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from jaxserve.core.sampling_params import SamplingParams
from jaxserve.steps.sampling.processors import PROCESSORS, LogitsProcessor, Processor

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
