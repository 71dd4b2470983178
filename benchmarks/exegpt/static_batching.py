"""Static batches of FasterTransformer and DeepSpeed, from the layer costs of ExeGPT's timelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from benchmarks.exegpt.served import Served, fitting_batches
from jaxserve.planning.schedules import Deployment, LengthDistribution, Phase, TaskLengths
from jaxserve.planning.schedules.pipeline import Pipeline

# Batches that the paper runs: from the smallest to the largest in multiples of this (section 7.1).
_STEP = 4
# Micro-batches of an encode phase per stage that DeepSpeed Inference may use.
SPLITS = (1, 2, 4, 8, 16)


@final
@dataclass(frozen=True, kw_only=True)
class StaticBatches:
    """What batches do that run until their longest answer has ended.

    Layers are sharded within a machine as much as possible, and machines are stages (section 7.1).
    A batch is in as many micro-batches as there are stages. Answers that have ended are computed
    on, and memory is reserved for the longest inputs and answers.

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
        model, cluster = deployment.model, deployment.cluster
        degree = max(cluster.degrees)
        pipeline = Pipeline.of(
            np.array([cluster.num_devices]),
            np.array([cluster.num_devices if degree > 1 else 0]),
            np.array([degree]),
            first_device=0,
            devices_per_machine=cluster.devices_per_machine,
        )
        held = lengths.inputs.max_length + lengths.outputs.max_length
        batch = fitting_batches(
            deployment,
            lambda batch: pipeline.memory_bytes(
                model,
                num_encode_layers=0 if model.is_decoder_only else model.num_encode_layers,
                num_decode_layers=model.num_decode_layers,
                kv_tokens=batch * held,
            ),
            step=_STEP,
        )
        num = np.minimum(batch, pipeline.num_stages)
        part = batch / num
        num_encode = np.minimum(batch, split * pipeline.num_stages)
        encode_part = batch / num_encode
        num_tokens = encode_part * lengths.inputs.mean
        slowest_s, through_s = pipeline.pass_s(
            deployment.cost,
            Phase.ENCODE,
            model.num_encode_layers,
            batch=encode_part,
            length=np.sqrt(lengths.inputs.mean_square),
            num_tokens=num_tokens,
            num_head_tokens=encode_part if model.is_decoder_only else None,
        )
        if not model.is_decoder_only:
            joined = pipeline.join_s(deployment.cost, model.num_decode_layers, num_tokens)
            slowest_s, through_s = slowest_s + joined[0], through_s + joined[1]
        encode_s = through_s + (num_encode - 1) * slowest_s

        def decode_s(num_iterations: np.ndarray) -> np.ndarray:
            slowest_s, through_s = pipeline.pass_s(
                deployment.cost,
                Phase.DECODE,
                model.num_decode_layers,
                batch=part,
                length=lengths.inputs.mean + (num_iterations + 1) / 2,
                num_tokens=part,
                num_head_tokens=part,
            )
            return num_iterations * np.maximum(num * slowest_s, through_s)

        iterations = lengths.outputs.less_one() if model.is_decoder_only else lengths.outputs
        longest = np.full(batch.shape, float(iterations.max_length))
        spent_s = encode_s + decode_s(expected_longest(iterations, batch))
        return cls(
            served=Served(
                batch=batch, throughput=batch / spent_s, latency_s=encode_s + decode_s(longest)
            )
        )

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
