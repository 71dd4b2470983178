"""Many connections that stream at once: all are answered, and nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections import Counter

import pytest

from jaxserve.server.events import EventStream
from jaxserve.server.exchange import Exchange
from jaxserve.server.run import TimedProtocol
from tests.server.serving import CHAT, events, request_of, runtime, server

NUM_CONNECTIONS = 200
NUM_TOKENS = 12
BODY = {"messages": CHAT, "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}


async def _ask(url: str, sent: bytes, num_bytes: int | None = None) -> str:
    """Return the answer on a connection of its own, or leave after `num_bytes`."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        found = await (reader.read() if num_bytes is None else reader.readexactly(num_bytes))
    finally:
        writer.close()
    return found.decode()


def _num_alive() -> Counter[str]:
    """Return the numbers of objects that a connection or a request has of its own."""
    gc.collect()
    kinds = (Exchange, EventStream, TimedProtocol)
    # By `type`, since `isinstance` asks objects for `__class__`, at which some packages warn.
    found = (type(each) for each in gc.get_objects())
    return Counter(each.__name__ for each in found if issubclass(each, kinds))


@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="open files are listed in /proc")
def test_many_streams_at_once():
    """Every stream is whole, also where others leave; files and objects are as many as before."""
    sent = request_of("/v1/chat/completions", {**BODY, **USAGE})

    async def ask(url: str) -> list[str]:
        stay = [_ask(url, sent) for _ in range(NUM_CONNECTIONS)]
        leave = [_ask(url, sent, num_bytes=400) for _ in range(NUM_CONNECTIONS // 10)]
        return (await asyncio.gather(*stay, *leave))[:NUM_CONNECTIONS]

    with runtime(max_slots=16) as rt, server(rt, max_waiting=2 * NUM_CONNECTIONS) as url:
        asyncio.run(_ask(url, sent))
        num_files, num_alive = len(os.listdir("/proc/self/fd")), _num_alive()
        answers = asyncio.run(ask(url))
        for answer in answers:
            last = events(answer)[-1]
            assert last["usage"]["completion_tokens"] == NUM_TOKENS
        deadline_s = time.monotonic() + 30
        while (len(os.listdir("/proc/self/fd")), _num_alive()) != (num_files, num_alive):
            assert time.monotonic() < deadline_s, (num_files, num_alive, _num_alive())
            time.sleep(0.05)
        rt.check_integrity()
