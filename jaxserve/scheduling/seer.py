"""Seer: the lengths of a group's finished samples tell how long the others will be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from jaxserve.scheduling.lengths import LengthTracker
from jaxserve.scheduling.policy import QueueView, ServiceOrder
from jaxserve.scheduling.sequence import Phase, Sequence


@final
@dataclass(frozen=True)
class SiblingLengths(ServiceOrder):
    """Seer's context-aware scheduling (Qin et al., arXiv:2511.14617, "context-aware scheduling").

    The samples of a request are a group, and their lengths are alike. The first sample of each
    group goes before all others, the one with the fewest tokens first, so that the length of each
    group is known early. The rest follow by the expected length of their group, the longest first,
    so that no long answer is left for the end. It is the longest of the samples that have ended,
    and the limit of the length before one has.

    Assumed, since only the abstract and summaries of the paper could be read: the order is one of
    tokens and arrival, in which a token is a head start of `ageing_s`, so that nothing starves and
    requests that arrive together are ordered as in the paper. A request with one sample is a group
    of which nothing is known. Left out are rollouts that are cut into chunks and moved between
    machines, and the speculation from siblings' tokens.
    """

    ageing_s: float = 0.1

    def new_state(self) -> SampleGroups:
        return SampleGroups(self.ageing_s)


@final
@dataclass(eq=False, slots=True)
class _Group:
    """The live samples of a request, and the longest length of those that have ended."""

    num_live: int = 0
    longest: int = 0


@final
@dataclass(eq=False)
class SampleGroups:
    """The groups of one scheduler."""

    _ageing_s: float
    _groups: dict[str, _Group] = field(default_factory=dict)
    # Planned tokens of each live sequence at the last update.
    _had: dict[Sequence, int] = field(default_factory=dict)

    def expected(self, sequence: Sequence) -> int:
        """Return the expected length of a sample's answer: the longest of its siblings, if any."""
        limit = sequence.max_length - sequence.prompt_length
        return min(self._groups[sequence.request.id].longest or limit, limit)

    def key(self, sequence: Sequence, lengths: LengthTracker) -> tuple[float, float, int]:
        if sequence not in self._had:
            self._had[sequence] = 0
            self._groups.setdefault(sequence.request.id, _Group()).num_live += 1
        arrival_s, head_start = sequence.request.arrival_s, self.expected(sequence)
        if _tells_length(sequence):
            limit = sequence.max_length - sequence.prompt_length
            head_start = 2 * limit - sequence.num_planned_outputs
        return arrival_s - self._ageing_s * head_start, arrival_s, sequence.key

    def update(self, queue: QueueView) -> bool:
        has_changed = False
        for sequence, had in list(self._had.items()):
            group = self._groups[sequence.request.id]
            if sequence.phase is Phase.FINISHED:
                has_changed = has_changed or len(sequence.output) > group.longest
                group.longest = max(group.longest, len(sequence.output))
                group.num_live -= 1
                del self._had[sequence]
                if not group.num_live:
                    del self._groups[sequence.request.id]
            elif sequence.num_planned_outputs != had:
                self._had[sequence] = sequence.num_planned_outputs
                has_changed = has_changed or _tells_length(sequence)
        return has_changed


def _tells_length(sequence: Sequence) -> bool:
    return sequence.sample_index == 0 and sequence.request.params.n > 1
