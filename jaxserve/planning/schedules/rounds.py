"""How long the rounds of RRA take in a pipeline (ExeGPT, figure 4a)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.costs import Phase
from jaxserve.planning.schedules.lengths import LengthDistribution
from jaxserve.planning.schedules.phases import NUM_PARTS
from jaxserve.planning.schedules.pipeline import Pipeline
from jaxserve.planning.schedules.timeline import Deployment


@final
@dataclass(frozen=True, kw_only=True)
class RoundParts:
    """Seconds of the parts of rounds: an encode phase and N_D decode iterations each.

    The sequences are in as many mini-batches as there are stages, M, but of at least one sequence
    each. With e and d the seconds of a mini-batch in the slowest stage, and E and D those through
    all stages, a decode iteration of all mini-batches takes R = max(M d, D), and an encode phase
    F = E + (M - 1) e. If a round's results are read before the next begins, it takes
    E + (M - 1) max(e, d) + N_D R. If rounds overlap (`Deployment.overlaps_rounds`), it takes the
    longest of three paths:

    - M e + N_D R: the slowest stage is always busy;
    - F + D / M + (N_D - 1) R: the last mini-batch's first iteration waits for its encoding;
    - E / M + D (M - 1) / M + N_D R: the first mini-batch's encoding waits for stages that still
      decode.

    For equal stages, transfers apart, that is exact: `tests/planning/schedules/pipelines.py` plays
    the pipeline stage by stage.

    Attributes:
      busy_s: M e, an encode phase in the slowest stage.
      encode_s: F, an encode phase from its start to its end in the last stage.
      stagger_s: (M - 1) (d - e) where d is longer, by which the last mini-batch begins to decode
        later than its encoding ends.
      turn_s: D / M, a mini-batch's decode iteration in one stage, on average.
      lead_s: E / M + D (M - 1) / M, an encode phase until the first decode iteration, if stages
        wait for the decode iteration before.
      present_s: R of a mean iteration of each part of a phase [configurations, parts].
      token_s: seconds per decoded token and encoded sequence of each part; 0 without tokens.
      iteration_s: R of a mean iteration. An iteration in which less than one sequence is expected
        takes place with that probability.
      overlaps: whether rounds do.
    """

    busy_s: np.ndarray
    encode_s: np.ndarray
    stagger_s: np.ndarray
    turn_s: np.ndarray
    lead_s: np.ndarray
    present_s: np.ndarray
    token_s: np.ndarray
    iteration_s: np.ndarray
    overlaps: bool

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        pipeline: Pipeline,
        inputs: LengthDistribution,
        encode_batch: np.ndarray,
        sequences: np.ndarray,
        length: np.ndarray,
    ) -> RoundParts:
        """Return the parts of rounds of B_E sequences.

        Args:
          sequences, length: decoding sequences per encoded one, and positions that they attend to
            [configurations, parts].
        """
        model, cost = deployment.model, deployment.cost
        num_stages = pipeline.num_stages
        num = np.minimum(num_stages, encode_batch)
        batch = encode_batch / num
        slowest_s, encode_through_s = pipeline.pass_s(
            cost,
            Phase.ENCODE,
            model.num_encode_layers,
            batch=batch,
            length=np.sqrt(inputs.mean_square),
            num_tokens=batch * inputs.mean,
            num_head_tokens=batch if model.is_decoder_only else None,
        )
        if not model.is_decoder_only:
            num_layers = model.num_decode_layers
            joined = pipeline.join_s(cost, num_layers, batch * inputs.mean)
            slowest_s, encode_through_s = slowest_s + joined[0], encode_through_s + joined[1]
        rows = pipeline[:, None]
        num_decoding = encode_batch[:, None] * sequences
        num_parts = np.clip(num_decoding, 1, rows.num_stages)
        row_batch = np.maximum(num_decoding / rows.num_stages, 1.0)
        slowest_row_s, through_s = rows.pass_s(
            cost,
            Phase.DECODE,
            model.num_decode_layers,
            batch=row_batch,
            length=length,
            num_tokens=row_batch,
            num_head_tokens=row_batch,
        )
        present_s = np.maximum(num_parts * slowest_row_s, through_s)
        odds = np.minimum(num_decoding, 1.0)
        later_s = np.maximum(slowest_row_s[:, 0] - slowest_s, 0.0)
        mean_through_s = (odds * through_s).mean(1)
        turn_s = mean_through_s / num_stages
        return cls(
            busy_s=num * slowest_s,
            encode_s=encode_through_s + (num - 1) * slowest_s,
            stagger_s=(num_parts[:, 0] - 1) * later_s,
            turn_s=turn_s,
            lead_s=encode_through_s / num_stages + mean_through_s - turn_s,
            present_s=present_s,
            token_s=np.where(sequences > 0, odds * present_s / np.maximum(sequences, 1e-300), 0.0),
            iteration_s=(odds * present_s).mean(1),
            overlaps=deployment.overlaps_rounds,
        )

    @property
    def least_s(self) -> np.ndarray:
        """The least seconds that an encode phase adds to a round, whatever follows."""
        return self.busy_s if self.overlaps else self.encode_s

    @property
    def between_s(self) -> np.ndarray:
        """The least seconds that an encode phase adds to a round of these decode iterations."""
        return self.busy_s if self.overlaps else self.encode_s + self.stagger_s

    def round_s(self, num_decodes: np.ndarray) -> np.ndarray:
        """Return the seconds of rounds with so many decode iterations."""
        decode_s = num_decodes * self.iteration_s
        if not self.overlaps:
            return self.encode_s + self.stagger_s + decode_s
        waits_s = self.encode_s + self.turn_s + decode_s - self.iteration_s
        return np.maximum(np.maximum(self.busy_s, self.lead_s) + decode_s, waits_s)

    def decoding_s(self, num_tokens: np.ndarray) -> np.ndarray:
        """Return the seconds in which parts decode tokens [configurations, parts] at this speed.

        Args:
          num_tokens: per encoded sequence.
        """
        return (num_tokens * self.token_s).sum(1)

    def begun_s(self, num_decodes: np.ndarray, num_begun: np.ndarray) -> np.ndarray:
        """Return the seconds of the first `num_begun` of `num_decodes` iterations."""
        part = (num_decodes / NUM_PARTS)[:, None]
        begun = np.clip(num_begun[:, None] - part * np.arange(NUM_PARTS), 0.0, part)
        return (begun * self.present_s).sum(1)
