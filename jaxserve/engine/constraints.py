"""The grammars of one engine's sequences: masks for its plans, and tokens that they force."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from jaxserve.core.errors import JaxserveError
from jaxserve.core.request import Request
from jaxserve.engine.lookup import HostLookup
from jaxserve.scheduling.plan import StepPlan, TokenMasks
from jaxserve.scheduling.scheduler import Progress, Scheduler
from jaxserve.scheduling.sequence import Phase, Sequence

# Ended sequences are dropped only when there are more than this many.
_LEAST_LOOKED_AT = 64


class AnswerMatcher(Protocol):
    """The state of one answer in its grammar; `matcher.Matcher` implements it."""

    @property
    def mask_s(self) -> float: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def is_over(self) -> bool:
        """Whether nothing binds the answer's further tokens."""
        ...

    @property
    def error(self) -> JaxserveError | None: ...

    def follow(self, output: Seq[int]) -> None: ...

    def forced(self) -> list[int]: ...

    def propose(self, tokens: Seq[int], most: int, *, forces: bool) -> tuple[int, ...]: ...


class GrammarSource(Protocol):
    """Makes matchers, and computes their masks; `grammars.Grammars` implements it."""

    def matcher(self, request: Request) -> AnswerMatcher: ...

    def masks(self, rows: tuple[int, ...], matchers: Seq[Any]) -> TokenMasks: ...


@final
@dataclass(eq=False, slots=True)
class _Followed:
    """A sequence with a grammar, its matcher, and the counted part of `mask_s`."""

    sequence: Sequence
    matcher: AnswerMatcher
    counted_s: float = 0.0
    lookup: HostLookup | None = None


@final
class Constraints:
    """The matchers of the sequences with a grammar. Only the engine's thread uses it.

    Since many may wait, a step looks only at the sequences that it computes, and cancelled ones are
    dropped in bulk. `grammars` is None if no grammar is enforced, as in a simulation.
    """

    def __init__(self, scheduler: Scheduler, grammars: GrammarSource | None):
        self._scheduler = scheduler
        self._grammars = grammars
        self._matched: dict[int, _Followed] = {}
        self._most_matched = _LEAST_LOOKED_AT
        self._num_constrained = self._num_forced = 0
        self._mask_s = 0.0

    def counters(self) -> dict[str, float]:
        return {
            "num_constrained": self._num_constrained,
            "num_forced": self._num_forced,
            "mask_s": self._mask_s,
        }

    def begin(self, sequences: Iterable[Sequence]) -> None:
        if self._grammars is None:
            return
        for sequence in sequences:
            request = sequence.request
            if not request.awaits_tokens or sequence.phase is Phase.FINISHED:
                continue
            self._num_constrained += sequence.sample_index == 0
            followed = _Followed(sequence, self._grammars.matcher(request))
            self._matched[sequence.key] = followed
            self._go_on(followed)
            self._drop_if_ended(followed)
        if len(self._matched) > self._most_matched:
            for followed in list(self._matched.values()):
                self._drop_if_ended(followed)
            self._most_matched = max(2 * len(self._matched), _LEAST_LOOKED_AT)

    def masked(self, plan: StepPlan) -> StepPlan:
        """Return the plan with masks for its rows that need one; their computation begins."""
        if not self._matched or self._grammars is None:
            return plan
        rows, matchers = [], []
        for index, row in enumerate(plan.rows):
            followed = self._matched.get(row.sequence_key) if row.samples else None
            if followed is not None and followed.sequence.awaits_tokens:
                matcher = followed.matcher
                matcher.follow(followed.sequence.output)  # its answer may have restarted
                if not row.proposed:
                    matcher.propose((), 0, forces=False)
                rows += [index] * (1 + len(row.proposed))
                matchers.append(matcher)
        if not rows:
            return plan
        return replace(plan, masks=self._grammars.masks(tuple(rows), matchers))

    def take_in(self, plan: StepPlan, news: Seq[Progress]) -> None:
        """Follow the tokens of a step with masks, which end sequences or force tokens."""
        assert plan.masks is not None, "a step without masks"
        plan.masks.words()  # their threads use the matchers until then
        proposed = {row.sequence_key: len(row.proposed) for row in plan.rows if row.proposed}
        for each in news:
            followed = self._matched.get(each.sequence.key)
            if followed is None:
                continue
            if each.num_new and each.sequence.awaits_tokens:
                num = proposed.get(each.sequence.key, 0)
                if num:
                    self._scheduler.speculation.take_in_suggested(num, each.num_new - 1)
                if followed.lookup is not None:
                    followed.lookup.learn(each.sequence.output, each.num_new, num)
                self._follow(followed, each.num_new)
            self._count(followed)
            self._drop_if_ended(followed)

    def _follow(self, followed: _Followed, num_new: int) -> None:
        sequence, matcher = followed.sequence, followed.matcher
        num_before = len(sequence.output) - num_new
        if matcher.error is not None:  # the last token had no mask
            self._scheduler.stop_at(sequence, num_before, matcher.error)
        elif sequence.finish_reason in (None, "length"):  # a complete answer ends with "stop"
            matcher.follow(sequence.output)
            self._go_on(followed)

    def _go_on(self, followed: _Followed) -> None:
        """Append forced tokens, and end the sequence if nothing can follow."""
        sequence, matcher = followed.sequence, followed.matcher
        num_known = len(sequence.output)
        if sequence.request.params.logprobs is None and not matcher.is_complete:
            self._scheduler.extend(sequence, matcher.forced())
            self._num_forced += len(sequence.output) - num_known
            matcher.follow(sequence.output)
        if matcher.error is not None:
            self._scheduler.stop_at(sequence, len(sequence.output), matcher.error)
        elif matcher.is_complete:
            self._scheduler.stop_at(sequence, len(sequence.output))
        elif matcher.is_over and len(sequence.output) == num_known:  # the newest has no KV yet
            self._scheduler.release(sequence)
        else:
            self._propose(followed)

    def _propose(self, followed: _Followed) -> None:
        scheduler, sequence = self._scheduler, followed.sequence
        scheduler.speculation.suggest(sequence, ())
        if sequence.phase is not Phase.RUNNING or not sequence.output:
            return
        most = min(self._share(sequence), sequence.num_outputs_left - 1)
        if most < 1:
            return
        if followed.lookup is None:
            followed.lookup = HostLookup(sequence.request.prompt)
        lookup = followed.lookup
        lookup.follow(sequence.output)
        forces = sequence.request.params.logprobs is None
        found = followed.matcher.propose(lookup.propose(most), most, forces=forces)
        scheduler.speculation.suggest(sequence, found)

    def _share(self, sequence: Sequence) -> int:
        """Return a running sequence's even share of a step's proposals."""
        running, config = self._scheduler.running, self._scheduler.config
        most = min(config.num_proposed_beside(len(running)), config.max_slots - len(running))
        if most < 1 or not config.proposes_on_host:  # with many sequences, or without speculation
            return 0
        keys = [each.key for each in running if each.key in self._matched and each.awaits_tokens]
        share, num_left = divmod(most, len(keys))
        return share + (keys.index(sequence.key) < num_left)

    def _count(self, followed: _Followed) -> None:
        mask_s = followed.matcher.mask_s
        self._mask_s += mask_s - followed.counted_s
        followed.counted_s = mask_s

    def _drop_if_ended(self, followed: _Followed) -> None:
        key = followed.sequence.key
        if followed.sequence.phase is Phase.FINISHED and key in self._matched:
            self._count(followed)
            del self._matched[key]
            self._scheduler.speculation.forget(key)
