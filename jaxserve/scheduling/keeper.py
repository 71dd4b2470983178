"""What sequences leave in the cache when they go, and find there when they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import final

from jaxserve.core.config import EngineConfig
from jaxserve.memory.chunks import Branch, Chunk, PageKeys
from jaxserve.memory.eviction import RecomputeCost
from jaxserve.memory.page_cache import PageCache, Tier
from jaxserve.memory.prefetch import Prefetch
from jaxserve.memory.retrieval import Retrieval
from jaxserve.scheduling.plan import PageCopies
from jaxserve.scheduling.policy import Retention
from jaxserve.scheduling.sequence import Phase, Sequence
from jaxserve.scheduling.supervisor import SwapCosts
from jaxserve.scheduling.waiting_pool import num_shareable

# Where nothing was measured: attending to so many positions is as much work as the rest of a token.
_POSITIONS_A_TOKEN = 4096


@final
class Keeper:
    """Matches sequences with the page cache, by their tokens.

    Args:
      costs: None where they were not measured: then every copy is taken to be worth it.

    Attributes:
      retrieval: of what waiting sequences have on the disk alone.
      prefetch: of what they have on the host.
      free_share: see `Retention`.
      num_sought: tokens of admitted sequences that the cache could have had.
      num_found: those that it had.
      num_found_on_host, num_found_on_disk: of these the ones that came from there.
      num_lost: those that it had given up not long before.
    """

    def __init__(
        self,
        config: EngineConfig,
        retention: Retention,
        now: Callable[[], float],
        costs: SwapCosts | None,
    ):
        self.cache = PageCache(
            config.num_pages,
            config.num_host_pages if retention.uses_host else 0,
            config.page_size,
            retention.eviction,
            _chunk_cost(config, costs),
            now,
            0.0 if costs is None else costs.page_s,
        )
        self.retrieval = Retrieval(self.cache, now)
        self.prefetch = Prefetch(self.cache)
        self.num_sought = 0
        self.num_found = 0
        self.num_found_on_host = 0
        self.num_found_on_disk = 0
        self.num_lost = 0
        self._page_size = config.page_size
        self._keeps = retention.keeps_pages
        self.free_share = retention.free_share
        self._now = now

    def residency(self, tokens: Seq[int]) -> list[Tier]:
        """Where each full page of a context lies."""
        keys = PageKeys().of(tokens, self._page_size, self.cache.identity)
        return [self.cache.where(key) for key in keys]

    # ---- sequences that come ----

    def num_shared(self, sequence: Sequence) -> int:
        """Pages of a waiting sequence that others own already."""
        if not self._keeps:
            return len(self._leaders_pages(sequence))
        refcount = self.cache.pool.refcount
        return sum(c.page is not None and refcount(c.page) > 0 for c in self._find(sequence))

    def awaits_disk(self, sequence: Sequence) -> bool:
        """Whether pages of a waiting sequence are still to come from the disk; asks for them."""
        if self.cache.disk is None or not self._keeps or sequence.wants_prompt_logprobs:
            return False
        return self.retrieval.awaits(sequence.key, self._keys_to_find(sequence))

    def bring_ahead(self, waiting: Iterable[Sequence]) -> None:
        """Have the next plan bring pages of waiting sequences from the host; it is complete else.

        Their conversations are active, so their pages are worth more than those of any other.

        Args:
          waiting: in the order in which they will begin.
        """
        host = self.cache.host
        if host.num_free == host.num_pages:
            return
        awaited: dict[Chunk, Sequence] = {}
        for sequence in waiting:
            chunks = self._find(sequence)
            if any(chunk.page is None for chunk in chunks):
                self._go_on(chunks)
            for chunk in chunks:
                awaited.setdefault(chunk, sequence)
        for chunk in self.prefetch.bring(list(awaited)):
            awaited[chunk].prefetched.add(chunk.index)

    def begin(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Reserve `num_tokens` tokens for a sequence, beginning with what is known of them.

        Returns:
          (index, page) of the pages it begins with; None where the pool has too few.
        """
        loaded = self.retrieval.release(sequence.key)
        chunks = self._find(sequence)
        shared = {c.index: c.page for c in chunks if c.page is not None}
        if not self._keeps:
            shared = self._leaders_pages(sequence)
        num_pages = 1 + max([*shared, *(chunk.index for chunk in chunks)], default=-1)
        if not sequence.table.begin(num_tokens, shared, num_pages):
            return None
        pages = sequence.table.pages
        found = set(shared)
        came = found & sequence.prefetched
        for chunk in chunks:
            # Not those that were given up just now, for the pages to begin with.
            if chunk.page is None and chunk.host_page is not None:
                self.cache.restore(chunk, pages[chunk.index])
                found.add(chunk.index)
                came.add(chunk.index)
        sequence.prefetched.clear()
        sequence.begin_with(found, self._page_size)
        if self._keeps:
            self.num_found_on_disk += len(came & loaded) * self._page_size
            self._count(sequence, len(found), len(came - loaded))
            sequence.branch = self._go_on(chunks)
            sequence.branch.is_running = True
        return list(enumerate(pages))

    def _find(self, sequence: Sequence) -> list[Chunk]:
        if not self._keeps or sequence.wants_prompt_logprobs:
            return []
        return self.cache.find(self._keys_to_find(sequence))

    def _keys_to_find(self, sequence: Sequence) -> Seq[bytes]:
        """The newest token is computed in any case: what follows it depends on that."""
        return self._keys(sequence)[: (sequence.num_known - 1) // self._page_size]

    def _leaders_pages(self, sequence: Sequence) -> dict[int, int]:
        leader = sequence.leader
        if leader is None or leader.phase is not Phase.RUNNING:
            return {}
        return dict(enumerate(leader.table.pages[: num_shareable(sequence, self._page_size)]))

    def _count(self, sequence: Sequence, num_found: int, num_on_host: int) -> None:
        keys = self._keys_to_find(sequence)
        self.num_sought += len(keys) * self._page_size
        self.num_found += num_found * self._page_size
        self.num_found_on_host += num_on_host * self._page_size
        self.num_lost += self.cache.num_lost(keys) * self._page_size

    def _go_on(self, chunks: Seq[Chunk]) -> Branch:
        """The conversation whose tip is the last of the chunks, or a new one, active now."""
        last = chunks[-1] if chunks else None
        branches = [] if last is None else last.branches
        going_on = [each for each in branches if each.tip is last and not each.is_running]
        branch = going_on[-1] if going_on else Branch(self._now())
        branch.last_active_s = self._now()
        for chunk in chunks:
            chunk.join(branch)
            branch.tip = chunk
        return branch

    # ---- while they run ----

    def computed(self, sequence: Sequence) -> None:
        """The KV of more tokens is planned: full pages of the prompt can be found from here on."""
        if self._keeps:
            self._add(sequence, min(sequence.num_computed, sequence.prompt_length))

    def _add(self, sequence: Sequence, num_tokens: int) -> None:
        count = num_tokens // self._page_size
        if count <= sequence.num_kept:
            return
        keys = self._keys(sequence)
        for index in range(sequence.num_kept, count):
            self._add_page(sequence, index, keys[index])
        sequence.num_kept = count

    def _add_page(self, sequence: Sequence, index: int, key: bytes | None) -> Chunk:
        assert sequence.branch is not None
        page = sequence.table.pages[index]
        chunk = self.cache.at(page) or self.cache.add(page, index, key, sequence.branch)
        if key is not None:
            sequence.branch.tip = chunk
        return chunk

    # ---- sequences that go ----

    def leave(self, sequence: Sequence) -> None:
        """Before the table of a sequence is closed: keep its full pages.

        Those whose tokens are in flight are kept without a name, until `read`.
        """
        if not self._keeps or not sequence.table.num_pages:
            return
        # The newest token has no KV unless it was computed as a part of the prompt.
        known = max(sequence.prompt_length, sequence.num_known - 1)
        self._add(sequence, min(sequence.num_computed, known))
        if sequence.num_in_flight and sequence.phase is not Phase.FINISHED:
            full = sequence.num_computed // self._page_size
            unnamed = range(sequence.num_kept, full)
            sequence.unnamed += [self._add_page(sequence, i, None) for i in unnamed]
        assert sequence.branch is not None
        sequence.branch.is_running = False
        sequence.branch.last_active_s = self._now()
        for page in sequence.table.pages:
            chunk = self.cache.at(page)
            if chunk is not None:
                chunk.join(sequence.branch)
        sequence.num_kept = 0

    def read(self, sequence: Sequence) -> None:
        """No more tokens of it are in flight: name what it left, as far as it is right."""
        for chunk in sequence.unnamed:
            if (chunk.index + 1) * self._page_size < sequence.num_known:
                self.cache.name(chunk, self._keys(sequence)[chunk.index])
            else:
                self.cache.forget(chunk)
        sequence.unnamed.clear()

    def forget(self, sequence: Sequence) -> None:
        """Give up what it has or left, but for what others own too: its KV is not right."""
        for chunk in sequence.unnamed:
            self.cache.forget(chunk)
        sequence.unnamed.clear()
        for page in sequence.table.pages:
            chunk = self.cache.at(page)
            if chunk is not None and self.cache.pool.refcount(page) == 1:
                self.cache.forget(chunk)
        if sequence.branch is not None:
            sequence.branch.is_running = False
        sequence.num_kept = 0

    # ---- copies of the next plan ----

    def copies_out(self) -> PageCopies:
        """(device page, host page)."""
        return self.cache.copies_out(free_share=self.free_share)

    def copies_in(self) -> PageCopies:
        """(host page, device page), to be made after `copies_out`."""
        return self.cache.copies_in()

    def _keys(self, sequence: Sequence) -> Seq[bytes]:
        return sequence.keys.of(sequence.known_tokens, self._page_size, self.cache.identity)


def _chunk_cost(config: EngineConfig, costs: SwapCosts | None) -> RecomputeCost:
    token_s = 1.0 if costs is None else costs.token_s
    position_s = token_s / _POSITIONS_A_TOKEN if costs is None else costs.position_s
    return RecomputeCost.analytic(
        attention=config.page_size * position_s,
        other=config.page_size * token_s,
        longest=config.max_context,
    )
