"""Step costs from layer costs: the discrete simulation of what a timeline estimates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.step_cost import StepWork
from jaxserve.planning.schedules.configuration import Layout
from jaxserve.planning.schedules.costs import Phase
from jaxserve.planning.schedules.pipeline import Pipeline
from jaxserve.planning.schedules.timeline import Deployment
from jaxserve.scheduling.plan import StepPlan


@final
@dataclass(frozen=True)
class LayerStepCost:
    """Seconds of the scheduler's steps for a decoder-only model on one group of devices.

    A step's prompts, and each of its decode iterations, pass all stages in as many mini-batches as
    there are stages, as in `RoundParts`, and one after the other. So with several stages an encode
    phase and the first iteration do not overlap, which the timeline of RRA lets them do.

    Raises:
      InvalidConfigError: the model has an encoder.
    """

    deployment: Deployment
    layout: Layout

    def __post_init__(self) -> None:
        if not self.deployment.model.is_decoder_only:
            raise InvalidConfigError(
                "an encoder-decoder model is not allowed; the engine's steps are those of "
                "decoder-only models, so pass one"
            )

    def host_s(self, plan: StepPlan) -> float:
        return 0.0

    def device_s(self, work: StepWork) -> float:
        seconds = 0.0
        prompts = [row.num_tokens for row in work.plan.rows if row.num_tokens > 1]
        if work.prefilled:
            # Pairs of a prompt's tokens are twice the sum of positions, less the tokens.
            length = math.sqrt(max(1, 2 * work.prefilled - sum(prompts)) / len(prompts))
            seconds += self._pass_s(Phase.ENCODE, len(prompts), length, sum(prompts))
        contexts = [row.start + 1 for row in work.plan.rows if row.num_tokens == 1]
        for i, attended in enumerate(work.decoded):
            if attended and contexts:
                # Rows that have ended attend to nothing; the others to one position more each time.
                length = sum(contexts) / len(contexts) + i
                num_left = min(float(len(contexts)), attended / length)
                seconds += self._pass_s(Phase.DECODE, num_left, attended / num_left, num_left)
        return seconds

    def _pass_s(self, phase: Phase, batch: float, length: float, num_tokens: float) -> float:
        """Return the seconds of all mini-batches through all stages."""
        pipeline = self._pipeline
        num = np.clip(batch, 1, pipeline.num_stages)
        part = max(1.0, batch / float(num[0]))
        slowest_s, through_s = pipeline.pass_s(
            self.deployment.cost,
            phase,
            self.deployment.model.num_decode_layers,
            batch=np.array([part]),
            length=length,
            num_tokens=np.array([num_tokens / batch * part]),
            num_head_tokens=np.array([part]),
        )
        if phase is Phase.ENCODE:
            return float(through_s[0] + (num[0] - 1) * slowest_s[0])
        return float(max(num[0] * slowest_s[0], through_s[0]))

    @property
    def _pipeline(self) -> Pipeline:
        cluster = self.deployment.cluster
        return Pipeline.of(
            np.array([cluster.num_devices]),
            np.array([self.layout.num_sharded_devices]),
            np.array([self.layout.degree]),
            first_device=0,
            devices_per_machine=cluster.devices_per_machine,
        )
