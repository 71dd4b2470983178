"""Handles of submitted requests, alone and in batches, and functions that wait for them."""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from tqdm import tqdm

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.requests import as_batch

Params = SamplingParams | Sequence[SamplingParams] | None


@final
class Pending:
    """A submitted request.

    Attributes:
      future: future of the completion; a failed request has a completion with an error.
    """

    def __init__(self, request_id: str, future: Future[Completion], cancel: Callable[[str], None]):
        self.request_id = request_id
        self.future = future
        self._cancel = cancel

    @classmethod
    def ended(cls, completion: Completion) -> Pending:
        """Return the handle of a request that has already ended."""
        future: Future[Completion] = Future()
        future.set_result(completion)
        return cls(completion.request_id, future, lambda _: None)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion, and return it.

        Raises:
          TimeoutError: the request has not ended after `timeout_s` seconds; it continues.
        """
        return self.future.result(timeout_s)

    async def aresult(self) -> Completion:
        """`result` for asyncio. The request continues if the waiting task is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.future))

    def cancel(self) -> None:
        """End the request; `result` then returns the tokens generated so far."""
        self._cancel(self.request_id)


@final
@dataclass(frozen=True)
class Batch:
    """The prompts of one call.

    Attributes:
      params: parameters of each prompt.
      is_single: whether the user passed one prompt instead of a list, and gets one completion.
    """

    prompts: Sequence[Any]
    params: Sequence[SamplingParams]
    is_single: bool

    @classmethod
    def of(cls, prompts: Any, params: Params) -> Batch:
        """Return the batch of one or several prompts, with parameters for all of them or for each.

        Raises:
          InvalidRequestError: `prompts` is neither a prompt nor an iterable of prompts.
          InvalidConfigError: the numbers of parameters and of prompts differ.
        """
        batch, is_single = as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            return cls(batch, [params or SamplingParams()] * len(batch), is_single)
        if len(params) != len(batch):
            raise InvalidConfigError(
                f"{len(params)} SamplingParams for {len(batch)} prompts; pass one for all, or one "
                "each"
            )
        return cls(batch, params, is_single)

    def wait(self, pending: Sequence[Pending], *, progress: bool) -> Completion | list[Completion]:
        """Wait for the prompts' requests, and return their completions.

        Ctrl-C cancels the requests and returns their completions with the tokens so far.

        Args:
          progress: show a bar when it takes over two seconds.

        Raises:
          JaxserveError: the error of a single prompt.
        """
        try:
            wait(pending, progress=progress)
        except KeyboardInterrupt:
            for one in pending:
                one.cancel()
            wait(pending, progress=False)
        return self._results(pending)

    async def await_(self, pending: Sequence[Pending]) -> Completion | list[Completion]:
        """`wait` for asyncio. Cancelling the waiting task cancels the requests."""
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
    """Wait until every request has ended. Ctrl-C interrupts only the wait.

    Raises:
      TimeoutError: a request has not ended after `timeout_s` seconds; all of them continue.
    """
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
            with suppress(queue.Empty):  # the timeout lets Ctrl-C interrupt and updates the bar
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                completion = done.get(timeout=min(0.5, left_s)).result()
                num_waiting -= 1
                num_tokens += sum(len(s.token_ids) for s in completion.samples)
            elapsed = bar.format_dict["elapsed"] or 1.0
            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)
            bar.update(len(pending) - num_waiting - bar.n)
