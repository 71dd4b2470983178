"""The timeline of continuous batching: prompts in chunks, in the same steps as running answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.layer_cost import (
    Boxes,
    Deployment,
    LayerPhase,
    Numbers,
    Pipeline,
    layouts_of,
    stages_of,
)
from jaxserve.planning.schedules.lengths import TaskLengths
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Best,
    Estimates,
    ParallelLayout,
    Points,
    Schedule,
)

# Most prompt tokens of a micro-batch; the control variable counts these from 1.
CHUNKS = (64, 128, 256, 512, 1024, 2048)


def mixed_iteration_s(
    deployment: Deployment,
    pipeline: Pipeline,
    *,
    rows: Numbers,
    num_turns: Numbers,
    context: Numbers,
    num_pieces: Numbers,
    length: Numbers,
    num_tokens: Numbers,
) -> np.ndarray:
    """Return the seconds of an iteration of `num_turns` equal micro-batches.

    In one pass, a micro-batch computes a token of each of its sequences and pieces of prompts; an
    encoder-decoder model computes whole prompts in a pass of its encoder. Micro-batches follow each
    other through the stages. So an iteration takes as long as all of them in the slowest stage, and
    at least as long as one of them in all stages.

    Args:
      rows: sequences of a micro-batch, including those with a piece of a prompt.
      context: positions that a decoded token attends to.
      num_pieces, length: pieces of prompts, see `Pipeline.pass_s`. Less than one means one in
        that share of the micro-batches.
      num_tokens: prompt tokens of a micro-batch.
    """
    model, cost = deployment.model, deployment.cost
    rows, num_pieces, num_tokens = np.broadcast_arrays(rows, num_pieces, num_tokens)
    is_mixed = model.is_decoder_only
    decoding = np.maximum(rows - num_pieces, 0.0) if is_mixed else rows
    slowest_s, through_s = pipeline.pass_s(
        cost,
        LayerPhase.DECODE,
        model.num_decode_layers,
        batch=decoding,
        length=context,
        num_tokens=decoding + num_tokens * is_mixed,
        num_head_tokens=rows,
        pieces=(num_pieces, length) if is_mixed else None,
    )
    if not is_mixed:
        whole = np.maximum(num_pieces, 1.0)
        whole_tokens = num_tokens * whole / np.where(num_pieces > 0, num_pieces, 1.0)
        encoded = pipeline.encode_pass_s(deployment, whole, length, whole_tokens)
        slowest_s = slowest_s + encoded[0] * np.minimum(num_pieces, 1.0)
        through_s = through_s + encoded[1] * (num_pieces > 0)
    return np.maximum(num_turns * slowest_s, through_s)


@final
@dataclass(frozen=True)
class _Parts:
    """The parts of a configuration's estimates.

    `share` is f, the share of iterations with prompts; `first_s` covers the iterations of a prompt.
    """

    share: np.ndarray
    mean_s: np.ndarray
    first_s: np.ndarray
    num_iterations: np.ndarray


@final
class ContinuousTimeline:
    """Estimates of continuous batching of at most B sequences, with chunks of at most c tokens.

    `Points.encode_batch` is B, and `Points.control` counts `CHUNKS`. The sequences are in M
    micro-batches, one per stage, and each iteration computes a token of every sequence. A share of
    the iterations, f = (prompt tokens that B sequences need per iteration) / (M c), also computes a
    chunk of c tokens in every micro-batch. B sequences can be kept running if f is at most 1. An
    answer takes the iterations of its prompt, which all have a chunk, and one more for each further
    token.

    An encoder computes whole prompts, and reads its weights even for a single one. So a prompt
    begins in the iteration after an answer's end: f is the probability that any of B sequences ends
    in an iteration, and a chunk has the expected number of such prompts.

    Memory is that of B sequences of mean length (steady state).

    Args:
      layouts: the layouts to consider; by default all that the cluster allows.
    """

    def __init__(
        self,
        deployment: Deployment,
        lengths: TaskLengths,
        layouts: Sequence[ParallelLayout] | None = None,
    ):
        cluster = deployment.cluster
        self._deployment = deployment
        self._lengths = lengths
        self._longest = lengths.outputs.percentile(lengths.level)
        self._context = lengths.inputs.mean + lengths.outputs.mean_position
        self.layouts = tuple(layouts or layouts_of((AllocationPolicy.CONTINUOUS,), cluster))
        self._pipelines = Pipeline.of_layouts(self.layouts, cluster)
        self.max_control = len(CHUNKS) if deployment.model.is_decoder_only else 1
        self.max_encode_batch = self._largest_batch()

    def estimate(self, points: Points) -> Estimates:
        batch = points.encode_batch
        pipeline = self._pipelines[points.layout]
        parts = self._parts(pipeline, batch, batch, points.control, points.control)
        memory = self._memory(pipeline, batch)
        period_s = parts.num_iterations * parts.mean_s / batch
        return Estimates(
            fits=self._fits(pipeline, memory) & (parts.share <= 1.0),
            throughput=1 / period_s,
            latency_s=self._latency_s(parts),
            first_token_s=(1 + self._deployment.encode_margin) * parts.first_s,
            token_s=(1 + self._deployment.decode_margin) * parts.mean_s,
            period_s=period_s,
            encode_s=parts.first_s,
            decode_batch=batch * 1.0,
            memory_bytes=memory,
            own_share=np.zeros(len(points)),
        )

    def boxes(self) -> Boxes:
        return Boxes.whole(len(self.layouts), self.max_encode_batch, self.max_control)

    def bound(self, boxes: Boxes) -> Best:
        """Bound boxes by the smallest B, and the smallest chunk as often as the largest is needed.

        Iterations do not get shorter with more sequences or a larger chunk, and a larger chunk is
        needed less often.
        """
        low, high = boxes.low, boxes.high
        batch, most = low.encode_batch, high.encode_batch
        pipeline = self._pipelines[low.layout]
        parts = self._parts(pipeline, batch, most, low.control, high.control)
        fits = self._fits(pipeline, self._memory(pipeline, batch))
        return Best(
            fits=fits & (parts.share <= 1.0),
            throughput=most / (parts.num_iterations * parts.mean_s),
            latency_s=self._latency_s(parts),
            first_token_s=(1 + self._deployment.encode_margin) * parts.first_s,
            token_s=(1 + self._deployment.decode_margin) * parts.mean_s,
            own_share=np.zeros(len(boxes)),
        )

    def schedule(self, point: Points) -> Schedule:
        layout = self.layouts[int(point.layout[0])]
        model, batch = self._deployment.model, int(point.encode_batch[0])
        devices = layout.devices(self._deployment.cluster.num_devices)
        num_turns, chunk = min(batch, len(devices)), CHUNKS[int(point.control[0]) - 1]
        return Schedule(
            layout=layout,
            encode_batch=1,
            encode_tokens=self._lengths.inputs.mean,
            decode_batch=float(batch),
            num_decodes=0,
            num_micro_batches=num_turns,
            stages=stages_of(model, devices),
            max_running=batch,
            chunk_tokens=num_turns * chunk if model.is_decoder_only else 0,
        )

    def _parts(
        self,
        pipeline: Pipeline,
        fewest: np.ndarray,
        most: np.ndarray,
        smallest: np.ndarray,
        largest: np.ndarray,
    ) -> _Parts:
        """Return the parts of configurations, or of boxes their lower limits."""
        inputs, outputs = self._lengths.inputs, self._lengths.outputs
        num_turns = np.minimum(fewest, pipeline.num_stages)
        without_s = self._iteration_s(pipeline, fewest, 0.0, 1.0, 0.0)
        num_new = fewest / outputs.mean
        if self._deployment.model.is_decoder_only:
            chunk = np.array(CHUNKS)[smallest - 1]
            # A chunk attends to half a prompt on average; the square of the length gives the pairs.
            length = np.sqrt(chunk * inputs.mean_square / inputs.mean)
            with_s = self._iteration_s(pipeline, fewest, 1.0, length, chunk * 1.0)
            capacity = np.array(CHUNKS)[largest - 1]
            share = num_new * inputs.mean / (num_turns * capacity)
            most_turns = np.minimum(most, pipeline.num_stages)
            num_first = np.maximum(1.0, inputs.mean / (most_turns * capacity))
        else:
            share = 1 - (1 - 1 / max(outputs.mean, 1 + 1e-9)) ** fewest
            pieces = num_new / share / num_turns
            length = np.sqrt(inputs.mean_square)
            with_s = self._iteration_s(pipeline, fewest, pieces, length, pieces * inputs.mean)
            num_first = np.ones(len(fewest))
        with_s = np.maximum(without_s, with_s)
        return _Parts(
            share=share,
            mean_s=without_s + np.minimum(share, 1.0) * (with_s - without_s),
            first_s=num_first * with_s,
            num_iterations=outputs.mean - 1 + num_first,
        )

    def _iteration_s(
        self,
        pipeline: Pipeline,
        batch: np.ndarray,
        num_pieces: Numbers,
        length: Numbers,
        num_tokens: Numbers,
    ) -> np.ndarray:
        num_turns = np.minimum(batch, pipeline.num_stages)
        return mixed_iteration_s(
            self._deployment,
            pipeline,
            rows=batch / num_turns,
            num_turns=num_turns,
            context=self._context,
            num_pieces=num_pieces,
            length=length,
            num_tokens=num_tokens,
        )

    def _latency_s(self, parts: _Parts) -> np.ndarray:
        deployment = self._deployment
        rest_s = (self._longest - 1) * parts.mean_s
        return (1 + deployment.encode_margin) * parts.first_s + (
            1 + deployment.decode_margin
        ) * rest_s

    def _memory(self, pipeline: Pipeline, batch: np.ndarray) -> np.ndarray:
        return pipeline.whole_bytes(self._deployment.model, batch * self._context)

    def _largest_batch(self) -> int:
        """Return an upper limit (at least 1) of B in configurations that fit."""
        deployment = self._deployment
        empty = self._memory(self._pipelines, np.array(0))
        sequence_bytes = self._memory(self._pipelines, np.array(1)) - empty
        by_memory = (deployment.cluster.memory_bytes - empty) / np.maximum(sequence_bytes, 1e-300)
        most = min(by_memory.max(), deployment.max_sequences, deployment.max_encode_batch)
        return max(1, int(most))

    def _fits(self, pipeline: Pipeline, memory: np.ndarray) -> np.ndarray:
        model = self._deployment.model
        num_layers = min(model.num_encode_layers, model.num_decode_layers)
        return (memory <= self._deployment.cluster.memory_bytes) & (
            pipeline.num_stages <= num_layers
        )
