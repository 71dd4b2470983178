"""One request of a workload: what to ask, and how long the answer shall be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from jaxserve.core.sampling_params import SamplingParams


@final
@dataclass(frozen=True, kw_only=True)
class WorkloadItem:
    """A prompt and the forced length of its answer.

    Attributes:
      prompt_token_ids: at least one.
      num_output_tokens: exactly this many are generated; hidden from the scheduler.
      max_tokens: what the scheduler knows about the length; the context's end if None.
      arrival_s: seconds after the start of the run; 0 for all at once.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    max_tokens: int | None = None
    arrival_s: float = 0.0

    def params(self) -> SamplingParams:
        """Greedy, and past the model's end token until the length is reached."""
        return SamplingParams(
            max_tokens=self.max_tokens, forced_length=self.num_output_tokens, ignore_eos=True
        )
