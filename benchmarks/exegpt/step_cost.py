"""Passes of a pipeline, and step costs from them, for simulations of what a timeline estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.step_cost import StepWork
from jaxserve.planning.schedules.continuous import mixed_iteration_s
from jaxserve.planning.schedules.layer_cost import Deployment, LayerPhase, Numbers, Pipeline
from jaxserve.planning.schedules.schedule import ParallelLayout
from jaxserve.scheduling.plan import StepPlan

# Seconds in the slowest stage, and through all of them.
Pass = tuple[np.ndarray, np.ndarray]


def pipeline_of(deployment: Deployment, layout: ParallelLayout) -> Pipeline:
    return Pipeline.of_layouts((layout,), deployment.cluster)


def encode_pass(
    deployment: Deployment,
    pipeline: Pipeline,
    batch: np.ndarray,
    length: Numbers,
    num_tokens: np.ndarray,
    *,
    joins: bool = True,
) -> Pass:
    """Return the pass of prompts; `joins` adds the projection of encoder outputs for the decoder.

    Args:
      length: of the prompts; its square gives the pairs that attention computes.
    """
    model, cost = deployment.model, deployment.cost
    slowest_s, through_s = pipeline.pass_s(
        cost,
        LayerPhase.ENCODE,
        model.num_encode_layers,
        batch=batch,
        length=length,
        num_tokens=num_tokens,
        num_head_tokens=batch if model.is_decoder_only else None,
    )
    if joins and not model.is_decoder_only:
        joined = pipeline.join_s(cost, model.num_decode_layers, num_tokens)
        slowest_s, through_s = slowest_s + joined[0], through_s + joined[1]
    return slowest_s, through_s


def decode_pass(
    deployment: Deployment, pipeline: Pipeline, rows: np.ndarray, length: Numbers
) -> Pass:
    """Return the pass of a token of each of `rows` sequences of mean length `length`."""
    return pipeline.pass_s(
        deployment.cost,
        LayerPhase.DECODE,
        deployment.model.num_decode_layers,
        batch=rows,
        length=length,
        num_tokens=rows,
        num_head_tokens=rows,
    )


def memory_bytes(
    deployment: Deployment, pipeline: Pipeline, kv_tokens: Numbers, *, holds_encoder: bool = True
) -> np.ndarray:
    """Return the bytes on the fullest device of a group."""
    model = deployment.model
    has_encoder = holds_encoder and not model.is_decoder_only
    return pipeline.memory_bytes(
        model,
        num_encode_layers=model.num_encode_layers if has_encoder else 0,
        num_decode_layers=model.num_decode_layers,
        kv_tokens=kv_tokens,
    )


def _prompts(work: StepWork) -> tuple[int, int, float]:
    """Return number, tokens and mean length of a step's prompts; see `encode_pass`."""
    tokens = [row.num_tokens for row in work.plan.rows if row.num_tokens > 1]
    # The pairs of a prompt are twice its sum of positions minus its tokens.
    pairs = max(1, 2 * work.prefilled - sum(tokens))
    return len(tokens), sum(tokens), math.sqrt(pairs / len(tokens)) if tokens else 1.0


def _decoding(work: StepWork) -> list[tuple[float, float]]:
    """Return for each decode iteration how many rows are left, and their mean context."""
    contexts = [row.start + 1 for row in work.plan.rows if row.num_tokens == 1]
    found = []
    for i, attended in enumerate(work.decoded):
        # Ended rows attend to nothing; each other row to one more position each time.
        mean = sum(contexts) / max(1, len(contexts)) + i
        left = min(float(len(contexts)), attended / mean) if attended and contexts else 0.0
        found.append((left, attended / left if left else 1.0))
    return found


@final
@dataclass(frozen=True)
class LayerStepCost:
    """Seconds of the scheduler's steps on one group of devices.

    A step's prompts and each of its decode iterations pass all stages in `num_turns` mini-batches
    (by default one per stage), as in `RoundParts`, and sequentially: the results of a round are
    read before the next begins. A group that only decodes projects encoder outputs when it admits a
    sequence.

    An encoder-decoder model is simulated with answers of one more token, whose first token costs
    nothing: the engine's prompts yield a token, and an encoder does not.
    """

    deployment: Deployment
    pipeline: Pipeline
    num_turns: int | None = None
    encodes: bool = True
    decodes: bool = True

    def __post_init__(self) -> None:
        if self.pipeline.num_stages.shape != (1,):
            raise InvalidConfigError(
                f"pipelines of shape {self.pipeline.num_stages.shape} are not allowed; pass one "
                "pipeline, in arrays of length 1"
            )

    @classmethod
    def of_layout(cls, deployment: Deployment, layout: ParallelLayout) -> LayerStepCost:
        """Return the costs of RRA, whose only group is the whole cluster."""
        return cls(deployment, pipeline_of(deployment, layout))

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        num_prompts, num_tokens, length = _prompts(work)
        seconds = self._encode_s(num_prompts, length, num_tokens) if work.prefilled else 0.0
        for i, (left, context) in enumerate(_decoding(work)):
            if left:
                arrived = 0.0 if i or self.encodes else self._num_arrived(work.plan)
                seconds += self._decode_s(left, context, arrived)
        return seconds

    def _num_arrived(self, plan: StepPlan) -> float:
        return float(sum(len(admission.request.prompt) for admission in plan.admissions))

    def _encode_s(self, batch: int, length: float, num_tokens: float) -> float:
        """Return the seconds from the first stage's begin to the last mini-batch's end.

        In a group that only encodes, batches overlap, so one takes as long as in its slowest stage.
        """
        num = int(np.clip(batch, 1, self.pipeline.num_stages[0])) if self.decodes else 1
        part = np.array([batch / num])
        tokens = part * num_tokens / batch
        slowest_s, through_s = encode_pass(
            self.deployment, self.pipeline, part, length, tokens, joins=self.decodes
        )
        if not self.decodes:
            return float(slowest_s[0])
        return float(through_s[0] + (num - 1) * slowest_s[0])

    def _decode_s(self, batch: float, length: float, num_joined: float) -> float:
        """Return the seconds between two iterations of a mini-batch."""
        model, cost, pipeline = self.deployment.model, self.deployment.cost, self.pipeline
        turns = self.num_turns or int(pipeline.num_stages[0])
        num = min(max(batch, 1.0), turns)
        part = np.array([max(1.0, batch / turns)])
        slowest_s, through_s = decode_pass(self.deployment, pipeline, part, length)
        if num_joined:
            joined = pipeline.join_s(cost, model.num_decode_layers, np.array([num_joined / num]))
            slowest_s, through_s = slowest_s + joined[0], through_s + joined[1]
        return float(max(num * slowest_s[0], through_s[0]))


@final
@dataclass(frozen=True)
class MixedStepCost:
    """Seconds of the scheduler's steps of continuous batching.

    A step's prompts and its first decode iteration are one pass, in micro-batches with the same
    number of tokens each. Further decode iterations follow. See `mixed_iteration_s`.
    """

    deployment: Deployment
    pipeline: Pipeline

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        prompts, seconds = _prompts(work), 0.0
        for decoding, context in _decoding(work) or [(0.0, 1.0)]:
            if decoding or prompts[1]:
                seconds += self._pass_s(decoding, context, prompts)
            prompts = (0, 0, prompts[2])
        return seconds

    def _pass_s(self, decoding: float, context: float, prompts: tuple[int, int, float]) -> float:
        num_prompts, tokens, length = prompts
        num_turns = min(float(self.pipeline.num_stages[0]), max(1.0, decoding + tokens))
        taken_s = mixed_iteration_s(
            self.deployment,
            self.pipeline,
            rows=np.array([(decoding + num_prompts) / num_turns]),
            num_turns=num_turns,
            context=context,
            num_pieces=num_prompts / num_turns,
            length=length,
            num_tokens=tokens / num_turns,
        )
        return float(taken_s[0])
