"""A request of a workload, with the length of its answer."""

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
      num_output_tokens: exact number of generated tokens; hidden from the scheduler.
      sample_lengths: number of tokens of each sample, for a request for several; the longest is
        then `num_output_tokens`.
      max_tokens: the scheduler's limit of the length; None for the context's end.
      arrival_s: seconds after the start of the run.
      sampling: sampling parameters; greedy by default.
      priority, deadline_s: see `Runtime.submit`.
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
        """Return sampling parameters that generate exactly the forced length."""
        return replace(
            self.sampling,
            max_tokens=self.max_tokens,
            forced_length=self.sample_lengths or self.num_output_tokens,
            ignore_eos=True,
        )
