"""Pages that the device keeps between two turns of a conversation, for its next turn alone."""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, final

from jaxserve.core.request import Request
from jaxserve.memory.cached_page import Branch, CachedPage
from jaxserve.scheduling.policy import Holding
from jaxserve.scheduling.sequence import Sequence

# The newest pauses, waits for an admission and ended turns that count.
_NUM_PAUSES, _NUM_WAITS, _NUM_ENDED = 1_000, 100, 10_000


class _Hold(NamedTuple):
    """A held conversation; `first` is its first page that no other conversation has."""

    branch: Branch
    until_s: float
    num_pages: int
    first: CachedPage


@final
class Holds:
    """Holds the pages of conversations whose next turn is expected soon.

    A hold begins with the end of a turn. It ends with the admission of the next turn, after the
    seconds that `holding` gives, or when its pages have left the device. Meanwhile the admission of
    other requests leaves as many pages, and other pages are evicted first. Running answers take
    held pages before one of them is preempted, and so does a request while none runs. Pages that
    several conversations share are not held.
    """

    def __init__(self, holding: Holding, now: Callable[[], float]):
        self._holding = holding
        self._now = now
        self._held: dict[str, _Hold] = {}
        self._ended_s: OrderedDict[str, float] = OrderedDict()
        self._pauses_s: deque[float] = deque(maxlen=_NUM_PAUSES)
        self._waits_s: deque[float] = deque(maxlen=_NUM_WAITS)

    def num_held_for_others(self, sequence: Sequence) -> int:
        """Return the pages that conversations other than the sequence's own hold."""
        now_s, num = self._now(), 0
        for conversation, hold in list(self._held.items()):
            if hold.until_s < now_s or hold.first.device_page is None:
                self._release(conversation)
            elif conversation != sequence.request.conversation_id:
                num += hold.num_pages
        return num

    def arrive(self, request: Request) -> None:
        """Learn the pause before a request."""
        ended_s = self._ended_s.pop(request.conversation_id or "", None)
        if ended_s is not None:
            self._pauses_s.append(self._now() - ended_s)

    def begin(self, sequence: Sequence) -> None:
        """Record the admission of a sequence, to which its conversation's pages belong again."""
        if not sequence.num_preemptions:
            self._waits_s.append(self._now() - sequence.request.arrival_s)
        self._release(sequence.request.conversation_id or "")

    def end(self, sequence: Sequence, branch: Branch, pages: Seq[CachedPage]) -> None:
        """Hold the pages of a sequence that has ended, if it is a turn of a conversation."""
        conversation = sequence.request.conversation_id
        if conversation is None:
            return
        self._release(conversation)
        self._ended_s[conversation] = self._now()
        if len(self._ended_s) > _NUM_ENDED:
            self._ended_s.popitem(last=False)
        own = [page for page in pages if len(page.branches) == 1]
        if not own:
            return
        saved_s = self._holding.token_s * sequence.kv.num_computed
        saved_s += statistics.fmean(self._waits_s) if self._waits_s else 0.0
        hold_s = self._holding.hold_s(self._pauses_s, saved_s)
        if hold_s > 0.0:
            branch.hold(is_held=True)
            self._held[conversation] = _Hold(branch, self._now() + hold_s, len(own), own[0])

    def _release(self, conversation: str) -> None:
        hold = self._held.pop(conversation, None)
        if hold is not None:
            hold.branch.hold(is_held=False)
