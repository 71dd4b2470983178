"""Batches of prompts: their parameters, and waiting for their answers."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from tqdm import tqdm

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class Awaited(Protocol):
    """What has a completion to come."""

    future: Future[Completion]


def only(params: Params) -> SamplingParams:
    """The parameters of a single prompt."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if len(params) == 1:
        return params[0]
    raise InvalidConfigError(f"{len(params)} SamplingParams for one prompt; give one")


def for_each(params: Params, count: int) -> Sequence[SamplingParams]:
    """The parameters of each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidConfigError(
            f"{len(params)} SamplingParams for {count} prompts; give one for all, or one each"
        )
    return params


def wait(answers: Sequence[Awaited], *, progress: bool) -> None:
    """Until every answer is there; Ctrl-C gets through."""
    done: queue.SimpleQueue[Future[Completion]] = queue.SimpleQueue()
    for answer in answers:
        answer.future.add_done_callback(done.put)
    num_waiting, num_tokens = len(answers), 0
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
                completion = done.get(timeout=0.5).result()
                num_waiting -= 1
                num_tokens += sum(len(s.token_ids) for s in completion.samples)
            elapsed = bar.format_dict["elapsed"] or 1.0
            bar.set_postfix_str(f"{num_tokens / elapsed:.0f} tokens/s", refresh=False)
            bar.update(len(answers) - num_waiting - bar.n)
