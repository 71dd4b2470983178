"""Running sequences whose pages come from the host, over several plans if they are many."""

from __future__ import annotations

from typing import final

from jaxserve.memory.page_cache import PageCache
from jaxserve.scheduling.plan import PageCopies
from jaxserve.scheduling.sequence import Sequence


@final
class Restoring:
    """Takes the copies from the host, a limited number with each plan.

    The other sequences of a step wait for its copies: 128k tokens of an 8B model are 16 GiB. So a
    sequence with more than one plan copies runs, with all of its pages, and computes nothing before
    the last of them has come.
    """

    def __init__(self, cache: PageCache):
        self._cache = cache
        self._sequences: list[Sequence] = []
        self._takes_all = False

    def __bool__(self) -> bool:
        """Whether some sequence awaits its pages."""
        return any(sequence.kv.awaits is not None for sequence in self._sequences)

    def begin(self, sequence: Sequence, most: int | None) -> None:
        """Have a sequence that was given its pages await them, where some plan cannot copy all.

        Args:
          most: copies of a plan; None where no other sequence waits for them.
        """
        incoming = self._cache.incoming
        if most is None:
            self._takes_all = len(incoming) > 0
        elif len(incoming) > most:
            sequence.kv.awaits = self._cache.last_incoming(sequence.kv.table.pages)
            self._sequences.append(sequence)

    def copies(self, most: int) -> PageCopies:
        """Return the (host page, device page) of the next plan, if need be no more than `most`."""
        incoming = self._cache.incoming
        copies = incoming.take(None if self._takes_all else most)
        self._takes_all = False
        for sequence in self._sequences:
            awaited = sequence.kv.awaits
            if awaited is not None and awaited.device_page not in incoming:
                sequence.kv.awaits = None
        self._sequences = [each for each in self._sequences if each.kv.awaits is not None]
        return copies
