"""A step on its way: its arrays on the device, and how to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import numpy as np

from jaxserve.engine.programs import Outputs
from jaxserve.scheduling.plan import PromptLogprobs, StepPlan, StepResult


@final
@dataclass(frozen=True)
class PromptPart:
    """Prompt log-probabilities of a mixed step: arrays over its tokens, and each row's span."""

    arrays: tuple[jax.Array, jax.Array, jax.Array]
    spans: dict[int, slice]


@final
class DeviceHandle:
    """A submitted step.

    Args:
      plan: what was submitted.
      marker: an array that exists when the step is through.
      outputs: None when no row samples.
      output_rows: int32 [plan rows], where each row lies in `outputs`; -1 for those that do not
        sample.
      prompt_part: None when nobody asked.
    """

    def __init__(
        self,
        plan: StepPlan,
        marker: jax.Array,
        outputs: Outputs | None,
        output_rows: np.ndarray,
        prompt_part: PromptPart | None = None,
    ):
        self._plan = plan
        self._marker = marker
        self._outputs = outputs
        self._output_rows = output_rows
        self._prompt_part = prompt_part
        for array in self._wanted():
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._marker.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def collect(self) -> StepResult:
        num_rows = len(self._plan.rows)
        if self._outputs is None:
            self._marker.block_until_ready()
            tokens = np.zeros((num_rows, 1), np.int32)
            counts = np.zeros(num_rows, np.int32)
            finite = np.ones(num_rows, np.bool_)
            return StepResult(tokens, counts, finite, prompt_logprobs=self._prompt_logprobs())
        samples = self._output_rows >= 0
        needs = self._plan.needs
        return StepResult(
            tokens=self._by_row(self._outputs.tokens),
            num_tokens=np.where(samples, self._by_row(self._outputs.num_tokens), 0),
            finite=self._by_row(self._outputs.finite) | ~samples,
            logprobs=self._by_row(self._outputs.logprobs) if needs.logprobs else None,
            top_ids=self._by_row(self._outputs.top_ids) if needs.top_logprobs else None,
            top_logprobs=self._by_row(self._outputs.top_logprobs) if needs.top_logprobs else None,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _by_row(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array)[self._output_rows]

    def _prompt_logprobs(self) -> dict[int, PromptLogprobs] | None:
        if self._prompt_part is None:
            return None
        logprobs, top_ids, top_logprobs = (np.asarray(a) for a in self._prompt_part.arrays)
        return {
            row: PromptLogprobs(logprobs[span], top_ids[span], top_logprobs[span])
            for row, span in self._prompt_part.spans.items()
        }

    def _wanted(self) -> list[jax.Array]:
        wanted = list(self._prompt_part.arrays) if self._prompt_part else []
        if self._outputs is not None:
            out, needs = self._outputs, self._plan.needs
            wanted += [out.tokens, out.num_tokens, out.finite]
            wanted += [out.logprobs] if needs.logprobs else []
            wanted += [out.top_ids, out.top_logprobs] if needs.top_logprobs else []
        return wanted
