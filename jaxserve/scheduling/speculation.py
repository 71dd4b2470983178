"""Which decode loops may speculate, at which cost, and with what result."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from statistics import median
from typing import NamedTuple, final

from jaxserve.scheduling.plan import ProposalCount, StepPlan, StepResult
from jaxserve.scheduling.sequence import Sequence

# Time of an iteration with proposals, in units of one without, before one was measured.
_FIRST_COST = 1.2
# Loops of a size after which one is timed without proposals, and after which proposals that seemed
# not to pay are tried again.
_LOOPS_BETWEEN_TIMINGS, _LOOPS_BETWEEN_TRIALS = 64, 128
# Loops that run without proposals after one in which they did not pay: one, then twice as many each
# time, up to this. So a loop that never speculates runs most of the time if nothing is quoted.
_MOST_LOOPS_WITHOUT = 4
# Newest loops of a size whose times are kept, and the fewest that a cost is measured by: the first
# may have waited for its compilation.
_NUM_TIMES, _FEWEST_TIMES = 5, 3
# Sequences whose tokens of an iteration are kept; the ones with the oldest loops go first.
_MAX_REMEMBERED = 4096
# Weight of what is known of a sequence after one more loop.
_MEMORY = 0.5


class Speculating(NamedTuple):
    """How a loop speculates: the `num_proposed` and `verify_cost` of its plan."""

    num_proposed: int
    verify_cost: float


NOT_SPECULATING = Speculating(0, 1.0)


@final
class Speculation:
    """Measures the cost of iterations with proposals, by which the device decides when they pay.

    The device knows best how often proposals are right; only the host knows times.

    Args:
      most: `EngineConfig.num_proposed`; 0 to never speculate.
      sizes: `EngineConfig.speculating_buckets`; larger loops do not speculate.
    """

    def __init__(self, most: int, sizes: Seq[int]):
        self._most = most
        self._most_rows = max(sizes, default=0)
        self._sizes: dict[int, _Times] = {}
        # Sequence key -> tokens of an iteration.
        self._pace: OrderedDict[int, float] = OrderedDict()
        self._num_drafts = self._num_proposed = 0
        self.num_accepted_by_place = (0,) * most
        # How often answers were to be dropped, and device group -> the count that its plans know.
        self._num_forgotten, self._num_told = 0, dict[int, int]()
        # Sequence key -> tokens that it had, and what the host proposes after them.
        self._suggested: dict[int, tuple[int, tuple[int, ...]]] = {}

    def forget_answers(self) -> None:
        """Propose nothing from an answer that has already ended."""
        self._num_forgotten += 1

    def take_forgetting(self, group: int) -> bool:
        """Return True once after `forget_answers`, for a device group's next plan."""
        forgets = self._num_told.get(group, 0) < self._num_forgotten
        self._num_told[group] = self._num_forgotten
        return forgets

    def counters(self) -> dict[str, float]:
        return {
            "num_drafts": self._num_drafts,
            "num_draft_tokens": self._num_proposed,
            "num_accepted_tokens": sum(self.num_accepted_by_place),
        }

    def suggest(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Propose tokens after the newest one of a sequence, whose tokens are all known."""
        if tokens:
            self._suggested[sequence.key] = sequence.num_known, tuple(tokens)
        else:
            self.forget(sequence.key)

    @property
    def has_suggested(self) -> bool:
        return bool(self._suggested)

    def suggested(self, sequence: Sequence) -> tuple[int, ...]:
        num_known, tokens = self._suggested.get(sequence.key, (0, ()))
        return tokens if num_known == sequence.planned_length else ()

    def take_in_suggested(self, num_proposed: int, num_accepted: int) -> None:
        """Count proposals of the host that a step computed."""
        self._num_drafts += 1
        self._num_proposed += num_proposed
        self.num_accepted_by_place = tuple(
            num + (i < num_accepted) for i, num in enumerate(self.num_accepted_by_place)
        )

    def forget(self, sequence_key: int) -> None:
        self._suggested.pop(sequence_key, None)

    def next_loop(self, sequences: Seq[Sequence]) -> Speculating | None:
        """Return how the next loop of these sequences speculates; None for not at all.

        A sequence that has not taken part in such a loop gets a trial in any case.
        """
        num_rows = len(sequences)
        if num_rows > self._most_rows:
            return None
        times = self._sizes.setdefault(_size(num_rows), _Times())
        if any(sequence.key not in self._pace for sequence in sequences):
            times.forget_that_it_did_not_pay()
        return times.next_loop(num_rows, self._most)

    def most_tokens(self, sequence: Sequence, num_rows: int) -> int:
        """Return the tokens of an iteration for which a sequence of a loop gets pages.

        About twice as many as came recently: unused pages are taken back, and the next loop is
        planned from what this one may deliver.
        """
        known = self._pace.get(sequence.key)
        if known is None:
            return 1 + min(self._most, max(2, 2 * self._most // num_rows))
        return min(1 + self._most, 1 + round(2 * known))

    def take_in(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """Learn from a collected step that took the device this many `seconds`."""
        if not (plan.is_decode_loop and 0 < len(plan.rows) <= self._most_rows):
            return
        times = self._sizes.setdefault(_size(len(plan.rows)), _Times())
        counts = result.proposals
        if counts is None:
            times.take_in(int(result.num_tokens.max()), 0, seconds)
            return
        self._num_drafts += int(counts[:, ProposalCount.DRAFTS].sum())
        self._num_proposed += int(counts[:, ProposalCount.PROPOSED].sum())
        accepted = counts[:, len(ProposalCount) :].sum(0).tolist()
        accepted += [0] * (self._most - len(accepted))
        self.num_accepted_by_place = tuple(
            one + other for one, other in zip(self.num_accepted_by_place, accepted, strict=True)
        )
        num_iterations = counts[:, ProposalCount.ITERATIONS]
        num_wide = int(counts[:, ProposalCount.WIDE].max())
        times.take_in(int(num_iterations.max()) - num_wide, num_wide, seconds)
        # Without proposals each row gets one token per iteration.
        times.learn_whether_it_paid(
            int(num_iterations.max()),
            num_wide,
            result.num_tokens.sum() / max(1, num_iterations.sum()),
        )
        for row, num_tokens, num in zip(
            plan.rows, result.num_tokens.tolist(), num_iterations.tolist(), strict=True
        ):
            if num:
                known = self._pace.pop(row.sequence_key, num_tokens / num)
                self._pace[row.sequence_key] = known * _MEMORY + (1 - _MEMORY) * num_tokens / num
        while len(self._pace) > _MAX_REMEMBERED:
            self._pace.popitem(last=False)


@final
class _Times:
    """Times of iterations of loops of one size."""

    def __init__(self) -> None:
        self._plain_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._wide_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._num_until_timing = 0
        self._num_until_trial = _LOOPS_BETWEEN_TRIALS
        self._num_without = self._most_without = 0

    @property
    def _cost(self) -> float:
        if len(self._wide_s) < _FEWEST_TIMES:
            return _FIRST_COST
        return median(self._wide_s) / median(self._plain_s)

    def next_loop(self, num_rows: int, most: int) -> Speculating | None:
        if self._num_until_timing <= 0:  # one is enough, although more may follow it in flight
            self._num_until_timing = _LOOPS_BETWEEN_TIMINGS
            return None
        if self._num_without > 0:
            self._num_without -= 1
            return None
        self._num_until_timing -= 1
        self._num_until_trial -= 1
        cost = self._cost
        if self._num_until_trial <= 0:
            self._num_until_trial = _LOOPS_BETWEEN_TRIALS
            return Speculating(most, min(cost, _FIRST_COST))
        # With all proposals right, an iteration gives this many times the tokens.
        return Speculating(most, cost) if cost < 1 + most / num_rows else None

    def forget_that_it_did_not_pay(self) -> None:
        self._num_without = self._most_without = 0

    def learn_whether_it_paid(self, num_iterations: int, num_wide: int, tokens: float) -> None:
        """Run later loops without proposals for a while if they did not pay in this one."""
        cost = 1.0 + num_wide * (self._cost - 1.0) / max(1, num_iterations)
        if num_wide and tokens >= cost:
            self.forget_that_it_did_not_pay()
        else:
            self._most_without = min(_MOST_LOOPS_WITHOUT, max(1, 2 * self._most_without))
            self._num_without = self._most_without

    def take_in(self, num_plain: int, num_wide: int, seconds: float) -> None:
        if not num_wide:
            if num_plain:
                self._plain_s.append(seconds / num_plain)
                self._num_until_timing = _LOOPS_BETWEEN_TIMINGS
            return
        self._num_until_trial = _LOOPS_BETWEEN_TRIALS
        if not self._plain_s:
            return
        # No iteration with proposals is faster; if one was, the device was late before.
        most_s = seconds / (num_plain + num_wide)
        if median(self._plain_s) > most_s:
            self._plain_s.clear()
            self._plain_s.append(most_s)
        self._wide_s.append((seconds - num_plain * median(self._plain_s)) / num_wide)


def _size(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()
