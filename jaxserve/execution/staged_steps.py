"""Mixed steps over the stages of a model, in micro-batches that pass through them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.handle import DeviceHandle, PromptPart
from jaxserve.execution.micro_batches import Pass, micro_batches
from jaxserve.execution.mixed_heads import verifying_arguments
from jaxserve.scheduling.plan import PageCopies, Row, StepPlan
from jaxserve.steps.batches import ChoosingRows
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.packing import (
    body_size,
    in_places,
    pack_masks,
    pack_rows,
    sampling_first,
    sampling_slots,
)
from jaxserve.steps.sampling.variants import SamplingNeeds, Variant


@final
class StagedSteps:
    """Submits mixed steps to all stages, and sends what the last one samples to the others.

    Args:
      stages: in order; the list of the executor, which empties it when it is closed.
      micro_batches: maximum number of micro-batches of a step.
      tell: called with each pass of a micro-batch.
    """

    def __init__(
        self, stages: Sequence[DeviceStage], micro_batches: int, tell: Callable[[Pass], None]
    ):
        self._stages = stages
        self._micro_batches = micro_batches
        self._tell = tell

    @property
    def _config(self) -> EngineConfig:
        return self._stages[0].programs.config

    def mixed(self, plan: StepPlan, needs: SamplingNeeds, late: PageCopies = ()) -> DeviceHandle:
        """Submit the mixed step of a plan.

        Args:
          late: copies from the host that the first micro-batch brings, layer by layer.
        """
        # If a row returns prompt log-probabilities, the step is one batch, so that their spans are
        # those of the step; and if one has proposals, since a micro-batch may not end among them.
        is_one = plan.has_proposals or any(row.wants_prompt_logprobs for row in plan.rows)
        prompts = [row for row in plan.rows if row.encodes]
        marker: Any = self.encode(pack_rows(self._config, prompts)[0]) if prompts else None
        if prompts and len(prompts) == len(plan.rows) and not late:
            return DeviceHandle(plan, needs, marker, (), np.empty(0, np.int32))
        batches = [[(i, row) for i, row in enumerate(plan.rows) if not row.encodes]]
        if not is_one:
            smallest = self._config.token_buckets[0]
            batches = list(micro_batches(batches[0], self._micro_batches, smallest))
        outputs: list[Outputs] = []
        output_rows = np.full(len(plan.rows), -1, np.int32)
        prompt_part = None
        num_outputs = 0
        for batch in batches:
            batch = [batch[i] for i in sampling_first([row for _, row in batch])]
            parts = [(i, part) for i, row in batch for part in in_places(row)]
            rows = [row for _, row in parts]
            num_tokens = body_size(self._config, rows, is_coarse=bool(late))
            packed, starts = pack_rows(self._config, rows, num_tokens)
            sampling = [i for i, row in batch if row.samples]
            slots = frozenset(row.slot for _, row in batch)
            self._tell(Pass(slots, len(packed.token_row), samples=bool(sampling)))
            hidden, marker = self.pass_through(packed, late)
            late = ()
            if any(row.wants_prompt_logprobs for row in plan.rows):
                prompt_part = self.prompt_part(parts, starts, packed, hidden)
            if sampling:
                choose = self._verify if plan.has_proposals else self._sample_rows
                outputs.append(choose(plan, sampling, marker, needs.variant))
                output_rows[sampling] = num_outputs + np.arange(len(sampling))
                num_outputs += len(outputs[-1].num_tokens)
        marker = outputs[-1].tokens if outputs else marker
        return DeviceHandle(plan, needs, marker, outputs, output_rows, prompt_part)

    def pass_through(
        self, packed: Any, late: PageCopies = (), *, brings_pages: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """Have all stages compute a micro-batch; return the last one's output, as `mixed` does.

        Args:
          late: copies from the host that each stage makes before its attention, layer by layer.
          brings_pages: call the executables of such copies even if there are none.
        """
        hidden = row_hidden = None
        for stage in self._stages:
            incoming = stage.incoming(late) if late or brings_pages else None
            hidden, row_hidden = stage.mixed(packed, hidden, incoming)
        assert hidden is not None and row_hidden is not None, "a model without stages"
        return hidden, row_hidden

    def encode(self, batch: Any) -> jax.Array:
        """Encode whole prompts on the first stage, and write what each stage's layers see."""
        encoded = self._stages[0].encode(batch)
        for stage in self._stages:
            stage.write_encoded(batch, encoded)
        return encoded

    def choose_verified(
        self, row_hidden: Any, rows: ChoosingRows, masks: Any, variant: Variant
    ) -> Outputs:
        """Choose tokens of rows with proposals on the last stage, and send them to the others."""
        outputs, chosen = self._stages[-1].verify(row_hidden, rows, masks, variant)
        for stage in self._stages[:-1]:
            stage.send(np.asarray(rows.slot), chosen, np.asarray(rows.num_proposed))
        return outputs

    def sample(
        self,
        hidden: Any,
        index: np.ndarray,
        outputs: Outputs,
        variant: Variant,
        masks: Any = None,
    ) -> Outputs:
        """Sample on the last stage and send the tokens to the others."""
        outputs, chosen = self._stages[-1].sample(hidden, index, outputs, variant, masks)
        for stage in self._stages[:-1]:
            stage.send(index, chosen)
        return outputs

    def prompt_part(
        self, batch: Sequence[tuple[int, Row]], starts: Sequence[int], packed: Any, hidden: Any
    ) -> PromptPart:
        """Compute log-probabilities of prompts on the last stage."""
        last = self._stages[-1]
        with last.programs.place.in_force():
            arrays = last.programs.prompt_logprobs(last.params, last.slots.state, hidden, packed)
        return PromptPart.of(arrays, batch, starts)

    def _sample_rows(
        self, plan: StepPlan, sampling: Sequence[int], row_hidden: Any, variant: Variant
    ) -> Outputs:
        """Sample the next token of the plan's rows `sampling`, which come first in the batch."""
        rows = [plan.rows[i] for i in sampling]
        index = sampling_slots(self._config, rows, variant)
        none = self._stages[-1].no_outputs(len(index), 1, variant)
        masks = pack_masks(plan, sampling, len(index))
        return self.sample(row_hidden, index, none, variant, masks)

    def _verify(
        self, plan: StepPlan, sampling: Sequence[int], row_hidden: Any, variant: Variant
    ) -> Outputs:
        """`_sample_rows` where some of the rows have proposals, and so may get several tokens."""
        last = self._stages[-1].programs
        rows, masks = verifying_arguments(last, plan, sampling, variant, has_masks=False)
        return self.choose_verified(row_hidden, rows, masks, variant)
