"""What a replica does with the KV that another one sends, without Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest

from jaxserve.core.errors import EngineFailedError, InvalidConfigError, RuntimeClosedError
from jaxserve.fleet.ray_replica import take_kv
from jaxserve.scheduling.kv.transfer import KVPages

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
