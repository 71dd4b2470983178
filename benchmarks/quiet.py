"""The same run several times on a machine that others use too: what it takes in quiet moments.

Requests that arrive together are served in the same steps in every run. Who shares the machine
slows some steps of one run and other steps of the next, so that the quiet moments of all of them
make up a whole run, which no single one may have been.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, final

import numpy as np

from jaxserve.core.metrics import summarise
from jaxserve.core.request import Completion, Timing

if TYPE_CHECKING:
    from jaxserve.engine.recorder import StepRecord
    from jaxserve.runtime import Runtime

# Of the times that a step took: other programs on the machine only ever add to them.
QUIET = 0.25


@final
@dataclass(frozen=True)
class Recording:
    """One run.

    Attributes:
      begin_s: when its requests arrived, on the engine's clock.
      steps: those that it took, in order, up to the last end.
    """

    completions: Sequence[Completion]
    steps: Sequence[StepRecord]
    begin_s: float

    @classmethod
    def of(cls, rt: Runtime, completions: Sequence[Completion]) -> Recording:
        """What a runtime that is done with these has recorded of them."""
        begin_s = min(completion.timing.arrival_s for completion in completions)
        end_s = max(completion.timing.finished_s or 0.0 for completion in completions)
        # What was in flight at the end may or may not have been read since.
        steps = [
            step
            for step in rt.report().steps
            if step.submitted_s >= begin_s
            and step.collected_s is not None
            and step.collected_s <= end_s
        ]
        return cls(completions, steps, begin_s)


def in_quiet(
    figures: dict[str, Any], own: Sequence[Recording], others: Sequence[Recording] = ()
) -> dict[str, Any]:
    """Figures of one of several runs, times replaced by those of quiet moments where that is right.

    `measured_in` says whether it was.

    Args:
      own, others: see `quiet_run`.
    """
    quiet = quiet_run(own, others)
    if quiet is None:
        return {**figures, "measured_in": f"one of {len(own)} runs"}
    completions, wall_s, num_runs = quiet
    moments = f"quiet moments of {num_runs} runs of the same steps"
    return {**figures, **summarise(completions, wall_s), "measured_in": moments}


def quiet_run(
    own: Sequence[Recording], others: Sequence[Recording] = ()
) -> tuple[list[Completion], float, int] | None:
    """The first of a policy's runs as if each of its steps had met a quiet moment.

    Args:
      own: the policy's runs; at least one.
      others: runs of the same requests under other policies, which count where they took the very
        same steps.

    Returns:
      Its completions, times counted from 0, its seconds in all, and how many runs counted. None
      where its runs did not take the same steps, as when requests arrive over time.
    """
    shapes = {_shapes(recording) for recording in own}
    if len(shapes) > 1:
        return None
    alike = [*own, *(other for other in others if _shapes(other) in shapes)]
    seconds = [np.diff([r.begin_s, *_ends(r)]) for r in alike]
    # However few: runs are compared with timings, of which there are many more.
    ends = np.cumsum(np.quantile(seconds, QUIET, axis=0, method="median_unbiased"))
    first = own[0]
    collected = _ends(first)

    def quiet_s(time_s: float | None) -> float | None:
        """When the step that had ended by then ends in the quiet run."""
        if time_s is None:
            return None
        num_ended = bisect.bisect_right(collected, time_s)
        return float(ends[num_ended - 1]) if num_ended else 0.0

    done = [
        replace(
            completion,
            timing=Timing(
                arrival_s=0.0,
                admitted_s=quiet_s(completion.timing.admitted_s),
                first_token_s=quiet_s(completion.timing.first_token_s),
                finished_s=quiet_s(completion.timing.finished_s),
                num_preemptions=completion.timing.num_preemptions,
            ),
        )
        for completion in first.completions
    ]
    wall_s = max(completion.timing.finished_s or 0.0 for completion in done)
    return done, wall_s, len(alike)


def _shapes(recording: Recording) -> tuple[tuple[Any, ...], ...]:
    """What the device was asked to do, step by step."""
    return tuple(
        (s.kind, s.num_rows, s.num_tokens, s.num_iterations, s.num_padding_tokens, s.pages_owned)
        for s in recording.steps
    )


def _ends(recording: Recording) -> list[float]:
    """When each step had been read; strictly in order."""
    ends = [step.collected_s for step in recording.steps if step.collected_s is not None]
    assert all(a <= b for a, b in pairwise(ends)), "steps are read in the order of submission"
    return ends
