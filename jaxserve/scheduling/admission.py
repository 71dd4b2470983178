"""How much memory to reserve for a sequence, and what an admission leaves available."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

import numpy as np

from jaxserve.core.config import EngineConfig
from jaxserve.scheduling.lengths import LengthEstimate, LengthTracker, MemoryUse, memory_times
from jaxserve.scheduling.policy import PreemptionCost
from jaxserve.scheduling.sequence import Sequence

# Standard deviations that stay free if costs are not measured, and the most that do.
_UNMEASURED_MARGIN, _MAX_MARGIN = 1.0, 1.5


@final
@dataclass(frozen=True)
class MaxLength:
    """Reserve the longest possible answer, as ORCA and FasterTransformer do; none is preempted."""

    extends = True

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.max_length

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Watermark:
        return Watermark(0)


@final
@dataclass(frozen=True)
class OnDemand:
    """Reserve the present tokens and grow page by page, as vLLM does; preempt when pages run out.

    Attributes:
      watermark: share of the pool that an admission leaves available, for running sequences to grow
        into before one is preempted.
    """

    watermark: float = 0.01
    extends = True

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.planned_length + 1

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Watermark:
        return Watermark(int(self.watermark * (config.num_pages - 1)), is_idle=not running)


@final
class Watermark:
    """A headroom of `num_pages` pages, except for the first sequence that runs (`is_idle`)."""

    def __init__(self, num_pages: int, *, is_idle: bool = False):
        self._num_pages = num_pages
        self._is_idle = is_idle

    def pages(self, sequence: Sequence, following: Callable[[], Iterable[Sequence]] = tuple) -> int:
        return 0 if self._is_idle else self._num_pages

    def admitted(self, sequence: Sequence) -> None:
        self._is_idle = False

    def advanced(self) -> None:
        """Change nothing."""


@final
@dataclass(frozen=True)
class Predicted:
    """Reserve the predicted length of an answer, as S3 does (section 3.2).

    By default as in the paper: the longest length of the likeliest bucket. A sequence that uses up
    its reservation is preempted; its next reservation is twice as large, or what a probe has read
    since, whichever is more. So the number of its preemptions is bounded by the logarithm of its
    length, even if every reading is too short. Without any estimate the longest answer is reserved,
    as in ORCA.

    Attributes:
      miss_rate: reserve instead a length that at most this share of answers outgrows, given the
        tokens generated so far.
      extends: a sequence that outgrows its reservation takes free pages, and is preempted only if
        there are none.
    """

    miss_rate: float | None = None
    extends: bool = False

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        newest = lengths.estimate(sequence)
        first = lengths.first_estimate(sequence)
        if newest is None or first is None:
            return sequence.max_length
        wanted = self._length(sequence, newest, sequence.num_planned_outputs)
        if newest is first:
            return wanted << sequence.kv.num_outgrown
        if sequence.kv.num_outgrown:
            wanted = max(wanted, self._length(sequence, first, 0) << sequence.kv.num_outgrown)
        return wanted

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Watermark:
        return Watermark(0)

    def _length(self, sequence: Sequence, estimate: LengthEstimate, num_outputs: int) -> int:
        if self.miss_rate is None:
            return sequence.prompt_length + estimate.likeliest_length
        answer = estimate.quantile(self.miss_rate, num_outputs)
        return sequence.prompt_length + answer


@final
@dataclass(frozen=True)
class Oracle:
    """Reserve exactly what the answer will need, by its forced length, or else up to its limit.

    No prediction of lengths can do better.
    """

    extends = True

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.request.end_length(sequence.max_length, sequence.sample_index)

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> Watermark:
        return Watermark(0)


@final
@dataclass(frozen=True)
class Expected:
    """Take pages as tokens come; admit by the expected peak of the memory in use.

    Answers end at different times, so the memory that all of them need together peaks far below the
    sum of their final lengths. The peak follows from their estimated lengths, each conditioned on
    the tokens generated so far. (Gong et al., "Past-Future Scheduler", arXiv:2507.10150, estimate
    it from past lengths; here every sequence has its own distribution.)

    How certain it must be that memory suffices follows from what is lost if it does not. A sequence
    that runs for t iterations until memory runs out keeps the tokens of these t iterations, so
    memory that stays free for it loses them; a preemption of all memory costs c iterations
    (`PreemptionCost`). So a probability of t / c that memory runs out after t iterations weighs the
    two, and what happens after c iterations has no weight: if preemptions cost nothing, the pool is
    filled whatever the predictions say; if they cost much, a margin stays free until the peak.

    Without any estimate, or if estimates are not informative, this is `OnDemand`.

    Attributes:
      margin: standard deviations of the memory in use that stay free at every time; None for those
        of that probability, and 1 if costs are not measured.
    """

    margin: float | None = None
    extends = True

    def reserve_tokens(self, sequence: Sequence, lengths: LengthTracker) -> int:
        return sequence.planned_length + 1

    def headroom(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        preemption: PreemptionCost,
    ) -> ExpectedPeak:
        return ExpectedPeak(running, config, lengths, self.margin, preemption)


@final
class ExpectedPeak:
    """A headroom of the expected growth of the memory in use until its peak.

    The memory that running sequences will need is computed once, and that of an admitted one is
    added to it, so the cost of an admission does not depend on how many sequences run. `margin` is
    that of `Expected`.
    """

    def __init__(
        self,
        running: Seq[Sequence],
        config: EngineConfig,
        lengths: LengthTracker,
        margin: float | None,
        preemption: PreemptionCost,
    ):
        self._sequences = list(running)
        self._page_size = config.page_size
        self._layout = config.page_layout
        self._lengths = lengths
        self._margin = margin
        self._preemption = preemption
        self._watermark = OnDemand().headroom(running, config, lengths, preemption)
        self._has_estimates = any(lengths.estimate(each) is not None for each in running)
        # The time up to which `_use`, of `_sequences`, is known; 0 before it is.
        self._longest = 0.0
        self._use = MemoryUse(np.zeros(0), np.zeros(0))
        # Standard deviations that stay free at the first of the times of `_use`; later ones have no
        # weight. A number is for all times.
        self._margins: np.ndarray | float = 0.0
        # The use up to `_longest` of waiting sequences, by their keys; and the last one computed.
        self._uses: dict[int, MemoryUse] = {}
        self._asked: Sequence | None = None
        self._has_admitted = False
        # Pages of `_sequences`; None before they are counted.
        self._num_reserved: int | None = None

    def pages(self, sequence: Sequence, following: Callable[[], Iterable[Sequence]] = tuple) -> int:
        if not self._sequences:
            return 0
        is_known = self._has_estimates or self._lengths.estimate(sequence) is not None
        if not (is_known and self._lengths.are_informative):
            return self._watermark.pages(sequence)
        own = self._uses.get(sequence.key)
        if own is None:
            own = self._use_of(sequence, following)
        self._asked = sequence
        peak = self._use.plus(own).peak(self._margins)
        if self._num_reserved is None:
            self._num_reserved = sum(each.kv.table.reservation for each in self._sequences)
        now = self._num_reserved + sequence.kv.table.pages_for(sequence.planned_length + 1)
        return max(0, math.ceil(peak / self._page_size) - now)

    def admitted(self, sequence: Sequence) -> None:
        self._watermark.admitted(sequence)
        self._sequences.append(sequence)
        if self._num_reserved is not None:
            self._num_reserved += sequence.kv.table.reservation
        self._has_estimates = self._has_estimates or self._lengths.estimate(sequence) is not None
        self._has_admitted = True
        own = self._uses.pop(sequence.key, None)
        if own is not None and self._asked is sequence:
            self._use = self._use.plus(own)
        else:
            self._forget()

    def advanced(self) -> None:
        """Recompute what the sequences will need, from their new lengths."""
        self._num_reserved = None
        self._forget()

    def _forget(self) -> None:
        self._longest = 0.0
        self._uses.clear()

    def _use_of(self, sequence: Sequence, following: Callable[[], Iterable[Sequence]]) -> MemoryUse:
        """Return the memory that a sequence will need, up to the end of the last of all.

        More admissions are likely, so the use of the `following` sequences is computed with it.
        """
        forecast = self._lengths.forecast([sequence], even_if_unknown=True)
        assert forecast is not None, "a sequence has an estimate"
        if forecast.longest > self._longest:
            everything = self._lengths.forecast(self._sequences, even_if_unknown=True)
            assert everything is not None
            self._uses.clear()
            self._longest = max(forecast.longest, everything.longest)
            self._use = everything.memory(self._held(self._sequences), self._longest, self._layout)
            self._margins = self._margins_at(memory_times(self._longest))
        sequences = [sequence]
        if self._has_admitted:  # after an admission more are likely
            self._has_admitted = False
            sequences += [each for each in following() if each is not sequence]
            forecast = self._lengths.forecast(sequences, even_if_unknown=True)
            assert forecast is not None, "a sequence has an estimate"
        uses = forecast.memory_of_each(self._held(sequences), self._longest, self._layout)
        ends = forecast.longest_of_each().tolist()
        self._uses |= {
            each.key: use
            for each, use, end in zip(sequences, uses, ends, strict=True)
            if end <= self._longest
        }
        return uses[0]

    def _margins_at(self, times: np.ndarray) -> np.ndarray | float:
        if self._margin is not None:
            return self._margin
        cost = self._preemption()
        if cost is None:
            return _UNMEASURED_MARGIN
        shares = times / max(cost, 1.0)
        shares = np.maximum(shares[shares < 1.0], 1e-9)
        # The quantile of a logistic distribution, scaled to be within 0.01 of the normal one's.
        return np.clip(np.log((1.0 - shares) / shares) / 1.702, -_MAX_MARGIN, _MAX_MARGIN)

    def _held(self, sequences: Seq[Sequence]) -> np.ndarray:
        """Return the tokens of each; the last page of a sequence is half empty on average."""
        held = np.asarray([each.planned_length + 1 for each in sequences], np.float64)
        return held + self._page_size / 2
