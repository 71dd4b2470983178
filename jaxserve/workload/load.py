"""The load of a measurement: requests that are sent at given times, and when their tokens come.

`replay` sends to a runtime of this process, and `send_all` to a server. The HTTP client is small
because it shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import queue
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar, final
from urllib.parse import urlsplit

from tqdm import tqdm

from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.metrics import PERCENTILES, spread
from jaxserve.core.request import Completion
from jaxserve.workload.conversations import FollowUp
from jaxserve.workload.items import WorkloadItem

_Request = TypeVar("_Request")

# Seconds from the call of `send_all` to the first arrival.
_LEAD_S = 0.1
_READ_BYTES = 1 << 16
_MAX_ERROR_CHARACTERS = 500


class _Pending(Protocol):
    @property
    def future(self) -> Future[Completion]: ...


class TakesItems(Protocol):
    """A runtime, as far as a replay needs it."""

    def submit_items(self, items: Sequence[WorkloadItem], /) -> Sequence[_Pending]:
        """Submit requests that arrive now."""
        ...


def replay(
    service: TakesItems,
    items: Sequence[WorkloadItem],
    *,
    label: str,
    follow_up: FollowUp | None = None,
    progress: bool = True,
) -> tuple[list[Completion], float]:
    """Submit every item when it arrives, and wait for every answer.

    Args:
      follow_up: returns the item to submit after an answer, or None.

    Returns:
      The completions of the items in their order, then those of follow-up items, in the order of
        submission; and the seconds of the whole.
    """
    begin_s = time.perf_counter()
    submitted = list(items)
    arriving = [(item.arrival_s, index) for index, item in enumerate(submitted)]
    heapq.heapify(arriving)
    ended: queue.SimpleQueue[tuple[int, Completion]] = queue.SimpleQueue()
    done: dict[int, Completion] = {}
    with tqdm(
        total=len(submitted), desc=label, unit="req", leave=False, delay=2, disable=not progress
    ) as bar:
        while len(done) < len(submitted):
            now_s = time.perf_counter() - begin_s
            together: list[int] = []
            while arriving and arriving[0][0] <= now_s:
                together.append(heapq.heappop(arriving)[1])
            if together:
                _submit(service, {index: submitted[index] for index in together}, ended)
            try:
                wait_s = max(0.0, arriving[0][0] - now_s) if arriving else None
                index, done_now = ended.get(timeout=wait_s)
            except queue.Empty:
                continue
            done[index] = done_now
            bar.update()
            if follow_up is None:
                continue
            item = follow_up(index, done_now, time.perf_counter() - begin_s)
            if item is not None:
                heapq.heappush(arriving, (item.arrival_s, len(submitted)))
                submitted.append(item)
                bar.total = len(submitted)
    return [done[index] for index in range(len(submitted))], time.perf_counter() - begin_s


def _submit(
    service: TakesItems,
    items: dict[int, WorkloadItem],
    ended: queue.SimpleQueue[tuple[int, Completion]],
) -> None:
    """Submit the items together; each completion goes into `ended` with the index of its item."""
    for index, pending in zip(items, service.submit_items(list(items.values())), strict=True):

        def put(future: Future[Completion], index: int = index) -> None:
            ended.put((index, future.result()))

        pending.future.add_done_callback(put)


@final
@dataclass
class TimedAnswer:
    """When the tokens of one answer arrived, in seconds after the request's start.

    Attributes:
      times_s: of each event that brought tokens.
      num_tokens: by the server's usage; without one, the number of these events.
      end_s: when the answer or its failure was complete; 0 before.
      at_s: the start by `time.perf_counter`: the planned time, or, under a limit of open requests,
        when the request was below it.
      sent_s: when it was sent, in seconds after that.
      request_id: the server's id of the request; "" if it gives none.
      num_prompt_tokens: by the server's usage; None without one.
      error: why there is no whole answer; "" if there is.
    """

    times_s: list[float]
    num_tokens: int
    end_s: float
    at_s: float = 0.0
    sent_s: float = 0.0
    request_id: str = ""
    num_prompt_tokens: int | None = None
    error: str = ""

    def note_sent(self) -> None:
        self.sent_s = time.perf_counter() - self.at_s

    def note_tokens(self, num: int) -> None:
        self.times_s.append(time.perf_counter() - self.at_s)
        self.num_tokens += num

    def note_prompt(self, num_tokens: int | None) -> None:
        self.num_prompt_tokens = num_tokens

    def fail(self, reason: str) -> None:
        self.error = reason[:_MAX_ERROR_CHARACTERS]

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first event; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.num_tokens - 1)


def unanswered(num: int) -> list[TimedAnswer]:
    return [TimedAnswer([], 0, 0.0) for _ in range(num)]


async def send_all(
    send: Callable[[_Request, TimedAnswer], Awaitable[None]],
    requests: Sequence[_Request],
    arrivals_s: Sequence[float],
    answers: Sequence[TimedAnswer],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> None:
    """Send each request at its time, and fill in its answer, also if this is cancelled later.

    Args:
      send: sends a request, and writes to the answer what comes of it.
      arrivals_s: seconds from the beginning, in order.
      max_concurrency: requests that may be open at once; others wait, unsent.
      on_end: called after each request.
    """
    room = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    begun_s = time.perf_counter() + _LEAD_S

    async def send_one(request: _Request, arrival_s: float, answer: TimedAnswer) -> None:
        async with room:
            is_planned = max_concurrency is None
            answer.at_s = begun_s + arrival_s if is_planned else time.perf_counter()
            await send(request, answer)
            answer.end_s = time.perf_counter() - answer.at_s
            on_end()

    async with asyncio.TaskGroup() as group:
        for request, arrival_s, answer in zip(requests, arrivals_s, answers, strict=True):
            wait_s = begun_s + arrival_s - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            group.create_task(send_one(request, arrival_s, answer))


@final
class StreamClient:
    """Sends bodies to an endpoint that streams token ids, or text with its usage at the end.

    Each request has its own connection, whose opening counts as time before the first token.

    Args:
      url: of the endpoint, such as "http://127.0.0.1:8000/v1/completions".
      headers: more headers of each request.

    Raises:
      InvalidConfigError: the URL is not one of HTTP.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None):
        parts = urlsplit(url)
        try:
            is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
            self._port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        except ValueError:  # of the port
            is_http = False
        if not is_http:
            raise InvalidConfigError(
                f"the address {url!r} is not understood; pass http://HOST:PORT or https://HOST"
            )
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        sent = {
            "host": parts.netloc.rpartition("@")[2],
            "connection": "close",
            "content-type": "application/json",
            "accept": "text/event-stream",
            **(headers or {}),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        self._head = f"POST {parts.path} HTTP/1.1\r\n{lines}".encode()

    async def send(self, body: bytes, answer: TimedAnswer) -> None:
        """Send a body, and note in its answer when tokens come; a failure is its `error`."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
            try:
                # Noted before it is written: the server may receive it before this continues.
                answer.note_sent()
                writer.write(self._head + b"content-length: %d\r\n\r\n" % len(body) + body)
                await self._read(reader, answer)
            finally:
                writer.close()
        except (OSError, EOFError, ValueError) as error:  # a connection, its end, not HTTP or JSON
            answer.fail(f"{type(error).__name__}: {error}")

    async def _read(self, reader: asyncio.StreamReader, answer: TimedAnswer) -> None:
        status, headers = await _read_head(reader)
        parts = _parts(reader, headers)
        if status != 200:
            said = b"".join([part async for part in parts]).decode(errors="replace")
            answer.fail(f"status {status}: {said}")
            return
        num_events, is_whole = 0, False
        async for data in _data(parts):
            if data == b"[DONE]":
                is_whole = True
            elif data.startswith(b"{"):
                event = json.loads(data)
                num_events += _note(event, time.perf_counter() - answer.at_s, answer)
                ends = [choice.get("finish_reason") for choice in event.get("choices") or ()]
                is_whole = is_whole or any(ends)
        answer.num_tokens = answer.num_tokens or num_events
        if not is_whole and not answer.error:
            answer.fail("the stream ended before the answer")
        elif not answer.times_s and not answer.error:
            answer.fail("the answer has no text")


def _note(event: Mapping[str, Any], now_s: float, answer: TimedAnswer) -> bool:
    """Note what an event says; return whether it brings tokens."""
    choices = event.get("choices") or ()
    num_ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
    brings_tokens = bool(num_ids) or any(map(_has_text, choices))
    if brings_tokens:
        answer.times_s.append(now_s)
    answer.num_tokens += num_ids
    answer.request_id = event.get("request_id") or event.get("id") or answer.request_id
    if usage := event.get("usage"):
        answer.num_tokens = usage.get("completion_tokens") or answer.num_tokens
        answer.note_prompt(usage.get("prompt_tokens"))
    if error := event.get("error"):
        answer.fail(json.dumps(error))
    return brings_tokens


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    named = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text") or any(delta.get(name) for name in named))


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of an answer."""
    first = (await reader.readline()).decode("latin-1").split()
    if len(first) < 2 or not first[0].startswith("HTTP/1.") or not first[1].isdecimal():
        raise ValueError(f"{' '.join(first)[:80]!r} is not the beginning of an answer of HTTP/1.1")
    headers = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip().lower()
    return int(first[1]), headers


async def _data(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield what the lines of an event stream say after "data:"; the last may have no end."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


async def _parts(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they come, without the sizes of chunks."""
    if headers.get("transfer-encoding") != "chunked":
        # Some servers keep the connection open, although they were asked to close it.
        num_left = int(headers.get("content-length", sys.maxsize))
        while num_left and (part := await reader.read(min(num_left, _READ_BYTES))):
            num_left -= len(part)
            yield part
        return
    while num_bytes := int((await reader.readline()).partition(b";")[0], 16):
        yield await reader.readexactly(num_bytes)
        await reader.readexactly(2)


def summarise_answers(
    answers: Sequence[TimedAnswer],
    wall_s: float,
    *,
    percentiles: Sequence[float] = PERCENTILES,
    bounds_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return counts, rates and latencies; of the answers that had not ended, only their number.

    A token's time is that from the first to the last event over the tokens after the first. The
    time between tokens is that between two events, each of which may bring several.

    Args:
      percentiles: of each latency.
      bounds_s: bounds of `ttft`, `tpot` and `e2el`, the latency to the end. The goodput is the
        answers within all of them.
    """
    ended = [answer for answer in answers if answer.end_s]
    done = [answer for answer in ended if not answer.error]
    prompts = [a.num_prompt_tokens for a in done if a.num_prompt_tokens is not None]
    num_output = sum(answer.num_tokens for answer in done)

    def figures(values: Sequence[float]) -> dict[str, float] | None:
        return spread(values, percentiles)

    found: dict[str, Any] = {
        "num_requests": len(answers),
        "num_completed": len(done),
        "num_failed": len(ended) - len(done),
        "num_unfinished": len(answers) - len(ended),
        "wall_s": wall_s,
        "prompt_tokens": sum(prompts) if len(prompts) == len(done) else None,
        "output_tokens": num_output,
        "requests_per_s": len(done) / wall_s,
        "output_tokens_per_s": num_output / wall_s,
        "time_to_first_token_s": figures([answer.times_s[0] for answer in done]),
        "time_per_output_token_s": figures([a.token_s for a in done if a.token_s is not None]),
        "inter_token_latency_s": figures([b - a for o in done for a, b in pairwise(o.times_s)]),
        "latency_s": figures([answer.end_s for answer in done]),
        "errors": dict(Counter(answer.error for answer in ended if answer.error).most_common()),
    }
    if bounds_s:
        num_within = sum(_is_within(answer, bounds_s) for answer in done)
        share = num_within / len(ended) if ended else 0.0
        found["goodput"] = {
            "bounds_s": dict(bounds_s),
            "share": share,
            "requests_per_s": num_within / wall_s,
        }
    return found


def _is_within(answer: TimedAnswer, bounds_s: Mapping[str, float]) -> bool:
    taken_s = {"ttft": answer.times_s[0], "tpot": answer.token_s or 0.0, "e2el": answer.end_s}
    return all(taken_s[name] <= most for name, most in bounds_s.items())
