"""Batches of prompts: their parameters, and waiting for their answers."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from tqdm import tqdm

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.requests import as_batch
from jaxserve.runtime.pending import Pending

Params = SamplingParams | Sequence[SamplingParams] | None


@final
@dataclass(frozen=True)
class Batch:
    """What a user handed in at once.

    Attributes:
      params: one for each of the prompts.
      is_single: a prompt rather than a list of them, and so is what comes back.
    """

    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    is_single: bool

    @classmethod
    def of(cls, prompts: Any, params: Params) -> Batch:
        """Of a prompt or several, and parameters for all of them or for each.

        Raises:
          InvalidRequestError: neither a prompt nor an iterable of prompts.
          InvalidConfigError: another number of parameters than of prompts.
        """
        batch, is_single = as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            return cls(batch, [params or SamplingParams()] * len(batch), is_single)
        if len(params) != len(batch):
            raise InvalidConfigError(
                f"{len(params)} SamplingParams for {len(batch)} prompts; give one for all, or one "
                "each"
            )
        return cls(batch, params, is_single)

    def wait(self, pending: Sequence[Pending], *, progress: bool) -> Completion | list[Completion]:
        """The prompts' answers. Ctrl-C ends them as they stand. Raises a single prompt's error."""
        try:
            wait(pending, progress=progress)
        except KeyboardInterrupt:
            for one in pending:
                one.cancel()
            wait(pending, progress=False)
        return self._results(pending)

    async def await_(self, pending: Sequence[Pending]) -> Completion | list[Completion]:
        """`wait` for asyncio; cancelling the task cancels the requests."""
        try:
            await asyncio.gather(*(one.aresult() for one in pending))
        except asyncio.CancelledError:
            for one in pending:
                one.cancel()
            raise
        return self._results(pending)

    def _results(self, pending: Sequence[Pending]) -> Completion | list[Completion]:
        done = [one.result() for one in pending]
        if not self.is_single:
            return done
        if done[0].error is not None:
            raise done[0].error
        return done[0]


def wait(pending: Sequence[Pending], *, progress: bool, timeout_s: float | None = None) -> None:
    """Until every answer is there, or TimeoutError; Ctrl-C gets through."""
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    done: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()
    for one in pending:
        one.future.add_done_callback(done.put)
    num_waiting, num_tokens = len(pending), 0
    with tqdm(
        total=num_waiting,
        desc="generating",
        unit="req",
        leave=False,
        delay=2,
        miniters=0,
        disable=not progress,
    ) as bar:
        while num_waiting:
            with suppress(queue.Empty):  # the time-out lets Ctrl-C through and the bar tick
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                completion = done.get(timeout=min(0.5, left_s)).result()
                num_waiting -= 1
                num_tokens += sum(len(s.token_ids) for s in completion.samples)
            elapsed = bar.format_dict["elapsed"] or 1.0
            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)
            bar.update(len(pending) - num_waiting - bar.n)
