"""What a replica does with failures, and with the KV that another one sends, without Ray."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast, final

import pytest

from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineFailedError,
    InvalidConfigError,
    JaxserveError,
    NumericalError,
    ReplicaDiedError,
    RuntimeClosedError,
    StepMemoryError,
)
from jaxserve.core.request import Completion, Timing
from jaxserve.engine.answers import failed_completion
from jaxserve.engine.pending import Pending
from jaxserve.fleet.ray_replica import RayReplica, send_kv, take_kv
from jaxserve.fleet.replica import cancelled_completion
from jaxserve.scheduling.kv.transfer import KVPages
from tests.fleet.fakes import call

pytestmark = pytest.mark.fast

KV = ((1, 2, 3), KVPages(b"weights", [b"page"]))


class _Importing:
    """The part of a runtime that takes KV."""

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.taken: list[Any] = []

    def import_kv(self, token_ids: Sequence[int], kv: KVPages) -> int:
        if self.error is not None:
            raise self.error
        self.taken.append((token_ids, kv))
        return len(kv.pages)


@final
class _Exporting:
    """The part of a runtime that exports KV of a prompt; each look finds two further pages."""

    def __init__(self, pending: Pending[Completion], num_looks: int):
        self.asked: list[int] = []
        self._pending = pending
        self._num_looks = num_looks

    def export_kv(self, token_ids: Sequence[int], first: int = 0, *, waits: bool) -> KVPages:
        assert not waits
        self.asked.append(first)
        if len(self.asked) == self._num_looks:
            completion = cancelled_completion(call("a"), arrival_s=0.0)
            self._pending.future.set_result(completion)
            return KVPages(b"weights", [])
        return KVPages(b"weights", [b"%d" % page for page in range(first, first + 2)])


def test_pages_are_sent_as_chunks_are_computed():
    """Until the prompt has ended, each look begins where the one before has ended."""
    pending = Pending("a", Future(), lambda _: None)
    runtime, sent = _Exporting(pending, num_looks=4), []
    send = send_kv(cast(Any, runtime), (1, 2), pending, sent.append, asyncio.Lock())
    found = asyncio.run(send)
    assert runtime.asked == [0, 2, 4, 6] and found == ([None] * 3, 6)
    assert [page for kv in sent for page in kv.pages] == [b"%d" % page for page in range(6)]


@final
class _Sent:
    """A reference to a part, which may be lost."""

    def __init__(self, part: KVPages | Exception):
        self._part = part

    def __await__(self) -> Generator[None, None, tuple[Sequence[int], KVPages]]:
        yield
        if isinstance(self._part, Exception):
            raise self._part
        return (1, 2, 3), self._part


def test_parts_are_taken_as_far_as_all_before_them_came(caplog):
    """A lost part, or one of other weights, ends the KV; what is behind it is not used."""

    def taken(*parts: KVPages | Exception) -> list[bytes]:
        runtime = _Importing()
        asyncio.run(take_kv(cast(Any, runtime), [_Sent(part) for part in parts]))
        return [page for _, kv in runtime.taken for page in kv.pages]

    one, two, three = (KVPages(b"weights", [name]) for name in (b"1", b"2", b"3"))
    assert taken(one, two, three) == [b"1", b"2", b"3"]
    assert taken(one, KVPages(b"others", [b"2"]), three) == [b"1"]
    with caplog.at_level(logging.WARNING):
        assert taken(one, MemoryError("lost"), three) == [b"1"]
        assert taken(MemoryError("lost"), two) == []
    assert caplog.text.count("lost") == 2


def _take(runtime: _Importing, lost: Exception | None = None) -> None:
    async def sent() -> Any:
        if lost is not None:
            raise lost
        return KV

    asyncio.run(take_kv(cast(Any, runtime), [sent()]))


@pytest.mark.parametrize("error", [InvalidConfigError("other weights"), MemoryError("no room")])
def test_kv_that_cannot_be_used_is_computed(error, caplog):
    """Neither a failing import nor lost KV is an error of the request; the log has the reason."""
    runtime = _Importing()
    _take(runtime)
    assert runtime.taken == [KV]
    with caplog.at_level(logging.WARNING):
        _take(_Importing(error))
        _take(runtime, lost=error)
    assert caplog.text.count(str(error)) == 2 and runtime.taken == [KV]


@pytest.mark.parametrize("error", [EngineFailedError("it stopped"), RuntimeClosedError("closed")])
def test_a_runtime_that_is_over_says_so(error):
    """Its replica is replaced then."""
    with pytest.raises(type(error)):
        _take(_Importing(error))


@final
class _Ray:
    """The part of Ray that a replica uses, with an actor whose answers are all the same."""

    exceptions = SimpleNamespace(RayTaskError=LookupError, RayError=LookupError)

    def __init__(self, completion: Completion):
        self._completion = completion

    def remote(self, **_: Any) -> Any:
        async def reply(*_: Any) -> Completion:
            return self._completion

        method = SimpleNamespace(remote=reply)
        actor = SimpleNamespace(start=method, answer=method)
        return lambda _: SimpleNamespace(remote=lambda: actor)


@pytest.mark.release
@pytest.mark.parametrize(
    ("error", "is_over"),
    [
        (EngineFailedError("it stopped"), True),
        (RuntimeClosedError("closed"), True),
        (DeviceMemoryError("it has no memory left"), True),
        (StepMemoryError("no memory for this step"), False),
        (NumericalError("not a number"), False),
    ],
)
def test_a_replica_is_replaced_when_its_runtime_is_over(
    error: JaxserveError, is_over: bool, monkeypatch: pytest.MonkeyPatch
):
    """A runtime that can answer nothing more is a dead replica; other errors are of one request."""
    failed = failed_completion("a", (), error, Timing(arrival_s=0.0, finished_s=0.0))
    monkeypatch.setitem(sys.modules, "ray", cast(Any, _Ray(failed)))

    async def answer() -> Completion:
        replica = RayReplica("a-model", tensor_parallel=1, num_cpus=1, num_gpus=0, options={})
        await replica.start()
        return await replica.answer(call("a"))

    if is_over:
        with pytest.raises(ReplicaDiedError, match=type(error).__name__):
            asyncio.run(answer())
    else:
        assert asyncio.run(answer()).error is error
