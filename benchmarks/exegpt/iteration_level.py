"""ORCA's and vLLM's iteration-level batches, from the layer costs of ExeGPT's timelines.

Every iteration computes the next token of each running sequence, and prompts of new sequences, in
one pass over the weights (ORCA's selective batching). Layers are sharded within a machine, machines
are stages, and each stage has a part of the running sequences, as for static batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from benchmarks.exegpt.served import Served
from jaxserve.planning.schedules import Deployment, LayerCost, Phase, TaskLengths
from jaxserve.planning.schedules.costs import Numbers
from jaxserve.planning.schedules.pipeline import Pipeline

# Prompt tokens of an iteration that vLLM may be set to.
CHUNKS = (64, 128, 256, 512, 1024, 2048)
# New sequences of an iteration are counted up to this many deviations above their mean.
_DEVIATIONS = 6.0


@final
@dataclass(frozen=True)
class MixedCost:
    """Layer costs of a decode pass that computes pieces of prompts too.

    Attributes:
      cost: of a layer.
      num_pieces: pieces of prompts of a pass, which broadcasts with the arguments of the costs.
      length: of a piece, whose square with `num_pieces` gives the pairs that attention computes.
    """

    cost: LayerCost
    num_pieces: Numbers
    length: Numbers

    @property
    def batching_pays(self) -> bool:
        return self.cost.batching_pays

    @property
    def launch_s(self) -> float:
        return self.cost.launch_s

    def attention_s(
        self, phase: Phase, batch: Numbers, length: Numbers, degree: Numbers
    ) -> np.ndarray:
        pieces_s = self.cost.attention_s(Phase.ENCODE, self.num_pieces, self.length, degree)
        return self.cost.attention_s(phase, batch, length, degree) + pieces_s

    def rest_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self.cost.rest_s(phase, num_tokens, degree)

    def sync_s(self, phase: Phase, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self.cost.sync_s(phase, num_tokens, degree)

    def join_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self.cost.join_s(num_tokens, degree)

    def head_s(self, num_tokens: Numbers, degree: Numbers) -> np.ndarray:
        return self.cost.head_s(num_tokens, degree)

    def handoff_s(self, num_tokens: Numbers, *, is_across: bool) -> np.ndarray:
        return self.cost.handoff_s(num_tokens, is_across=is_across)

    def handover_s(self, num_tokens: Numbers, num_devices: Numbers) -> np.ndarray:
        return self.cost.handover_s(num_tokens, num_devices)


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
        through_s = self._through_s(rows[:, None], num_new[None], length, tokens[None])
        # P(the largest of M independent numbers of prompts is at most k).
        below = np.cumsum(shares, axis=1) ** num_turns[:, None]
        slowest = np.diff(below, axis=1, prepend=0.0)
        mean_s = (slowest * through_s).sum(1) / below[:, -1]
        first_s = through_s[:, 1]
        return self._served(batch, mean_s, first_s, num_first=1.0)

    def vllm(self) -> Served:
        """Return vLLM's batches: pages as they are needed, and prompts in chunks beside decoding.

        With a limit of c prompt tokens, a share f = (prompt tokens an iteration) / c of iterations
        has a chunk, where f is at most 1.
        """
        mean_held = self.lengths.outputs.mean_position
        batch = self._fitting(mean_held)
        return Served.joined(self._chunked(batch, tokens) for tokens in CHUNKS)

    def _chunked(self, batch: np.ndarray, tokens: int) -> Served:
        inputs, outputs = self.lengths.inputs, self.lengths.outputs
        rows, num_turns = self._turns(batch)
        share = rows / outputs.mean * inputs.mean / tokens
        batch, rows, num_turns, share = (
            each[share <= 1.0] for each in (batch, rows, num_turns, share)
        )
        # A chunk attends to half a prompt on average, in as many pairs as sqrt(pairs) squared.
        length = np.sqrt(tokens * inputs.mean_square / inputs.mean)
        with_s = self._through_s(rows, 1.0, length, float(tokens))
        without_s = self._through_s(rows, 0.0, 1.0, 0.0)
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
        token.
        """
        outputs = self.lengths.outputs
        longest = outputs.percentile(self.lengths.level)
        num_iterations = outputs.mean - 1.0 + num_first
        return Served(
            batch=batch,
            throughput=batch / (num_iterations * mean_s),
            latency_s=num_first * first_s + (longest - 1) * mean_s,
        )

    def _turns(self, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences of a micro-batch, and the number of micro-batches."""
        num_turns = np.minimum(batch, self._pipeline.num_stages)
        return batch / num_turns, num_turns

    def _fitting(self, held_outputs: float) -> np.ndarray:
        """Return the batches whose KV fits, with so many output tokens each."""
        model, cluster = self.deployment.model, self.deployment.cluster
        batch = np.arange(1, 1 + self.deployment.max_encode_batch)
        memory = self._pipeline.memory_bytes(
            model,
            num_encode_layers=0 if model.is_decoder_only else model.num_encode_layers,
            num_decode_layers=model.num_decode_layers,
            kv_tokens=batch * (self.lengths.inputs.mean + held_outputs),
        )
        return batch[memory <= cluster.memory_bytes]

    def _through_s(
        self, rows: Numbers, num_pieces: Numbers, length: Numbers, num_tokens: Numbers
    ) -> np.ndarray:
        """Return the seconds of a micro-batch through all stages.

        Args:
          rows: sequences of the micro-batch, those with a prompt included.
        """
        deployment = self.deployment
        model, cost = deployment.model, deployment.cost
        context = self.lengths.inputs.mean + self.lengths.outputs.mean_position
        rows, num_pieces, num_tokens = np.broadcast_arrays(rows, num_pieces, num_tokens)
        decoding = np.maximum(rows - num_pieces, 0.0) if model.is_decoder_only else rows
        mixed = MixedCost(cost, num_pieces, length) if model.is_decoder_only else cost
        through_s = self._pipeline.pass_s(
            mixed,
            Phase.DECODE,
            model.num_decode_layers,
            batch=decoding,
            length=context,
            num_tokens=decoding + num_tokens * model.is_decoder_only,
            num_head_tokens=rows,
        )[1]
        if model.is_decoder_only:
            return through_s
        encode_s = self._pipeline.pass_s(
            cost,
            Phase.ENCODE,
            model.num_encode_layers,
            batch=num_pieces,
            length=length,
            num_tokens=num_tokens,
            num_head_tokens=None,
        )[1]
        join_s = self._pipeline.join_s(cost, model.num_decode_layers, num_tokens)[1]
        return through_s + (encode_s + join_s) * (num_tokens > 0)

    @property
    def _pipeline(self) -> Pipeline:
        cluster = self.deployment.cluster
        degree = max(cluster.degrees)
        return Pipeline.of(
            np.array([cluster.num_devices]),
            np.array([cluster.num_devices if degree > 1 else 0]),
            np.array([degree]),
            first_device=0,
            devices_per_machine=cluster.devices_per_machine,
        )


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
