"""A plan for one engine: a schedule and its expected figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, final

from jaxserve.planning.schedules.observed import RequestClass
from jaxserve.planning.schedules.schedule import AllocationPolicy, Division, LatencyBounds, Schedule
from jaxserve.scheduling.iteration.continuous import Unified
from jaxserve.scheduling.iteration.rra import RRA
from jaxserve.scheduling.iteration.waa import WAA

# Share by which batches differ from their mean (`scheduling.iteration.Workload`).
THRESHOLD = 0.1


def iteration_of(schedule: Schedule, *, reserved_slots: int = 0) -> RRA | WAA | Unified:
    """Return the iteration shape that carries out a schedule."""
    if schedule.layout.policy is AllocationPolicy.CONTINUOUS:
        return Unified(
            chunk_tokens=schedule.chunk_tokens,
            max_running=schedule.max_running,
            reserved_slots=reserved_slots,
            heeds_arrivals=True,
        )
    sizes: dict[str, Any] = {
        "encode_batch": schedule.encode_batch,
        "decode_iterations": schedule.num_decodes,
        "encode_tokens": schedule.encode_tokens,
        # Without decode iterations there is no batch to maintain.
        "decode_batch": schedule.decode_batch or None,
        "threshold": THRESHOLD,
        "reserved_slots": reserved_slots,
    }
    return RRA(**sizes) if schedule.layout.policy is AllocationPolicy.RRA else WAA(**sizes)


# The source of a plan's figures: ExeGPT's equations (section 6), or simulations (`Player`). RRA's
# first-token latency always comes from the equations.
CLOSED_FORM = "closed form"
SIMULATED = "simulated"


@final
@dataclass(frozen=True, kw_only=True)
class Move:
    """A move of devices between two groups that a plan needs, or that it refuses.

    Attributes:
      present: the division before.
      division: the division that serves more.
      gain: factor by which throughput rises, or by which bounds that no schedule keeps are missed
        less; infinity if the present division keeps no bounds.
      expected_pause_s: seconds without steps.
      max_pause_s: the longest allowed pause.
      is_measured: whether step times of groups of these sizes were measured; otherwise some are
        derived from those of other sizes.
      refused: why the plan does without the move; empty if it needs the move.
      pause_s: seconds that the move has paused the engine; None before it, or without it.
    """

    present: Division
    division: Division
    gain: float
    expected_pause_s: float
    max_pause_s: float
    is_measured: bool
    refused: str = ""
    pause_s: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether the plan needs the move, and it has not been made."""
        return not self.refused and self.pause_s is None

    def figures(self) -> dict[str, Any]:
        """Return all fields in the types of JSON; an infinite gain or limit is None."""
        return {
            **{name: getattr(self, name) for name in _OF_A_MOVE},
            "gain": None if self.gain == math.inf else self.gain,
            "max_pause_s": None if self.max_pause_s == math.inf else self.max_pause_s,
            "present": str(self.present),
            "division": str(self.division),
        }

    def __str__(self) -> str:
        times = "measured" if self.is_measured else "partly derived"
        if self.refused:
            return (
                f"devices stay {self.present} and not {self.division}: {self.refused} "
                f"(step times {times})"
            )
        paused = "" if self.pause_s is None else f", was {self.pause_s:.3g} s"
        return (
            f"devices move from {self.present} to {self.division} (prompts/answers), "
            f"{self.gain:.3g} times as good by {times} step times; pause expected "
            f"{self.expected_pause_s:.3g} s{paused}"
        )


_OF_A_MOVE = ("expected_pause_s", "is_measured", "refused", "pause_s")


@final
@dataclass(frozen=True, kw_only=True)
class SchedulePlan:
    """A schedule for one engine, and its expected figures.

    The figures assume an engine that always has requests waiting, and hold for each replica.
    Latencies count from the admission of an answer, without its time in the queue. They are those
    of an answer of the 99th-percentile length: in closed form with phases a tenth longer than their
    mean; in simulations see `Played`.

    Attributes:
      schedule: see `Schedule`; for WAA on two device groups: B_E, the iterations of a decode step,
        and the sequences that run in both groups.
      bounds: the requested bounds.
      latency_s: seconds to the answer's end.
      first_token_s: seconds to its first token.
      token_s: its mean seconds per token after the first, including encode phases between tokens.
      answers_per_s, tokens_per_s: throughput in answers, and in their output tokens.
      max_answer_tokens: the 99th-percentile length, in output tokens.
      num_lengths: answers from whose lengths the plan was computed.
      search_s: seconds that the search took.
      classes: requests with bounds of their own, and their expected figures in seconds, by the name
        of the bound in `SamplingParams`; they do not wait for an encode phase.
      fits: whether the schedule is expected to fit in memory. The other figures ignore this.
      estimate: source of the figures: `CLOSED_FORM` or `SIMULATED`.
      lowest: the lowest seconds that some schedule reaches, by name of the bound, if no schedule
        keeps the bounds; empty if this one does.
      move: of devices between two groups; None if the present division is the best.
      num_moves: moves of the runtime's devices before the plan was made. After a further move the
        plan is not adopted.
    """

    schedule: Schedule
    bounds: LatencyBounds
    latency_s: float
    first_token_s: float
    token_s: float
    answers_per_s: float
    tokens_per_s: float
    max_answer_tokens: int
    num_lengths: int
    search_s: float
    classes: tuple[tuple[RequestClass, dict[str, float]], ...] = ()
    fits: bool = True
    estimate: str = CLOSED_FORM
    lowest: dict[str, float] = field(default_factory=dict)
    move: Move | None = None
    num_moves: int = 0

    @property
    def latency_bound_s(self) -> float:
        return self.bounds.latency_s

    @property
    def keeps_bounds(self) -> bool:
        """Whether every latency is expected to be within its bound."""
        return self.worst_share <= 1

    @property
    def worst_share(self) -> float:
        """The largest quotient of a latency and its bound; 0 without bounds."""
        shares = [getattr(self, name) / s for name, s in self.bounds.finite().items()]
        shares += [
            expected_s[span.name] * span.per / span.bound_s
            for each, expected_s in self.classes
            for span in each.spans
        ]
        return max(shares, default=0.0)

    @property
    def missed(self) -> str:
        """The bounds that would be feasible, if no schedule keeps the given ones; else empty."""
        if self.keeps_bounds:
            return ""
        reached = ", ".join(f"{name}={s:.4g}" for name, s in self.lowest.items())
        return f"no schedule keeps the bounds; the lowest, each for itself: {reached}"

    def iteration(self) -> RRA | WAA | Unified:
        return iteration_of(self.schedule, reserved_slots=self.reserved_slots)

    @property
    def reserved_slots(self) -> int:
        """Slots that only requests with bounds of their own may take."""
        return sum(each.num_running for each, _ in self.classes)

    @property
    def family(self) -> str:
        """The family of the schedule: "rra", "continuous", or "waa" for two device groups."""
        return self.schedule.layout.policy.value.partition("_")[0]

    @property
    def name(self) -> str:
        """The family and its sizes, such as "continuous, at most 8"."""
        schedule = self.schedule
        if schedule.layout.policy is AllocationPolicy.CONTINUOUS:
            return f"continuous, at most {schedule.max_running}"
        return (
            f"{self.family.upper()} encode {schedule.encode_batch}, decode {schedule.num_decodes}"
        )

    def figures(self) -> dict[str, Any]:
        """Return the schedule, its bounds and the expected figures, in the types of JSON."""
        schedule = self.schedule
        return {
            "schedule": self.name,
            "family": self.family,
            "estimate": self.estimate,
            "encode_batch": schedule.encode_batch,
            "num_decodes": schedule.num_decodes,
            "max_running": schedule.max_running,
            "decode_batch": schedule.decode_batch,
            "bounds": self.bounds.finite(),
            "keeps_bounds": self.keeps_bounds,
            "lowest": self.lowest,
            "classes": [
                {"bounds": each.bounds.finite(), "expected": expected_s}
                for each, expected_s in self.classes
            ],
            "latency_s": self.latency_s,
            "first_token_s": self.first_token_s,
            "token_s": self.token_s,
            "answers_per_s": self.answers_per_s,
            "tokens_per_s": self.tokens_per_s,
            "max_answer_tokens": self.max_answer_tokens,
            "num_lengths": self.num_lengths,
            "division": None if schedule.division is None else str(schedule.division),
            "move": None if self.move is None else self.move.figures(),
        }

    def summary(self) -> str:
        given = ", ".join(f"{name} {s:.3g} s" for name, s in self.bounds.finite().items())
        return (
            f"{self._text}; bounds: {given or 'none'}"
            f"{'' if self.keeps_bounds else ', which no schedule keeps'}"
        )

    @property
    def _text(self) -> str:
        schedule = self.schedule
        if schedule.layout.policy is AllocationPolicy.CONTINUOUS:
            return f"continuous: at most {schedule.max_running} sequences run"
        return (
            f"{self.family.upper()}: encode {schedule.encode_batch} sequences, "
            f"decode {schedule.num_decodes} iterations"
        )

    def __str__(self) -> str:
        bounds = self.bounds
        missed = f"{self.missed}\n" if self.missed else ""
        moved = f"{self.move}\n" if self.move is not None else ""
        return (
            f"{self._text}, about {self.schedule.decode_batch:.1f} sequences at a time\n"
            f"expected ({self.estimate}): {self.answers_per_s:.4g} answers/s, "
            f"{self.tokens_per_s:.4g} output tokens/s; for an answer of {self.max_answer_tokens} "
            f"tokens (99th percentile) {self.latency_s:.3g} s{_bound(bounds.latency_s)}, "
            f"first token after {self.first_token_s:.3g} s{_bound(bounds.first_token_s)}, then "
            f"{self.token_s:.3g} s a token{_bound(bounds.token_s)}\n"
            f"{missed}"
            f"{moved}"
            f"computed from the lengths of {self.num_lengths} answers in {self.search_s:.2g} s"
        )


def _bound(seconds: float) -> str:
    return "" if seconds == math.inf else f" (bound {seconds:.3g} s)"
