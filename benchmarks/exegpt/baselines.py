"""Static and iteration-level batching of other systems, with the layer costs of ExeGPT."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from scipy.stats import binom

from benchmarks.exegpt.step_cost import pipeline_of
from jaxserve.planning.schedules import (
    AllocationPolicy,
    Deployment,
    LengthDistribution,
    ParallelLayout,
    Points,
    TaskLengths,
)
from jaxserve.planning.schedules.continuous import CHUNKS, ContinuousTimeline, mixed_iteration_s
from jaxserve.planning.schedules.layer_cost import Numbers, Pipeline

# All batches up to this many sequences are tried, and larger ones in steps of a thousandth.
_EVERY = 1024


def fitting_batches(
    deployment: Deployment, pipeline: Pipeline, held: float, *, step: int = 1
) -> np.ndarray:
    """Return the batches that memory holds, in multiples of `step`, ascending.

    Args:
      held: tokens whose KV is held for each sequence.
    """
    empty, one = pipeline.whole_bytes(deployment.model, np.array([0, held])).tolist()
    room = deployment.cluster.memory_bytes - empty
    most = min(room / max(one - empty, 1e-300), deployment.max_encode_batch)
    batch = np.arange(step, int(max(most, 0)) + 1, step)
    if step > 1:
        return batch
    thousandth = np.exp(np.arange(np.log(_EVERY), np.log(max(most, _EVERY)), 1e-3)).astype(int)
    return np.unique(np.concatenate([batch[:_EVERY], thousandth[thousandth <= most], batch[-1:]]))


def whole_layout(deployment: Deployment) -> ParallelLayout:
    """Return as much tensor parallelism as a machine has devices; machines are stages."""
    cluster = deployment.cluster
    degree = max(cluster.degrees)
    return ParallelLayout(
        policy=AllocationPolicy.CONTINUOUS,
        degree=degree,
        num_sharded_devices=cluster.num_devices if degree > 1 else 0,
    )


@final
@dataclass(frozen=True, kw_only=True)
class Served:
    """Throughput and latency of configurations, among which the best under a bound is chosen.

    Attributes:
      batch: sequences at a time, int [sizes].
      throughput: answers per second.
      latency_s: seconds of the answer for which bounds are kept.
      tokens: prompt tokens of an iteration at most; 0 for no limit.
    """

    batch: np.ndarray
    throughput: np.ndarray
    latency_s: np.ndarray
    tokens: int | np.ndarray = 0

    @classmethod
    def joined(cls, parts: Iterable[Served]) -> Served:
        """Return the configurations of all parts."""
        every = [replace(p, tokens=np.broadcast_to(p.tokens, p.batch.shape)) for p in parts]
        return cls(**{n: np.concatenate([getattr(p, n) for p in every]) for n in vars(every[0])})

    def best_at(self, bound_s: float) -> int | None:
        """Return the index of the highest throughput under a bound; None if nothing keeps it."""
        kept = np.where(self.latency_s <= bound_s, self.throughput, 0.0)
        return int(np.argmax(kept)) if kept.any() else None

    def best(self, bound_s: float) -> float:
        """Return the highest throughput under a bound; 0 if nothing keeps it."""
        index = self.best_at(bound_s)
        return 0.0 if index is None else float(self.throughput[index])


# Batches that the paper runs: from the smallest to the largest in multiples of this (section 7.1).
_STEP = 4
# Micro-batches of an encode phase per stage that DeepSpeed Inference may use.
SPLITS = (1, 2, 4, 8, 16)


@final
@dataclass(frozen=True, kw_only=True)
class StaticBatches:
    """Batches that run until their longest answer has ended.

    Layers are sharded within a machine as much as possible, and machines are stages (section 7.1).
    A batch has one micro-batch for each stage. Computation continues for answers that have ended,
    and memory is reserved for the longest inputs and answers.

    Attributes:
      served: throughput of batches that run as long as their longest answer, on average; latency of
        a batch with an answer of maximum length, for which bounds are kept (section 7.1).
    """

    served: Served

    @classmethod
    def of(cls, deployment: Deployment, lengths: TaskLengths, *, split: int = 1) -> StaticBatches:
        """Return all batches that fit in memory.

        Args:
          split: micro-batches of the encode phase per stage. 1 is FasterTransformer as in figure 1
            of the paper, more is DeepSpeed Inference's hybrid scheduling.
        """
        inputs, outputs = lengths.inputs, lengths.outputs
        pipeline = pipeline_of(deployment, whole_layout(deployment))
        held = inputs.max_length + outputs.max_length
        batch = fitting_batches(deployment, pipeline, held, step=_STEP)
        num = np.minimum(batch, pipeline.num_stages)
        num_encode = np.minimum(batch, split * pipeline.num_stages)
        part, length = batch / num_encode, np.sqrt(inputs.mean_square)
        slowest_s, through_s = pipeline.encode_pass_s(deployment, part, length, part * inputs.mean)
        encode_s = through_s + (num_encode - 1) * slowest_s

        def decode_s(iterations: np.ndarray) -> np.ndarray:
            context = inputs.mean + (iterations + 1) / 2
            slowest_s, through_s = pipeline.decode_pass_s(deployment, batch / num, context)
            return iterations * np.maximum(num * slowest_s, through_s)

        iterations = outputs.less_one() if deployment.model.is_decoder_only else outputs
        longest = np.full(batch.shape, float(iterations.max_length))
        spent_s = encode_s + decode_s(expected_longest(iterations, batch))
        latency_s = encode_s + decode_s(longest)
        return cls(served=Served(batch=batch, throughput=batch / spent_s, latency_s=latency_s))

    def bounds(self) -> list[float]:
        """Return the paper's four latency bounds: the bottom 10, 30 and 70 %, and infinity."""
        latency_s = self.served.latency_s
        if not len(latency_s):
            return []
        return [*np.percentile(latency_s, (10, 30, 70)).tolist(), float("inf")]


def hybrid_batches(deployment: Deployment, lengths: TaskLengths) -> Served:
    """Return DeepSpeed Inference's batches, with every number of encode micro-batches."""
    return Served.joined(
        StaticBatches.of(deployment, lengths, split=split).served for split in SPLITS
    )


def expected_longest(lengths: LengthDistribution, num: np.ndarray) -> np.ndarray:
    """Return the mean of the longest of `num` lengths: the sum of P(one is at least u)."""
    below = 1.0 - lengths.survival[1:]
    return (1.0 - below[None] ** np.asarray(num)[:, None]).sum(1)


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
        tokens = num_new * self.lengths.inputs.mean
        length = np.sqrt(self.lengths.inputs.mean_square)
        taken_s = self._iteration_s(
            rows[:, None], num_turns[:, None], num_new[None], length, tokens[None]
        )
        # P(the largest of M independent numbers of prompts is at most k).
        below = np.cumsum(_binomial(num_new, rows, odds), axis=1) ** num_turns[:, None]
        slowest = np.diff(below, axis=1, prepend=0.0)
        mean_s = (slowest * taken_s).sum(1) / below[:, -1]
        return self._served(batch, mean_s, taken_s[:, 1], num_first=1.0)

    def vllm(self) -> Served:
        """Return vLLM's batches: pages on demand, and prompts in chunks together with decoding.

        With a limit of c prompt tokens, a share f = (prompt tokens an iteration) / c of iterations
        has a chunk, where f is at most 1. Micro-batches are scheduled independently, and an
        iteration of all of them is as long as the slowest one. With several stages, a prompt's
        chunks may be in all micro-batches at once, as in `ContinuousTimeline`: vLLM's authors do
        not have that, but vLLM's layout allows it.
        """
        batch = self._fitting(self.lengths.outputs.mean_position)
        if not self.deployment.model.is_decoder_only:
            return self._as_planned(batch, 0)
        kinds = (self._chunked, self._as_planned)
        return Served.joined(kind(batch, tokens) for kind in kinds for tokens in CHUNKS)

    def _as_planned(self, batch: np.ndarray, tokens: int) -> Served:
        """Return continuous batching as planned; 0 tokens for whole prompts of an encoder."""
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
        inputs = self.lengths.inputs
        rows, num_turns = self._turns(batch)
        share = rows / self.lengths.outputs.mean * inputs.mean / tokens
        kept = share <= 1.0
        batch, rows, num_turns, share = batch[kept], rows[kept], num_turns[kept], share[kept]
        # A chunk attends to half a prompt on average, in as many pairs as sqrt(pairs) squared.
        length = np.sqrt(tokens * inputs.mean_square / inputs.mean)
        with_s = self._iteration_s(rows, num_turns, 1.0, length, float(tokens))
        without_s = self._iteration_s(rows, num_turns, 0.0, 1.0, 0.0)
        any_share = 1.0 - (1.0 - share) ** num_turns
        mean_s = any_share * with_s + (1.0 - any_share) * without_s
        num_first = max(1.0, inputs.mean / tokens)
        return replace(self._served(batch, mean_s, with_s, num_first=num_first), tokens=tokens)

    def _served(
        self, batch: np.ndarray, mean_s: np.ndarray, first_s: np.ndarray, *, num_first: float
    ) -> Served:
        """Return throughput and latency of iterations of `mean_s`.

        An answer takes `num_first` iterations of `first_s` to its first token, and then one a
        token. Latencies have the margins of the deployment, like those of every schedule.
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
        """Return the batches whose KV fits, with a given number of output tokens each."""
        held = self.lengths.inputs.mean + held_outputs
        return fitting_batches(self.deployment, self._pipeline, held)

    def _iteration_s(
        self,
        rows: Numbers,
        num_turns: Numbers,
        num_pieces: Numbers,
        length: Numbers,
        num_tokens: Numbers,
    ) -> np.ndarray:
        """Return the seconds of an iteration whose micro-batches are all equal.

        `rows` are the sequences of a micro-batch, including those with a prompt.
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
    def layout(self) -> ParallelLayout:
        return whole_layout(self.deployment)

    @property
    def _pipeline(self) -> Pipeline:
        return pipeline_of(self.deployment, self.layout)


def _binomial(counts: np.ndarray, num: np.ndarray, odds: float) -> np.ndarray:
    """Return P(count of num) [num, counts]; a fractional `num` is a mean of two whole numbers."""
    low = np.floor(num)[:, None]
    part = num[:, None] - low
    return (1 - part) * binom.pmf(counts, low, odds) + part * binom.pmf(counts, low + 1, odds)
