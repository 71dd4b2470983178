"""The timeline of WAA: groups of devices encode and decode at the same time (ExeGPT, figure 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.planning.schedules.layer_cost import (
    Boxes,
    Deployment,
    LayerPhase,
    Pipeline,
    layouts_of,
    shared_out,
)
from jaxserve.planning.schedules.lengths import LengthDistribution, TaskLengths
from jaxserve.planning.schedules.schedule import (
    AllocationPolicy,
    Best,
    Estimates,
    ParallelLayout,
    PipelineStage,
    Points,
    Schedule,
)


@final
@dataclass(frozen=True, kw_only=True)
class Groups:
    """The encode group and the decode group of layouts, in int arrays.

    The encode group has the first devices. So the decode group gets tensor-parallel stages first,
    which are the last of a layout and shorten every iteration.
    """

    num_encode: np.ndarray
    num_decode: np.ndarray
    num_encode_sharded: np.ndarray
    num_decode_sharded: np.ndarray


def encode_shares(
    deployment: Deployment,
    lengths: TaskLengths,
    iterations: LengthDistribution,
    encode_batch: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the encode group's share of computation (WAA-C) and of memory (WAA-M), by batch.

    C_E is an encode phase of B_E sequences on one device, C_D a decode iteration of B_D = B_E S_D,
    with S_D the mean iterations; the memory is weights, the KV of two encode batches, and that of a
    decode batch.
    """
    model, cost = deployment.model, deployment.cost
    decode_batch = encode_batch * max(iterations.mean, 1.0)
    length = lengths.inputs.mean + iterations.mean_position
    encode_tokens = encode_batch * lengths.inputs.mean
    encode_s = model.num_encode_layers * (
        cost.attention_s(LayerPhase.ENCODE, encode_batch, np.sqrt(lengths.inputs.mean_square), 1)
        + cost.rest_s(LayerPhase.ENCODE, encode_tokens, 1)
    )
    decode_s = model.num_decode_layers * (
        cost.attention_s(LayerPhase.DECODE, decode_batch, length, 1)
        + cost.rest_s(LayerPhase.DECODE, decode_batch, 1)
        + cost.join_s(encode_tokens, 1)
    )
    encode_kv = 2 * encode_tokens * model.kv_bytes_per_token * model.is_decoder_only
    encode_bytes = model.num_encode_layers * (model.encode_layer_bytes + encode_kv)
    decode_kv = decode_batch * length * model.kv_bytes_per_token
    decode_bytes = model.num_decode_layers * (model.decode_layer_bytes + decode_kv)
    return encode_s / (encode_s + decode_s), encode_bytes / (encode_bytes + decode_bytes)


def divide(
    layouts: tuple[ParallelLayout, ...], num_devices: int, shares: tuple[np.ndarray, np.ndarray]
) -> Groups:
    """Return the groups for every layout (rows) and share of `encode_shares` (columns).

    The number of encode devices is rounded to a boundary between stages. Both groups have at least
    one stage; layouts of a single stage are not allowed.
    """
    by_memory = np.array([layout.policy is AllocationPolicy.WAA_M for layout in layouts])[:, None]
    sharded = np.array([layout.num_sharded_devices for layout in layouts])[:, None]
    degree = np.array([layout.degree for layout in layouts])[:, None]
    single = num_devices - sharded
    wanted = num_devices * np.where(by_memory, shares[1][None], shares[0][None])
    beyond = degree * np.rint(np.maximum(wanted - single, 0) / degree).astype(int)
    near = np.clip(np.rint(wanted).astype(int), np.minimum(1, single), single)
    num_encode = np.where(wanted < single, near, single + beyond)
    fewest = np.where(single > 0, 1, degree)
    last = np.where(sharded > 0, degree, 1)
    most = np.maximum(num_devices - last, fewest)
    num_encode = np.clip(num_encode, fewest, most)
    num_encode_sharded = np.maximum(num_encode - single, 0)
    return Groups(
        num_encode=num_encode,
        num_decode=num_devices - num_encode,
        num_encode_sharded=num_encode_sharded,
        num_decode_sharded=sharded - num_encode_sharded,
    )


# Enough to halve the distance to the solution even if a row costs most of its share of time.
_NUM_REFINEMENTS = 32


@final
@dataclass(frozen=True, kw_only=True)
class DecodeGroup:
    """Decode iterations of micro-batches, for ranges of their number B_m, up to that of stages.

    A decode batch is in B_m micro-batches, and k = ceil(stages / B_m) decode batches fill the
    stages. So M = k B_m micro-batches take turns, and each gets a token every R = max(M d, D)
    seconds, with d and D the seconds of a micro-batch in the slowest stage and through all. One
    decode batch takes a new encode batch an iteration. More micro-batches than stages gain nothing.

    Attributes:
      num_turns: the fewest and the most M of a range of B_m; equal for a single B_m.
      num_batches: the fewest and the most k.
      length: mean positions that a token attends to.
      num_iterations: E(D), mean decode iterations of an answer.
      num_joined: encoder outputs projected per decoding sequence and iteration.
    """

    deployment: Deployment
    pipeline: Pipeline
    num_turns: tuple[np.ndarray, np.ndarray]
    num_batches: tuple[np.ndarray, np.ndarray]
    length: float
    num_iterations: float
    num_joined: float

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        pipeline: Pipeline,
        micro_batches: tuple[np.ndarray, np.ndarray],
        *,
        num_input_tokens: float,
        length: float,
        num_iterations: float,
    ) -> DecodeGroup:
        """Return the decode groups of these pipelines, for the fewest and the most B_m."""
        num_stages = pipeline.num_stages
        fewest, most = (np.minimum(num, num_stages) for num in micro_batches)
        num_batches = -(-num_stages // most), -(-num_stages // fewest)
        is_one = fewest == most
        return cls(
            deployment=deployment,
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
        """Return R, and d + launch of one turn, for the range's fastest B_m, or its slowest."""
        turns, split = self.num_turns[::-1] if at_most else self.num_turns
        batch = np.maximum(num_sequences / split, 1.0)
        slowest_s, through_s = self.pipeline.decode_pass_s(
            self.deployment, batch, self.length, batch * self.num_joined
        )
        num_busy = np.clip(num_sequences, 1.0, turns)
        return np.maximum(num_busy * slowest_s, through_s), slowest_s

    def full(self, encode_batch: np.ndarray, *, at_most: bool = False) -> np.ndarray:
        """Return the sequences of k decode batches of B_D = B_E E(D) (section 4.1)."""
        return self.num_batches[at_most] * encode_batch * self.num_iterations

    def settled(self, per_s: np.ndarray, full: np.ndarray) -> np.ndarray:
        """Return the number of decoding sequences if `per_s` begin a second.

        By Little's law that is the largest solution of n = per_s E(D) R(n) up to `full`.
        """
        num = full
        for _ in range(_NUM_REFINEMENTS):
            before = num
            num = np.minimum(num, per_s * self.num_iterations * self.iteration_s(num)[0])
            if np.array_equal(num, before):
                break
        return num


@final
class WAATimeline:
    """Estimates of the configurations of WAA-C and WAA-M.

    Every stage of the encode group computes a batch of B_E. The groups run asynchronously: the
    slowest of encoding, handing over and decoding full batches (`DecodeGroup`) sets the rate. If
    decoding is faster, its batches are smaller than B_E E(D) (Little's law), not its iterations
    slower. The paper sets B_D = B_E S_D also then, which the latencies of its table 6 exclude.

    An answer takes the batch before it, the encode stages, the handover, an iteration and a turn
    until its micro-batch begins, and an iteration per token. It waits for the batch before it, and
    for an iteration, because a runner submits a step while the previous one is computed.

    Args:
      divided_by: the lengths that determine the division of devices, if they differ from `lengths`.
    """

    def __init__(
        self, deployment: Deployment, lengths: TaskLengths, *, divided_by: TaskLengths | None = None
    ):
        model, cluster = deployment.model, deployment.cluster
        self._deployment = deployment
        self._lengths = lengths
        self._iterations = lengths.outputs.less_one() if model.is_decoder_only else lengths.outputs
        self._longest = self._iterations.percentile(lengths.level)
        self._length = lengths.inputs.mean + self._iterations.mean_position
        self.layouts: tuple[ParallelLayout, ...] = tuple(
            layout
            for layout in layouts_of((AllocationPolicy.WAA_C, AllocationPolicy.WAA_M), cluster)
            if len(layout.devices(cluster.num_devices)) > 1
        )
        self._degree = np.array([layout.degree for layout in self.layouts])
        self.max_control = cluster.num_devices
        self.max_encode_batch = self._largest_batch()
        batches = np.arange(1, self.max_encode_batch + 1)
        by = divided_by or lengths
        by_iterations = by.outputs.less_one() if model.is_decoder_only else by.outputs
        shares = encode_shares(deployment, by, by_iterations, batches)
        self._groups = divide(self.layouts, cluster.num_devices, shares)

    def estimate(self, points: Points) -> Estimates:
        deployment, batch = self._deployment, points.encode_batch
        encode, decode = self._pipelines(points)
        group = self._decode_group(decode, points.control, points.control)
        slowest_s, encode_s = self._encode_s(encode, batch)
        handover_s = self._handover_s(encode, decode, batch)
        full = group.full(batch)
        decode_s = batch * self._iterations_mean / full * group.iteration_s(full)[0]
        period_s = np.maximum(np.maximum(slowest_s, handover_s), decode_s)
        num_decoding = group.settled(batch / period_s, full)
        iteration_s, turn_s = group.iteration_s(num_decoding)
        latency_s, first_s = self._latency_s(slowest_s + encode_s, handover_s, turn_s, iteration_s)
        memory = self._memory(encode, decode, batch, num_decoding)
        fits = self._fits(encode, decode, memory, num_decoding)
        return Estimates(
            fits=fits,
            throughput=batch / period_s,
            latency_s=latency_s,
            first_token_s=first_s,
            token_s=(1 + deployment.decode_margin) * iteration_s,
            period_s=period_s,
            encode_s=encode_s,
            decode_batch=num_decoding,
            memory_bytes=memory,
            own_share=np.zeros(len(points)),
        )

    def boxes(self) -> Boxes:
        """Return a box for every layout and run of batches with the same groups."""
        num_encode = self._groups.num_encode
        begins = np.ones(num_encode.shape, bool)
        begins[:, 1:] = num_encode[:, 1:] != num_encode[:, :-1]
        layout, first = np.nonzero(begins)
        next_first = np.append(first[1:], 0)
        last = np.where(next_first > 0, next_first, self.max_encode_batch)
        ones = np.ones_like(layout)
        return Boxes(Points(layout, first + 1, ones), Points(layout, last, ones * self.max_control))

    def bound(self, boxes: Boxes) -> Best:
        """Bound boxes by their smallest and largest B_E.

        Costs do not fall with the batch, so the smallest B_E has the shortest stages, and the
        largest the longest. The slowest rate of a box gives the fewest decoding sequences. Where
        batching pays, the largest B_E has the shortest stages per sequence.
        """
        deployment = self._deployment
        fewest, most = boxes.low.encode_batch, boxes.high.encode_batch
        encode, decode = self._pipelines(boxes.low)
        group = self._decode_group(decode, boxes.low.control, boxes.high.control)
        slowest_s, encode_s = self._encode_s(encode, fewest)
        handover_s = self._handover_s(encode, decode, fewest)
        full = group.full(fewest)
        longest_s = np.maximum(
            self._encode_s(encode, most)[0], self._handover_s(encode, decode, most)
        )
        if deployment.cost.batching_pays:
            fastest_s, full_s = longest_s, group.iteration_s(group.full(most, at_most=True))[0]
        else:
            fastest_s = np.maximum(slowest_s, handover_s)
            full_s = group.iteration_s(full)[0]
        best_per_s = np.minimum(most / fastest_s, group.num_batches[1] * most / full_s)
        full_most_s = group.iteration_s(group.full(most, at_most=True), at_most=True)[0]
        worst_per_s = np.minimum(fewest / longest_s, group.num_batches[0] * fewest / full_most_s)
        num_decoding = group.settled(worst_per_s, full)
        iteration_s, turn_s = group.iteration_s(num_decoding)
        latency_s, first_s = self._latency_s(slowest_s + encode_s, handover_s, turn_s, iteration_s)
        memory = self._memory(encode, decode, fewest, num_decoding)
        fits = self._fits(encode, decode, memory, num_decoding)
        return Best(
            fits=fits,
            throughput=best_per_s,
            latency_s=latency_s,
            first_token_s=first_s,
            token_s=(1 + deployment.decode_margin) * iteration_s,
            own_share=np.zeros(len(boxes)),
        )

    def schedule(self, point: Points) -> Schedule:
        layout = self.layouts[int(point.layout[0])]
        model, cluster = self._deployment.model, self._deployment.cluster
        devices = layout.devices(cluster.num_devices)
        encode, _ = self._pipelines(point)
        num_encode = int(encode.num_stages[0])
        encode_layers = shared_out(model.num_encode_layers, devices[:num_encode])
        decode_layers = shared_out(model.num_decode_layers, devices[num_encode:])
        none = [0] * len(devices)
        return Schedule(
            layout=layout,
            encode_batch=int(point.encode_batch[0]),
            encode_tokens=int(point.encode_batch[0]) * self._lengths.inputs.mean,
            decode_batch=float(self.estimate(point).decode_batch[0]),
            num_decodes=1,
            num_micro_batches=min(int(point.control[0]), len(devices) - num_encode),
            stages=tuple(
                PipelineStage(
                    num_devices=num, num_encode_layers=of_encode, num_decode_layers=of_decode
                )
                for num, of_encode, of_decode in zip(
                    devices,
                    encode_layers + none[num_encode:],
                    none[:num_encode] + decode_layers,
                    strict=True,
                )
            ),
        )

    # ---- parts of an answer ----

    @property
    def _iterations_mean(self) -> float:
        """E(D); above 0 even if all answers end with their first token."""
        return max(self._iterations.mean, 1e-9)

    def _pipelines(self, points: Points) -> tuple[Pipeline, Pipeline]:
        at = points.layout, points.encode_batch - 1
        groups, degree = self._groups, self._degree[points.layout]
        per_machine = self._deployment.cluster.devices_per_machine
        num_encode = groups.num_encode[at]
        return (
            Pipeline.of(
                num_encode,
                groups.num_encode_sharded[at],
                degree,
                first_device=0,
                devices_per_machine=per_machine,
            ),
            Pipeline.of(
                groups.num_decode[at],
                groups.num_decode_sharded[at],
                degree,
                first_device=num_encode,
                devices_per_machine=per_machine,
            ),
        )

    def _decode_group(self, decode: Pipeline, fewest: np.ndarray, most: np.ndarray) -> DecodeGroup:
        return DecodeGroup.of(
            self._deployment,
            decode,
            (fewest, most),
            num_input_tokens=self._lengths.inputs.mean,
            length=self._length,
            num_iterations=self._iterations_mean,
        )

    def _encode_s(self, encode: Pipeline, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a batch in the slowest encode stage, and through all of them."""
        inputs = self._lengths.inputs
        length, num_tokens = np.sqrt(inputs.mean_square), batch * inputs.mean
        return encode.encode_pass_s(self._deployment, batch, length, num_tokens, joins=False)

    def _handover_s(self, encode: Pipeline, decode: Pipeline, batch: np.ndarray) -> np.ndarray:
        num_devices = np.maximum(np.minimum(encode.num_devices, decode.num_devices), 1)
        num_tokens = batch * self._lengths.inputs.mean
        return self._deployment.cost.handover_s(num_tokens, num_devices)

    def _latency_s(
        self,
        encode_s: np.ndarray,
        handover_s: np.ndarray,
        turn_s: np.ndarray,
        iteration_s: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of an answer of the percentile length, and of its first token."""
        deployment = self._deployment
        slow = 1 + deployment.decode_margin
        encoded_s = encode_s * (1 + deployment.encode_margin)
        begins_s = encoded_s + handover_s + slow * (turn_s + iteration_s)
        first_s = encoded_s
        if not deployment.model.is_decoder_only:
            first_s = begins_s + slow * iteration_s
        return begins_s + slow * self._longest * iteration_s, first_s

    def _memory(
        self, encode: Pipeline, decode: Pipeline, batch: np.ndarray, num_decoding: np.ndarray
    ) -> np.ndarray:
        """Return the bytes in use on the fullest device of both groups.

        A decoder-only model has a copy in each. The encode group holds the KV of the batch that it
        computes and of the one that it hands over; the decode group holds that of its sequences and
        of an arriving batch.
        """
        model = self._deployment.model
        num_arriving = batch * self._lengths.inputs.mean
        is_copy = model.is_decoder_only
        encode_bytes = encode.memory_bytes(
            model,
            num_encode_layers=0 if is_copy else model.num_encode_layers,
            num_decode_layers=model.num_decode_layers if is_copy else 0,
            kv_tokens=2 * num_arriving,
        )
        decode_bytes = decode.memory_bytes(
            model,
            num_encode_layers=0,
            num_decode_layers=model.num_decode_layers,
            kv_tokens=num_decoding * self._length + num_arriving,
        )
        return np.maximum(encode_bytes, decode_bytes)

    def _fits(
        self, encode: Pipeline, decode: Pipeline, memory: np.ndarray, num_decoding: np.ndarray
    ) -> np.ndarray:
        deployment = self._deployment
        return (
            (memory <= deployment.cluster.memory_bytes)
            & (num_decoding <= deployment.max_sequences)
            & (encode.num_stages <= deployment.model.num_encode_layers)
            & (decode.num_stages <= deployment.model.num_decode_layers)
        )

    def _largest_batch(self) -> int:
        """Return an upper limit (at least 1) of B_E in configurations that fit."""
        model, cluster = self._deployment.model, self._deployment.cluster
        tokens_bytes = model.num_decode_layers * model.kv_bytes_per_token
        kv_bytes = tokens_bytes * self._lengths.inputs.mean
        by_memory = cluster.num_devices * cluster.memory_bytes / max(kv_bytes, 1e-300)
        return max(1, int(min(by_memory, self._deployment.max_encode_batch)))
