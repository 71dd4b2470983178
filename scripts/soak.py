"""A soak: many threads use one runtime in every way at once, and nothing may leak or be lost.

`python -m scripts.soak --help`. A tiny model serves short requests that are waited for, cancelled,
abandoned after a timeout, streamed and closed early, refused, or turns of conversations. Meanwhile
steps are slow, run out of memory or return no numbers, and the page pool is resized. At the end
every request has ended exactly once; pages, slots and threads are as before, and so is the resident
memory since the middle of the run. One JSON object on stdout; exit code 1 with what is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, final

from tqdm import tqdm

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import EngineBusyError, JaxserveError, QueueFullError
from jaxserve.core.request import Completion
from jaxserve.engine.pending import Pending
from jaxserve.testing import ExecutorWrapper, FaultyExecutor
from jaxserve.testing.tiny import VOCAB_SIZE, letter_tokenizer, tiny_llama

MAX_SLOTS, PAGE_SIZE = 16, 8
# Bytes of the pool that the run alternates between; a page is 2 KiB here. The small one does not
# hold what all slots need at once, so that sequences are preempted.
POOLS = ("400KiB", "64KiB")
# Seconds without an end of any request after which the run counts as stuck.
PATIENCE_S = 180.0
# The resident size may grow by this share from the middle of the run to its end.
_MAX_GROWTH = 0.02


@final
class _Moody(ExecutorWrapper):
    """Some steps are slow, have logits that are not finite, or run out of memory."""

    def __init__(self, inner: Any, seed: int):
        super().__init__(FaultyExecutor(inner, out_of_memory_every=997, not_finite_every=501))
        self._rng = random.Random(seed)

    def submit(self, plan: Any) -> Any:
        if self._rng.random() < 0.002:
            time.sleep(0.02)
        return self.inner.submit(plan)


@final
class Counts:
    """Counts of how requests ended. Any thread may write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self.ends: Counter[str] = Counter()
        self.num_ended_again = 0
        self.num_begun = 0

    def begin(self, most: int) -> int | None:
        """Return the number of another request, or None after `most` requests."""
        with self._lock:
            if self.num_begun >= most:
                return None
            self.num_begun += 1
            return self.num_begun

    def follow(self, pending: Pending[Completion]) -> None:
        with self._lock:
            self._open[pending.request_id] = 0
        pending.future.add_done_callback(self._ended)

    def add(self, how: str) -> None:
        with self._lock:
            self.ends[how] += 1

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    @property
    def num_ended(self) -> int:
        with self._lock:
            return sum(self.ends.values())

    def _ended(self, future: Future[Completion]) -> None:
        completion = future.result()
        error = completion.error
        how = completion.finish_reason if error is None else type(error).__name__
        with self._lock:
            self.num_ended_again += completion.request_id not in self._open
            self._open.pop(completion.request_id, None)
            self.ends[how] += 1


def _threads() -> set[threading.Thread]:
    """Return all threads except the one that tqdm keeps for its bars."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


def soak(num_requests: int, num_threads: int, seed: int) -> dict[str, Any]:
    threads_before = _threads()
    counts, problems = Counts(), []
    sizes: list[int] = []
    with Runtime(
        tiny_llama(),
        tokenizer=letter_tokenizer(),
        policy="auto",
        max_slots=MAX_SLOTS,
        max_waiting=4 * num_threads,
        page_size=PAGE_SIZE,
        max_step_tokens=64,
        kv_memory=POOLS[0],
        host_memory="400KiB",
        wrap_executor=lambda executor: cast(Any, _Moody(executor, seed)),
        progress=False,
        warmup="full",
    ) as rt:
        begin_s = time.perf_counter()
        clients = [
            threading.Thread(target=_client, args=(rt, counts, num_requests, seed + i, problems))
            for i in range(num_threads)
        ]
        for client in clients:
            client.start()
        num_resizes = _watch(rt, counts, num_requests, clients, sizes, problems)
        for client in clients:
            client.join(PATIENCE_S)
        if counts.num_open:
            problems.append(f"{counts.num_open} requests have not ended")
        seconds = time.perf_counter() - begin_s
        problems += _left_over(rt)
        stats = rt.stats()
    if more := [thread.name for thread in _threads() - threads_before]:
        problems.append(f"{len(more)} threads are left: {more}")
    if counts.num_ended_again:
        problems.append(f"{counts.num_ended_again} requests ended more than once")
    if counts.num_ended != counts.num_begun:
        problems.append(f"{counts.num_begun} requests began, {counts.num_ended} ended")
    growth = sizes[-1] / sizes[len(sizes) // 2] - 1
    return {
        "num_requests": counts.num_begun,
        "seconds": seconds,
        "ends": dict(counts.ends),
        "num_steps": stats.num_steps,
        "num_lost_steps": stats.num_lost_steps,
        "num_preemptions": stats.num_preemptions,
        "num_resizes": num_resizes,
        "resident_bytes": sizes,
        "growth": growth,
        "host_and_device": {"pages_out": stats.num_pages_out, "pages_in": stats.num_pages_in},
        "problems": problems,
    }


def _watch(
    rt: Runtime,
    counts: Counts,
    num_requests: int,
    clients: list[threading.Thread],
    sizes: list[int],
    problems: list[str],
) -> int:
    """Resize the pool and record the resident size until all has ended; return the resizes."""
    num_resizes, newest, changed_s = 0, 0, time.monotonic()
    bar = tqdm(total=num_requests, desc="soak", unit="req", leave=False, delay=2)
    while any(client.is_alive() for client in clients):
        time.sleep(0.2)
        ended = counts.num_ended
        bar.update(ended - bar.n)
        if ended != newest:
            newest, changed_s = ended, time.monotonic()
        elif time.monotonic() > changed_s + PATIENCE_S:
            problems.append(f"nothing ended for {PATIENCE_S:g} s, after {ended} requests")
            break
        if ended * 20 >= num_requests * (len(sizes) + 1):  # twenty times
            sizes.append(resident_bytes())
            rt.check_integrity()
            num_resizes += 1
            with suppress(EngineBusyError):
                rt.resize_kv(POOLS[num_resizes % 2])
    bar.close()
    sizes.append(resident_bytes())
    return num_resizes


def _client(rt: Runtime, counts: Counts, num_requests: int, seed: int, problems: list[str]) -> None:
    rng = random.Random(seed)
    ways = (_waited_for, _waited_for, _cancelled, _given_up, _streamed, _refused, _conversation)
    while (number := counts.begin(num_requests)) is not None:
        try:
            rng.choice(ways)(rt, counts, rng, number)
        except QueueFullError:
            counts.add("QueueFullError")
            time.sleep(0.01)
        except Exception as error:
            counts.add(type(error).__name__)
            problems.append(f"request {number}: {error!r}")


def _params(rng: random.Random) -> SamplingParams:
    more: dict[str, Any] = rng.choice(
        [{}, {}, {"temperature": 1.0, "n": 2}, {"stop": ["a"]}, {"presence_penalty": 0.5}]
    )
    return SamplingParams(max_tokens=rng.randint(1, 8), **more)


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))]


def _submitted(rt: Runtime, counts: Counts, rng: random.Random, number: int) -> Pending[Completion]:
    pending = rt.submit(_prompt(rng), _params(rng), request_id=f"soak-{number}")
    counts.follow(pending)
    return pending


def _waited_for(rt: Runtime, counts: Counts, rng: random.Random, number: int) -> None:
    _submitted(rt, counts, rng, number).result(PATIENCE_S)


def _cancelled(rt: Runtime, counts: Counts, rng: random.Random, number: int) -> None:
    pending = _submitted(rt, counts, rng, number)
    time.sleep(rng.random() * 0.01)
    pending.cancel()
    pending.cancel()
    pending.result(PATIENCE_S)


def _given_up(rt: Runtime, counts: Counts, rng: random.Random, number: int) -> None:
    pending = _submitted(rt, counts, rng, number)
    try:
        pending.result(rng.random() * 0.02)
    except TimeoutError:
        pending.cancel()
        pending.result(PATIENCE_S)


def _streamed(rt: Runtime, counts: Counts, rng: random.Random, number: int) -> None:
    leaves = rng.random() < 0.5
    how = "streamed"
    pieces = rt.stream(_prompt(rng), SamplingParams(max_tokens=rng.randint(1, 8)))
    try:
        for _ in pieces:
            if leaves:
                how = "stream left"
                break
    except QueueFullError:
        raise
    except JaxserveError as error:
        how = type(error).__name__
    finally:
        pieces.close()
    counts.add(how)


def _refused(rt: Runtime, counts: Counts, rng: random.Random, number: int) -> None:
    wrong: list[int] = rng.choice([[], [VOCAB_SIZE + 5], [1] * 4000])
    try:
        rt.submit(wrong, request_id=f"soak-{number}")
    except JaxserveError as error:
        counts.add(type(error).__name__)
    else:
        raise AssertionError(f"the prompt {wrong[:3]} was accepted")


def _conversation(rt: Runtime, counts: Counts, rng: random.Random, number: int) -> None:
    talk = rt.conversation(f"talk-{number}")
    how = "turns"
    try:
        for _ in range(rng.randint(1, 3)):
            talk.send("hi", SamplingParams(max_tokens=rng.randint(1, 4)))
    except QueueFullError:
        raise
    except JaxserveError as error:
        how = type(error).__name__
    finally:
        with suppress(JaxserveError):
            rt.conversations.delete(talk.id)
    counts.add(how)


def _left_over(rt: Runtime) -> list[str]:
    """Return what the run left: work, pages that are owned, slots that cannot be taken."""
    problems = []
    rt.check_integrity()
    if rt.outlook():
        problems.append(f"{len(rt.outlook())} requests are left in the engine")
    if rt.stats().num_pages_owned:
        problems.append(f"{rt.stats().num_pages_owned} pages are owned by no request")
    rt.resize_kv(POOLS[0])
    prompts = [[1 + i, 2, 3] for i in range(MAX_SLOTS)]
    done = rt.generate(prompts, SamplingParams(max_tokens=8))
    most = max(step.num_running for step in rt.report().steps[-50:])
    failed = [each.error for each in done if each.error is not None]
    if most < MAX_SLOTS and not failed:
        problems.append(f"{most} of {MAX_SLOTS} slots can be taken")
    return problems


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    figures = soak(options.requests, options.threads, options.seed)
    if figures["growth"] > _MAX_GROWTH:
        figures["problems"].append(f"the resident size grew by {figures['growth']:.1%}")
    print(json.dumps(figures))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
