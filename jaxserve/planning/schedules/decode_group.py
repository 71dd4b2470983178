"""The decode group of WAA: micro-batches in turn through its stages (ExeGPT, figure 4b and 4c)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.costs import LayerCost, Phase
from jaxserve.planning.schedules.models import TransformerShape
from jaxserve.planning.schedules.pipeline import Pipeline

# As many as halve the distance to the solution, even where a row costs most of its share of time.
_NUM_REFINEMENTS = 32


@final
@dataclass(frozen=True, kw_only=True)
class DecodeGroup:
    """Decode iterations of micro-batches, for ranges of their number B_m.

    More micro-batches than stages gain nothing, so B_m counts up to the number of stages.

    A decode batch is in B_m micro-batches, and k = ceil(stages / B_m) decode batches fill the
    stages. So M = k B_m micro-batches are in turn, and each gets a token every R = max(M d, D)
    seconds, with d and D the seconds of a micro-batch in the slowest stage and through all. One
    decode batch takes a new encode batch an iteration.

    Attributes:
      num_turns: the fewest and the most M of a range of B_m; equal for a single B_m.
      num_batches: the fewest and the most k.
      length: positions that a token attends to, on average.
      num_iterations: E(D), mean decode iterations of an answer.
      num_joined: encoder outputs that a micro-batch's stages project per decoding sequence and
        iteration.
    """

    model: TransformerShape
    cost: LayerCost
    pipeline: Pipeline
    num_turns: tuple[np.ndarray, np.ndarray]
    num_batches: tuple[np.ndarray, np.ndarray]
    length: float
    num_iterations: float
    num_joined: float

    @classmethod
    def of(
        cls,
        model: TransformerShape,
        cost: LayerCost,
        pipeline: Pipeline,
        micro_batches: tuple[np.ndarray, np.ndarray],
        *,
        num_input_tokens: float,
        length: float,
        num_iterations: float,
    ) -> DecodeGroup:
        """Return the decode groups of these pipelines.

        Args:
          micro_batches: the fewest and the most B_m.
        """
        num_stages = pipeline.num_stages
        fewest, most = (np.minimum(num, num_stages) for num in micro_batches)
        num_batches = -(-num_stages // most), -(-num_stages // fewest)
        is_one = fewest == most
        return cls(
            model=model,
            cost=cost,
            pipeline=pipeline,
            num_turns=(
                np.where(is_one, fewest * num_batches[0], np.maximum(num_stages, fewest)),
                np.where(is_one, fewest * num_batches[0], num_stages + most - 1),
            ),
            num_batches=num_batches,
            length=length,
            num_iterations=num_iterations,
            num_joined=num_input_tokens / num_iterations,
        )

    def iteration_s(
        self, num_sequences: np.ndarray, *, at_most: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return R, and d + launch of one turn, with so many decoding sequences in all.

        Args:
          at_most: for the slowest B_m of the range, in place of the fastest.
        """
        turns, split = self.num_turns[::-1] if at_most else self.num_turns
        batch = np.maximum(num_sequences / split, 1.0)
        slowest_s, through_s = self.pipeline.pass_s(
            self.cost,
            Phase.DECODE,
            self.model.num_decode_layers,
            batch=batch,
            length=self.length,
            num_tokens=batch,
            num_head_tokens=batch,
        )
        if not self.model.is_decoder_only:
            joined = self.pipeline.join_s(
                self.cost, self.model.num_decode_layers, batch * self.num_joined
            )
            slowest_s, through_s = slowest_s + joined[0], through_s + joined[1]
        num_busy = np.clip(num_sequences, 1.0, turns)
        return np.maximum(num_busy * slowest_s, through_s), slowest_s

    def full(self, encode_batch: np.ndarray, *, at_most: bool = False) -> np.ndarray:
        """Return the sequences of k decode batches of B_D = B_E E(D) (section 4.1)."""
        return self.num_batches[at_most] * encode_batch * self.num_iterations

    def settled(self, per_s: np.ndarray, full: np.ndarray) -> np.ndarray:
        """Return the sequences that decode at a time if `per_s` begin a second.

        By Little's law that is n = per_s E(D) R(n); the largest solution up to `full`, which a few
        refinements from above approach.
        """
        num = full
        for _ in range(_NUM_REFINEMENTS):
            before = num
            num = np.minimum(num, per_s * self.num_iterations * self.iteration_s(num)[0])
            if np.array_equal(num, before):
                break
        return num
