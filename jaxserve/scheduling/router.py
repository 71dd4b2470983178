"""Chooses a request's replica: one rule for replicas in one process and on Ray."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import final

from jaxserve.core.prediction import LengthPrediction
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams


def page_hashes(prompt: Sequence[int] | str, page_size: int) -> list[int]:
    """Return a hash for each whole page of a prompt, of everything up to that page's end.

    Prompts share a hash exactly if they share that prefix, except for collisions. Hashes are valid
    in this process only. The prompt is token ids as a tuple, or a text; `page_size` counts tokens
    or characters.
    """
    hashes, chain = [], 0
    for end in range(page_size, len(prompt) + 1, page_size):
        chain = hash((chain, prompt[end - page_size : end]))
        hashes.append(chain)
    return hashes


def answered_pages(completion: Completion, page_size: int) -> list[list[int]]:
    """Return the page hashes of each sample for the next turn; the last token has no KV."""
    prompt = completion.prompt_token_ids
    return [
        page_hashes((*prompt, *sample.token_ids[:-1]), page_size) for sample in completion.samples
    ]


def predicted_tokens(
    num_prompt_tokens: int,
    params: SamplingParams,
    prediction: LengthPrediction | None = None,
    *,
    max_context: int,
) -> int:
    """Return a request's expected tokens, prompt and all samples: a replica's work for it.

    Without a prediction, the most that it can take.
    """
    room = max(0, max_context - num_prompt_tokens)
    answer = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.pools:
        answer = 0
    if prediction is not None:
        answer = min(answer, prediction.expected_length)
    return num_prompt_tokens + params.n * answer


@final
class Router:
    """Sends a request where its prompt's pages probably are, or else to the least work.

    A replica's cost is its remaining work, in tokens, less `cached_weight` times the tokens of the
    prompt's leading pages that were sent or answered there before. The lowest cost wins; of equals,
    the replica that has seen fewer prompts. So a request whose prefix is new goes to the least
    work, a conversation stays with its pages, and it *spills over* when its replica is ahead of
    another by more than `cached_weight` tokens of work for each token that is cached there. From
    then on both replicas have its pages. Every request is placed at once: none waits.

    The caller says when work has ended. Not thread-safe.

    Args:
      num_replicas: numbered from 0.
      page_size: tokens per page.
      max_pages: the most recently used hashes kept per replica; about 100 bytes each.
      cached_weight: more keeps conversations together, less keeps replicas level. Over 1, because
        `max_tokens` overstates most answers, and because a replica computes earlier answers at the
        same time.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        page_size: int,
        max_pages: int = 1 << 16,
        cached_weight: float = 4.0,
    ):
        self._weight = cached_weight * page_size
        self._max_pages = max_pages
        self._work = [0] * num_replicas
        # Least recently used first.
        self._pages: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]

    @property
    def work(self) -> tuple[int, ...]:
        return tuple(self._work)

    def num_remembered(self, replica: int) -> int:
        """Return the pages that this replica is assumed to hold, at most `max_pages`."""
        return len(self._pages[replica])

    def route(
        self, pages: Sequence[int], work: int, *, among: Collection[int] | None = None
    ) -> int:
        """Return the replica for a request, which counts as placed there from now on.

        Args:
          pages: its prompt's `page_hashes`.
          work: its `predicted_tokens`; pass the same to `finish`.
          among: replicas that can be chosen, at least one; by default all.
        """
        candidates = range(len(self._work)) if among is None else among
        chosen = min(candidates, key=lambda replica: self._key(replica, pages))
        self._work[chosen] += work
        self.remember(chosen, pages)
        return chosen

    def num_cached(self, replica: int, pages: Sequence[int]) -> int:
        held = self._pages[replica]
        return next((i for i, page in enumerate(pages) if page not in held), len(pages))

    def finish(self, replica: int, work: int) -> None:
        self._work[replica] -= work

    def forget(self, replica: int) -> None:
        """Record that `replica` lost its pages and its requests, which need no `finish`."""
        self._work[replica] = 0
        self._pages[replica].clear()

    def remember(self, replica: int, pages: Sequence[int]) -> None:
        """Record that `replica` holds these pages too, such as those of its answer."""
        held = self._pages[replica]
        for page in reversed(pages[: self._max_pages]):  # a prefix without its start is useless
            held[page] = None
            held.move_to_end(page)
        while len(held) > self._max_pages:
            held.popitem(last=False)

    def _key(self, replica: int, pages: Sequence[int]) -> tuple[float, int, int]:
        held = self._pages[replica]
        num_cached = self.num_cached(replica, pages)
        return self._work[replica] - self._weight * num_cached, len(held), replica
