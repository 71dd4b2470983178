"""A submitted step: its arrays on the device, and the code that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import jax
import numpy as np

from jaxserve.scheduling.plan import PromptLogprobs, Row, StepPlan, StepResult
from jaxserve.steps.outputs import Outputs
from jaxserve.steps.sampling.sampler import SamplingNeeds


@final
@dataclass(frozen=True)
class PromptPart:
    """Prompt log-probabilities of a mixed step: arrays over its tokens, and spans of rows."""

    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    spans: dict[int, slice]

    @classmethod
    def of(
        cls,
        arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
        rows: Sequence[tuple[int, Row]],
        starts: Sequence[int],
    ) -> Self:
        """Return the part of the rows that return prompt log-probabilities.

        `rows` have their indices in the plan, and `starts` the index of each row's first token.
        """
        spans = {
            i: slice(start, start + row.num_tokens)
            for (i, row), start in zip(rows, starts, strict=True)
            if row.wants_prompt_logprobs
        }
        return cls(arrays, spans)


@final
class SubmittedStep:
    """A step on the device, whose results `collect` reads.

    Args:
      needs: sampler features of the plan's rows; they decide which log-probabilities are read.
      marker: an array that is ready when the step has been computed.
      outputs: outputs of the rows that sample, in one part per micro-batch; may be empty.
      output_rows: int32 [plan rows], the index of each row in the concatenated parts; -1 for a row
        that does not sample.
      prompt_part: prompt log-probabilities; None if no row returns them.
    """

    def __init__(
        self,
        plan: StepPlan,
        needs: SamplingNeeds,
        marker: jax.Array,
        outputs: Sequence[Outputs],
        output_rows: np.ndarray,
        prompt_part: PromptPart | None = None,
    ):
        self._plan = plan
        self._needs = needs
        self._marker = marker
        self._outputs = outputs
        self._output_rows = output_rows
        self._prompt_part = prompt_part
        for array in self._wanted():
            array.copy_to_host_async()

    def is_ready(self) -> bool:
        return self._marker.is_ready()  # pyrefly: ignore[missing-attribute]

    def collect(self) -> StepResult:
        num_rows = len(self._plan.rows)
        if not self._outputs:
            self._marker.block_until_ready()
            tokens = np.zeros((num_rows, 1), np.int32)
            counts = np.zeros(num_rows, np.int32)
            finite = np.ones(num_rows, np.bool_)
            return StepResult(tokens, counts, finite, prompt_logprobs=self._prompt_logprobs())
        samples = self._output_rows >= 0
        needs = self._needs
        return StepResult(
            tokens=self._by_row("tokens"),
            num_tokens=np.where(samples, self._by_row("num_tokens"), 0),
            finite=self._by_row("finite") | ~samples,
            logprobs=self._by_row("logprobs") if needs.logprobs else None,
            processed_logprobs=self._by_row("processed_logprobs") if needs.logprobs else None,
            top_ids=self._by_row("top_ids") if needs.top_logprobs else None,
            top_logprobs=self._by_row("top_logprobs") if needs.top_logprobs else None,
            prompt_logprobs=self._prompt_logprobs(),
            remaining=self._by_row_if_any("remaining"),
            proposals=self._by_row_if_any("proposals"),
        )

    def _by_row_if_any(self, name: str) -> np.ndarray | None:
        return None if getattr(self._outputs[0], name) is None else self._by_row(name)

    def _by_row(self, name: str) -> np.ndarray:
        parts = [np.asarray(getattr(part, name)) for part in self._outputs]
        return np.concatenate(parts)[self._output_rows]

    def _prompt_logprobs(self) -> dict[int, PromptLogprobs] | None:
        if self._prompt_part is None:
            return None
        arrays = [np.asarray(array) for array in self._prompt_part.arrays]
        return {
            row: PromptLogprobs(*(array[span] for array in arrays))
            for row, span in self._prompt_part.spans.items()
        }

    def _wanted(self) -> list[jax.Array]:
        wanted: list[jax.Array | None] = []
        if self._prompt_part is not None:
            wanted += self._prompt_part.arrays
        for out in self._outputs:
            wanted += [out.tokens, out.num_tokens, out.finite]
            wanted += [out.logprobs, out.processed_logprobs] if self._needs.logprobs else []
            wanted += [out.top_ids, out.top_logprobs] if self._needs.top_logprobs else []
            wanted += [out.remaining, out.proposals]
        return [array for array in wanted if array is not None]
