"""ORCA's and vLLM's iteration-level batches, from the layer costs of ExeGPT's timelines.

Every iteration computes the next token of each running sequence, and prompts of new sequences, in
one pass over the weights (ORCA's selective batching). Layers are sharded within a machine, machines
are stages, and each stage has a part of the running sequences, as for static batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from benchmarks.exegpt.served import Served, fitting_batches
from jaxserve.planning.schedules import Deployment, Layout, Points, Policy, TaskLengths
from jaxserve.planning.schedules.continuous import (
    CHUNKS,
    ContinuousTimeline,
    mixed_iteration_s,
)
from jaxserve.planning.schedules.costs import Numbers
from jaxserve.planning.schedules.pipeline import Pipeline
from jaxserve.planning.schedules.step_cost import pipeline_of

# New sequences of an iteration are counted up to this many deviations above their mean.
_DEVIATIONS = 6.0


@final
@dataclass(frozen=True)
class IterationLevel:
    """Iterations of a deployment with as much tensor parallelism as a machine has devices."""

    deployment: Deployment
    lengths: TaskLengths

    def orca(self) -> Served:
        """Return ORCA's batches: whole prompts as soon as a sequence ends, longest reservations.

        With r sequences in a micro-batch, each iteration ends Binomial(r, 1 / E(S)) of them, and
        computes as many prompts. Micro-batches pass the stages in turn and cannot overtake, so an
        iteration of all of them takes as long as the slowest one through all stages: ORCA's
        pipeline bubbles (section 2 of the paper).
        """
        batch = self._fitting(self.lengths.outputs.max_length)
        if not len(batch):
            return Served(batch=batch, throughput=batch * 1.0, latency_s=batch * 1.0)
        rows, num_turns = self._turns(batch)
        odds = 1.0 / self.lengths.outputs.mean
        spread = np.sqrt(rows.max() * odds * (1 - odds))
        num_new = np.arange(int(rows.max() * odds + _DEVIATIONS * spread) + 2)
        shares = _binomial(num_new, rows, odds)
        tokens = num_new * self.lengths.inputs.mean
        length = np.sqrt(self.lengths.inputs.mean_square)
        taken_s = self._iteration_s(
            rows[:, None], num_turns[:, None], num_new[None], length, tokens[None]
        )
        # P(the largest of M independent numbers of prompts is at most k).
        below = np.cumsum(shares, axis=1) ** num_turns[:, None]
        slowest = np.diff(below, axis=1, prepend=0.0)
        mean_s = (slowest * taken_s).sum(1) / below[:, -1]
        first_s = taken_s[:, 1]
        return self._served(batch, mean_s, first_s, num_first=1.0)

    def vllm(self) -> Served:
        """Return vLLM's batches: pages as they are needed, and prompts in chunks beside decoding.

        With a limit of c prompt tokens, a share f = (prompt tokens an iteration) / c of iterations
        has a chunk, where f is at most 1. Micro-batches are scheduled independently, and an
        iteration of all of them is as long as the slowest one. With several stages, a prompt's
        chunks may as well be in all micro-batches at once, as in `ContinuousTimeline`: vLLM's
        authors do not have that, but nothing in its layout is against it.
        """
        mean_held = self.lengths.outputs.mean_position
        batch = self._fitting(mean_held)
        if not self.deployment.model.is_decoder_only:
            return self._as_planned(batch, 0)
        kinds = (self._chunked, self._as_planned)
        return Served.joined(kind(batch, tokens) for kind in kinds for tokens in CHUNKS)

    def _as_planned(self, batch: np.ndarray, tokens: int) -> Served:
        """Return continuous batching as plans have it; 0 tokens for whole prompts of an encoder."""
        timeline = ContinuousTimeline(self.deployment, self.lengths, (self.layout,))
        ones = np.ones_like(batch)
        control = 1 + CHUNKS.index(tokens) if tokens else 1
        estimates = timeline.estimate(Points(0 * ones, batch, control * ones))
        fits = estimates.fits
        return Served(
            batch=batch[fits],
            throughput=estimates.throughput[fits],
            latency_s=estimates.latency_s[fits],
            tokens=tokens,
        )

    def _chunked(self, batch: np.ndarray, tokens: int) -> Served:
        inputs, outputs = self.lengths.inputs, self.lengths.outputs
        rows, num_turns = self._turns(batch)
        share = rows / outputs.mean * inputs.mean / tokens
        batch, rows, num_turns, share = (
            each[share <= 1.0] for each in (batch, rows, num_turns, share)
        )
        # A chunk attends to half a prompt on average, in as many pairs as sqrt(pairs) squared.
        length = np.sqrt(tokens * inputs.mean_square / inputs.mean)
        with_s = self._iteration_s(rows, num_turns, 1.0, length, float(tokens))
        without_s = self._iteration_s(rows, num_turns, 0.0, 1.0, 0.0)
        any_share = 1.0 - (1.0 - share) ** num_turns
        mean_s = any_share * with_s + (1.0 - any_share) * without_s
        served = self._served(batch, mean_s, with_s, num_first=max(1.0, inputs.mean / tokens))
        return Served(
            batch=served.batch,
            throughput=served.throughput,
            latency_s=served.latency_s,
            tokens=tokens,
        )

    def _served(
        self, batch: np.ndarray, mean_s: np.ndarray, first_s: np.ndarray, *, num_first: float
    ) -> Served:
        """Return throughput and latency of iterations of `mean_s`.

        An answer takes `num_first` iterations of `first_s` to its first token, and then one a
        token. Latencies have the margins of the deployment, as those of every schedule.
        """
        outputs, deployment = self.lengths.outputs, self.deployment
        longest = outputs.percentile(self.lengths.level)
        num_iterations = outputs.mean - 1.0 + num_first
        return Served(
            batch=batch,
            throughput=batch / (num_iterations * mean_s),
            latency_s=(1 + deployment.encode_margin) * num_first * first_s
            + (1 + deployment.decode_margin) * (longest - 1) * mean_s,
        )

    def _turns(self, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences of a micro-batch, and the number of micro-batches."""
        num_turns = np.minimum(batch, self._pipeline.num_stages)
        return batch / num_turns, num_turns

    def _fitting(self, held_outputs: float) -> np.ndarray:
        """Return the batches whose KV fits, with so many output tokens each."""
        model = self.deployment.model
        pipeline, held = self._pipeline, self.lengths.inputs.mean + held_outputs
        return fitting_batches(
            self.deployment,
            lambda batch: pipeline.memory_bytes(
                model,
                num_encode_layers=0 if model.is_decoder_only else model.num_encode_layers,
                num_decode_layers=model.num_decode_layers,
                kv_tokens=batch * held,
            ),
        )

    def _iteration_s(
        self,
        rows: Numbers,
        num_turns: Numbers,
        num_pieces: Numbers,
        length: Numbers,
        num_tokens: Numbers,
    ) -> np.ndarray:
        """Return the seconds of an iteration whose micro-batches are all alike.

        Args:
          rows: sequences of a micro-batch, those with a prompt included.
        """
        return mixed_iteration_s(
            self.deployment,
            self._pipeline,
            rows=rows,
            num_turns=num_turns,
            context=self.lengths.inputs.mean + self.lengths.outputs.mean_position,
            num_pieces=num_pieces,
            length=length,
            num_tokens=num_tokens,
        )

    @property
    def layout(self) -> Layout:
        cluster = self.deployment.cluster
        degree = max(cluster.degrees)
        return Layout(
            policy=Policy.CONTINUOUS,
            degree=degree,
            num_sharded_devices=cluster.num_devices if degree > 1 else 0,
        )

    @property
    def _pipeline(self) -> Pipeline:
        return pipeline_of(self.deployment, self.layout)


def _binomial(counts: np.ndarray, num: np.ndarray, odds: float) -> np.ndarray:
    """Return P(count of num) [num, counts]; a fractional `num` is a mean of two whole numbers."""
    most = int(num.max()) + 1 + int(counts.max())
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, most + 1)))])

    def shares(whole: np.ndarray) -> np.ndarray:
        whole = whole.astype(int)[:, None]
        left = np.maximum(whole - counts, 0)
        ways = factorials[whole] - factorials[counts] - factorials[left]
        chance = np.exp(ways + counts * np.log(odds) + left * np.log1p(-odds))
        return np.where(counts <= whole, chance, 0.0)

    low = np.floor(num)
    part = (num - low)[:, None]
    return (1 - part) * shares(low) + part * shares(low + 1)
