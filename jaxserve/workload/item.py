"""One request of a workload: what to ask, and how long the answer shall be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from jaxserve.core.sampling_params import SamplingParams


@final
@dataclass(frozen=True, kw_only=True)
class WorkloadItem:
    """A prompt and the forced length of its answer.

    Attributes:
      prompt_token_ids: at least one.
      num_output_tokens: exactly this many are generated; hidden from the scheduler.
      sample_lengths: of a request for several samples, the tokens of each; `num_output_tokens` is
        then the longest.
      max_tokens: what the scheduler knows about the length; the context's end if None.
      arrival_s: seconds after the start of the run; 0 for all at once.
      sampling: how tokens are chosen; greedily by default.
      priority, deadline_s: as in `Runtime.submit`.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    sample_lengths: tuple[int, ...] | None = None
    max_tokens: int | None = None
    arrival_s: float = 0.0
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    deadline_s: float | None = None

    def params(self) -> SamplingParams:
        """Past the model's end token until the length is reached."""
        return replace(
            self.sampling,
            max_tokens=self.max_tokens,
            forced_length=self.sample_lengths or self.num_output_tokens,
            ignore_eos=True,
        )
