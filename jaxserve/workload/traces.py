"""Public traces as workloads: a part of a trace, and its replay.

The formats are in `jaxserve.workload.trace_formats`. The prompts of most are not published, so a
replay makes tokens up: equal blocks, and the history of a session, get equal tokens, and nothing
else does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import final

import numpy as np
from tqdm import tqdm

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.workload import sharegpt
from jaxserve.workload.items import WorkloadItem, arrival_times
from jaxserve.workload.synthetic import SYNTHETIC
from jaxserve.workload.trace_formats import ReadOptions, TraceRequest, reader_of

# Requests of a synthetic trace that are drawn for each that is wanted, if most do not fit.
_MOST_DRAWN = 100


def no_tokenizer() -> sharegpt.TextEncoder:
    raise InvalidConfigError("this trace has texts; pass a tokenizer that counts their tokens")


@final
@dataclass(frozen=True)
class Trace:
    """A part of a trace.

    Attributes:
      format: what its reader is called.
      requests: in order of arrival; the first arrives at 0. They have at least one prompt token.
      num_empty: requests left out because they have no prompt token: failures of BurstGPT.
      num_too_long: requests left out because they are longer than the context.
    """

    format: str
    requests: tuple[TraceRequest, ...]
    num_empty: int = 0
    num_too_long: int = 0

    @property
    def has_times(self) -> bool:
        return any(request.arrival_s is not None for request in self.requests)

    @property
    def num_without_answer(self) -> int:
        """Requests with 0 output tokens, whose replay computes the prompt and one token."""
        return sum(request.num_output_tokens == 0 for request in self.requests)

    def part(self, index: int, num: int) -> Trace:
        """Return the `num` requests after `index` times as many; the first arrives at 0.

        Raises:
          InvalidConfigError: the trace has fewer.
        """
        found = self.requests[index * num : (index + 1) * num]
        if len(found) < num or num < 1:
            raise InvalidConfigError(
                f"{len(self.requests)} requests have no part {index} of {num}; pass a longer "
                "trace, or smaller parts"
            )
        return replace(self, requests=_from_zero(found))

    def at_load(self, load: float) -> Trace:
        """Return the requests with all times divided by `load`; bursts keep their form."""
        return replace(
            self,
            requests=tuple(
                each if each.arrival_s is None else replace(each, arrival_s=each.arrival_s / load)
                for each in self.requests
            ),
        )

    def with_arrivals(self, pattern: str, seed: int) -> Trace:
        """Return the requests with other arrivals; see `jaxserve.workload.items.with_arrivals`."""
        times = arrival_times(len(self.requests), pattern, seed)
        return replace(
            self,
            requests=tuple(
                replace(each, arrival_s=time)
                for each, time in zip(self.requests, times, strict=True)
            ),
        )


def read_trace(
    path: str | Path,
    *,
    num: int | None = None,
    start_s: float = 0.0,
    max_context: int | None = None,
    tokenizer: Callable[[], sharegpt.TextEncoder] = no_tokenizer,
    seed: int = 0,
    progress: bool = True,
) -> Trace:
    """Read a part of a public trace, whose format is recognised, or draw a synthetic one.

    Args:
      path: a file, a folder of ServeGen's clients, or a name in `SYNTHETIC`.
      num: most requests to return; None for all, which a synthetic trace does not have.
      start_s: seconds after the trace's first request at which the part begins.
      max_context: requests with more tokens, prompt and answer, are left out.
      tokenizer: makes the tokenizer for traces with texts; not called for others.
      seed: of what ServeGen's clients and synthetic traces draw.

    Raises:
      InvalidConfigError: the trace cannot be read, has no known format or no such part, or a line
        is malformed; the message names it.
    """
    path = Path(path)
    draw = None if path.exists() else SYNTHETIC.get(str(path))
    if draw is None:
        reader = reader_of(path)
        form, read = reader.name, reader.read(path, ReadOptions(tokenizer=tokenizer, seed=seed))
    elif num is None:
        raise InvalidConfigError(f"num=None is not allowed for {path}, which has no end; pass num")
    else:
        drawn = draw(np.random.default_rng(seed))
        form, read = "synthetic", islice(drawn, _MOST_DRAWN * num)
    left_out: Counter[str] = Counter()
    try:
        bar = tqdm(read, desc="reading", unit="request", delay=2, leave=False, disable=not progress)
        with bar:
            found = list(islice(_fitting(_from(bar, start_s), max_context, left_out), num))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(
            f"the trace {path} cannot be read: {error}; pass another file"
        ) from error
    if not found:
        raise InvalidConfigError(
            f"the trace {path} has no request from second {start_s:g} on that fits "
            f"({left_out.total()} do not); pass an earlier start, or more context"
        )
    return Trace(form, _from_zero(found), left_out["empty"], left_out["too long"])


def _from(requests: Iterable[TraceRequest], start_s: float) -> Iterator[TraceRequest]:
    first_s = None
    for request in requests:
        if request.arrival_s is not None:
            first_s = request.arrival_s if first_s is None else first_s
            if request.arrival_s < first_s + start_s:
                continue
        yield request


def _fitting(
    requests: Iterable[TraceRequest], max_context: int | None, left_out: Counter[str]
) -> Iterator[TraceRequest]:
    """Yield the requests that can be served, and count the others."""
    for request in requests:
        length = request.num_prompt_tokens + max(1, request.num_output_tokens)
        if not request.num_prompt_tokens:
            left_out["empty"] += 1
        elif max_context is not None and length > max_context:
            left_out["too long"] += 1
        else:
            yield request


def _from_zero(requests: Seq[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Return the requests in order of arrival, the first at 0."""
    in_order = sorted(requests, key=lambda request: request.arrival_s or 0.0)
    first_s = in_order[0].arrival_s if in_order else None
    if first_s is None:
        return tuple(in_order)
    return tuple(replace(each, arrival_s=(each.arrival_s or 0.0) - first_s) for each in in_order)


@final
class Replay:
    """A trace as a workload: the requests of no session or first in one, and what follows them.

    A later turn of a session arrives at its time, or when the turn before it has its answer. Its
    prompt is that turn's prompt, answer, and new tokens, if it is long enough for them; otherwise
    it shares nothing. A request with no answer in the trace gets one token. An object keeps the
    state of its sessions, so it serves one run.

    Args:
      max_tokens: the limit of every answer that policies know; None for the context's end.
      vocab_size: made-up token ids are below it.

    Attributes:
      items: the first requests, for `simulate` or `measure`, with `follow_up`.
      numbers: for each request in the order in which it was handed out, its place in the trace.
    """

    def __init__(self, trace: Trace, *, max_tokens: int | None, vocab_size: int):
        self._requests = trace.requests
        self._max_tokens, self._vocab_size = max_tokens, vocab_size
        self._next: dict[int, int] = {}  # turn -> the session's next turn
        first, last = [], dict[str, int]()
        for number, request in enumerate(self._requests):
            if request.session and request.session in last:
                self._next[last[request.session]] = number
            else:
                first.append(number)
            if request.session:
                last[request.session] = number
        self.numbers = first
        self.items = [self._item(number, self._prompt(number)) for number in first]

    def follow_up(self, index: int, completion: Completion, ended_s: float) -> WorkloadItem | None:
        """Return the next turn of a session; a session ends with an answer that fails."""
        number = self._next.get(self.numbers[index])
        if number is None or completion.error is not None:
            return None
        self.numbers.append(number)
        history = completion.prompt_token_ids + completion.token_ids
        num_new = self._requests[number].num_prompt_tokens - len(history)
        prompt = self._prompt(number) if num_new < 1 else history + self._made_up(number, num_new)
        item = self._item(number, prompt)
        return replace(item, arrival_s=max(ended_s, item.arrival_s))

    def _item(self, number: int, prompt: tuple[int, ...]) -> WorkloadItem:
        request = self._requests[number]
        num_output = max(1, request.num_output_tokens)
        limit = None if self._max_tokens is None else max(self._max_tokens, num_output)
        return WorkloadItem(
            prompt_token_ids=prompt,
            num_output_tokens=num_output,
            max_tokens=limit,
            arrival_s=request.arrival_s or 0.0,
            sampling=SamplingParams(tenant=request.tenant or None),
            conversation_id=request.session or None,
        )

    def _prompt(self, number: int) -> tuple[int, ...]:
        request = self._requests[number]
        if request.prompt is not None:
            return tuple(token % self._vocab_size for token in request.prompt)
        if not request.blocks:
            return self._made_up(number, request.num_prompt_tokens)
        size, tokens = request.block_tokens, list[int]()
        for block in request.blocks:
            tokens += self._repeated(len(self._requests) + block, size)
        return tuple(tokens[: request.num_prompt_tokens])

    def _made_up(self, number: int, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._repeated(number, num_tokens))

    def _repeated(self, id: int, num_tokens: int) -> list[int]:
        """Return tokens that are equal for equal ids alone: two digits, repeated.

        Drawn tokens would take ten times the memory, and no policy sees their values.
        """
        pair = [id // self._vocab_size % self._vocab_size, id % self._vocab_size]
        return (pair * (num_tokens // 2 + 1))[:num_tokens]


def length_shares(trace: Trace) -> np.ndarray:
    """Return the shares of answers of 1, 2, ... tokens, with a small share of each length."""
    lengths = [max(1, request.num_output_tokens) for request in trace.requests]
    counts = np.bincount(lengths)[1:] + 1.0 / len(lengths)
    return counts / counts.sum()
