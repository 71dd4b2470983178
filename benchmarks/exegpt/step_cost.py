"""Passes of a pipeline, and step costs from them, for simulations of what a timeline estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.step_cost import StepWork
from jaxserve.planning.schedules.continuous import mixed_iteration_s
from jaxserve.planning.schedules.layer_cost import Deployment, Pipeline
from jaxserve.planning.schedules.schedule import ParallelLayout
from jaxserve.scheduling.plan import StepPlan


def pipeline_of(deployment: Deployment, layout: ParallelLayout) -> Pipeline:
    return Pipeline.of_layouts((layout,), deployment.cluster)


def _prompts(work: StepWork) -> tuple[int, int, float]:
    """Return number, tokens and mean length of a step's prompts; see `Pipeline.encode_pass_s`."""
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
        slowest_s, through_s = self.pipeline.encode_pass_s(
            self.deployment, part, length, tokens, joins=self.decodes
        )
        if not self.decodes:
            return float(slowest_s[0])
        return float(through_s[0] + (num - 1) * slowest_s[0])

    def _decode_s(self, batch: float, length: float, num_joined: float) -> float:
        """Return the seconds between two iterations of a mini-batch."""
        turns = self.num_turns or int(self.pipeline.num_stages[0])
        num = min(max(batch, 1.0), turns)
        part = np.array([max(1.0, batch / turns)])
        joined = np.array([num_joined / num]) if num_joined else None
        slowest_s, through_s = self.pipeline.decode_pass_s(self.deployment, part, length, joined)
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
