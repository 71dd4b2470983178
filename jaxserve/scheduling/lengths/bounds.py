"""Requests with latency bounds of their own: what is refused, and what waits for them.

A request with a bound is in one of three cases.

- At its submission it is refused, if it is expected to end after its bound. Expected is that those
  before it in the policy's order go first, and that it begins when enough of the others have ended
  or make way (`expected_late`).
- Else it is deferred where there is no room for it: it waits until other sequences have ended. It
  is refused then as soon as it would be late even if it began at once (`too_late`).
- Once it has begun it is not refused any more.

Sequences without a bound wait while the computation of their prompts would make a running one with
a bound late (`Slack`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, final

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import BoundNotMetError
from jaxserve.core.request import Request
from jaxserve.scheduling.lengths.outlook import expected_tokens, outlooks
from jaxserve.scheduling.lengths.tracker import LengthTracker
from jaxserve.scheduling.order_keys import OrderKeys
from jaxserve.scheduling.pace import Pace
from jaxserve.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from jaxserve.scheduling.scheduler import Scheduler

# Share by which the expected seconds of an answer may be wrong, in both directions.
_MARGIN = 0.2


def expected_late(
    scheduler: Scheduler, request: Request, pace: Pace | None, now_s: float
) -> BoundNotMetError | None:
    """Return the error of a submitted request that is expected to miss its bound; None otherwise.

    Its outlook tells when it begins, after those before it in the policy's order, and when it ends:
    with the mean of its predicted length, or with its `max_tokens` where nothing was predicted.
    Running sequences that the policy preempts for it (`IterationShape.makes_way`) do not count.

    Args:
      pace: None before any step was timed; then nothing is refused.
    """
    if pace is None or request.due_s is None or request.params.latency_bound is None:
        return None
    away = _making_way(scheduler, request)
    outlook = outlooks(scheduler, pace.iteration_s, without=away).get(request.id)
    if outlook is None or outlook.ends_in_s is None or outlook.begins_in_s is None:
        return None
    passed_s = now_s - request.arrival_s
    return _late(
        request, outlook.num_tokens, passed_s + outlook.begins_in_s, passed_s + outlook.ends_in_s
    )


def too_late(
    samples: Seq[Sequence], lengths: LengthTracker, config: EngineConfig, pace: Pace, now_s: float
) -> BoundNotMetError | None:
    """Return the error of a request that would miss its bound if it began now; None otherwise.

    Args:
      samples: its sequences, all of which wait, and none of which has begun.
    """
    request = samples[0].request
    if request.due_s is None:
        return None
    passed_s = now_s - request.arrival_s
    tokens = expected_tokens(lengths, samples)
    alone_s = max(_alone_s(*each, config, pace) for each in zip(samples, tokens, strict=True))
    return _late(request, sum(tokens), passed_s, passed_s + alone_s)


@final
class Slack:
    """The time that running sequences with a bound have left, in one step.

    Args:
      bounded: those sequences.
      keys: their places in the policy's order.
    """

    def __init__(
        self,
        bounded: Seq[Sequence],
        keys: OrderKeys,
        lengths: LengthTracker,
        config: EngineConfig,
        pace: Pace,
        now_s: float,
    ):
        self._keys = keys
        self._config = config
        self._prompt_s = max(0.0, pace.prefill_s - pace.decode_s)
        # Of each sequence: its place, the seconds that it has left, and those that it needs.
        self._left: list[tuple[Sequence, float, float]] = []
        for sequence, tokens in zip(bounded, expected_tokens(lengths, bounded), strict=True):
            if sequence.request.due_s is not None:
                alone_s = _alone_s(sequence, tokens, config, pace)
                self._left.append((sequence, sequence.request.due_s - now_s, alone_s))

    def is_too_small_for(self, sequence: Sequence) -> bool:
        """Return whether a sequence has to wait so that those before it in order are in time.

        It has to if the steps that compute its prompt would make one of them late, and that one
        can be in time without them.
        """
        num_steps = -(-sequence.num_uncomputed // self._config.max_step_tokens)
        for each, left_s, alone_s in self._left:
            if self._keys.of(each) < self._keys.of(sequence):
                # Its steps in flight may compute prompts, too.
                num_mixed = num_steps + each.num_in_flight
                needed_s = (1 + _MARGIN) * alone_s + num_mixed * self._prompt_s
                if (1 - _MARGIN) * alone_s <= left_s < needed_s:
                    return True
        return False


def _making_way(scheduler: Scheduler, request: Request) -> set[Sequence]:
    """Return the running sequences that are preempted for a request, if that gives it room."""
    if not scheduler.policy.iteration.makes_way:
        return set()
    keys = scheduler.order_keys
    own = [each for each in scheduler.waiting if each.request.id == request.id]
    if not own:
        return set()
    place = min(keys.of(each) for each in own)
    return {
        each for each in scheduler.running if each.request.due_s is None and keys.of(each) > place
    }


def _alone_s(sequence: Sequence, tokens: float, config: EngineConfig, pace: Pace) -> float:
    """Return the seconds of a sequence from now on if it runs, and no prompt but its own does."""
    iteration_s = min(pace.iteration_s, pace.decode_s)
    tokens += sequence.num_planned_outputs - len(sequence.output)  # those in flight
    return (sequence.num_uncomputed / config.max_step_tokens + tokens) * iteration_s


def _late(
    request: Request, num_tokens: float, wait_s: float, expected_s: float
) -> BoundNotMetError | None:
    bound_s = request.params.latency_bound
    if bound_s is None or expected_s <= bound_s:
        return None
    return BoundNotMetError(request.id, bound_s, expected_s, num_tokens / request.params.n, wait_s)
