"""Requests whose lengths are drawn evenly from length distributions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.workload import WorkloadItem

# Lengths of a block; any block of requests has one of each of so many equal shares of a
# distribution.
_BLOCK = 32


@final
class DrawnRequests:
    """An endless stream of requests with lengths of a task, the same at every start.

    Lengths are drawn in blocks, one from each of 32 equal shares of a distribution, in random
    order. So the mean over a few blocks is close to that of the distribution, and none is favoured.
    Prompts and answers are independent. What an engine could not hold is cut.

    """

    def __init__(self, lengths: TaskLengths, config: EngineConfig, *, seed: int = 0):
        self._num_tokens = 0
        self._num_uncut = 0
        self._config = config
        self._longest = lengths.outputs.max_length
        rng = np.random.default_rng(seed)
        self._inputs = _drawn(lengths.inputs, rng)
        self._outputs = _drawn(lengths.outputs, rng)

    @property
    def uncut_share(self) -> float:
        """Tokens of the answers so far, over those that were drawn."""
        return self._num_tokens / self._num_uncut

    def next(self) -> WorkloadItem:
        """Return the next request."""
        config = self._config
        num_prompt = min(max(1, next(self._inputs)), config.max_prompt_tokens)
        uncut = max(1, next(self._outputs))
        num_output = min(uncut, config.max_length - _context(num_prompt, config))
        self._num_uncut += uncut
        self._num_tokens += num_output
        return WorkloadItem(
            prompt_token_ids=(1,) * num_prompt,
            num_output_tokens=num_output,
            max_tokens=max(1, self._longest),
        )


def _context(num_prompt: int, config: EngineConfig) -> int:
    """Return the tokens of the context that a prompt takes."""
    if not config.has_encoder:
        return num_prompt
    return -(-num_prompt // config.page_size) * config.page_size + 1


def _drawn(distribution: LengthDistribution, rng: np.random.Generator) -> Iterator[int]:
    reached = np.cumsum(distribution.probabilities)
    while True:
        quantiles = (rng.permutation(_BLOCK) + rng.random(_BLOCK)) / _BLOCK
        found = np.searchsorted(reached, quantiles * reached[-1], side="right")
        yield from np.minimum(found, distribution.max_length).tolist()
