"""Prompts that a server has not seen, whatever it remembers of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from jaxserve.workload import WorkloadItem

# Leading tokens of a prompt that are replaced. With ten tokens in a workload, they tell 10,000
# requests apart.
_NUM_REPLACED = 4


@final
class DistinctPrompts:
    """Gives every request of a benchmark a prompt that begins like no other one.

    A few leading tokens are replaced by the number of the request, in tokens of the workload. So
    prompts keep their length, and no prefix cache saves the work for a prompt that came before.
    Prompts that are shorter than these may come again; caches keep no page of so few tokens.

    Args:
      items: the workload.
    """

    def __init__(self, items: Sequence[WorkloadItem]):
        self._tokens = sorted({token for item in items for token in item.prompt_token_ids})
        self._num_given = 0

    def of(self, items: Sequence[WorkloadItem]) -> list[WorkloadItem]:
        """Return the requests with prompts that were not returned before."""
        return [self._next(item) for item in items]

    def _next(self, item: WorkloadItem) -> WorkloadItem:
        number = self._num_given
        self._num_given += 1
        digits = []
        for _ in item.prompt_token_ids[:_NUM_REPLACED]:
            number, digit = divmod(number, len(self._tokens))
            digits.append(self._tokens[digit])
        rest = item.prompt_token_ids[len(digits) :]
        return replace(item, prompt_token_ids=(*digits, *rest))
