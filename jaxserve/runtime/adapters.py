"""The adapters of a runtime: the loaded ones, their places, and the number of requests of each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

from flax import nnx

from jaxserve.core.errors import EngineBusyError, InvalidConfigError, UnknownAdapterError
from jaxserve.core.request import AdapterSlot
from jaxserve.engine.answers import Answer
from jaxserve.execution.device_errors import out_of_memory_as
from jaxserve.execution.model_executor import ModelExecutor
from jaxserve.models.adapter_layout import AdapterLayout
from jaxserve.models.adapter_source import AdapterSource
from jaxserve.runtime.replicas import Replicas


@final
@dataclass(frozen=True)
class AdapterUsage:
    """The adapters of open requests, at most `max_adapters` at the same time.

    `running` has the names in the requests that have a slot, or had one, in alphabetical order;
    `waiting` those in the requests that have had no slot yet.
    """

    max_adapters: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


@final
class Adapters:
    """A thread-safe table of the loaded adapters; `generation` counts the changes of the arrays."""

    def __init__(
        self, layout: AdapterLayout | None, params: nnx.State, replicas: Replicas, most: int
    ):
        self.generation = 0
        self._layout = layout
        self._replicas = replicas
        self._most = most
        self._arrays = {} if layout is None else layout.arrays_of(params)
        if layout is not None:
            with _making_room():
                # Writing zeros once compiles the function for later calls.
                for _ in layout.put(self._arrays, 0, None):
                    pass
        self._changing = threading.Lock()  # held while an adapter is loaded or dropped
        self._lock = threading.Lock()  # guards the table
        self._slots: dict[str, AdapterSlot] = {}
        self._num_requests: Counter[int] = Counter()  # by index
        self._answers: set[Answer] = set()  # of requests with an adapter that have not ended

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in the order in which they were loaded."""
        with self._lock:
            return tuple(self._slots)

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {} if self._layout is None else self._layout.shapes(rank)

    def load(self, name: str, source: str | Path | Mapping[str, Any], scale: float | None) -> None:
        layout = self._layout
        if layout is None:
            raise InvalidConfigError(
                f"adapter {name!r}: this runtime was created without adapters; pass max_adapters "
                "and max_adapter_rank to Runtime"
            )
        if not isinstance(name, str) or not name:
            raise InvalidConfigError(
                f"name={name!r} of an adapter is not allowed; pass a text that is not empty"
            )
        self._replicas.check_leads()
        self._replicas.check_may_wait()
        self._replicas.check_awake()
        values = layout.values(AdapterSource.of(source, scale))
        with self._changing:
            index = self._free_index(name)
            with _making_room():
                # No request has this index yet, so a partly written adapter is harmless.
                for part in layout.put(self._arrays, index, values.arrays):
                    self._arrays = {**self._arrays, **part}
                    self.generation += 1
                    state = layout.state(part)
                    for replica in self._replicas.all:
                        replica.loop.ask(partial(_install, replica.executor, state))
            with self._lock:
                self._slots[name] = AdapterSlot(index, values.identity)

    def drop(self, name: str) -> None:
        self._replicas.check_may_wait()
        for replica in self._replicas.all:
            # Wait until the loop's thread has released the adapters of ended requests.
            replica.loop.ask(lambda: None)
        with self._changing, self._lock:
            slot = self._slot(name)
            count = self._num_requests[slot.index]
            if count:
                raise EngineBusyError(
                    f"{count} requests with the adapter {name!r} have not ended; drop it when they "
                    "have, or cancel them first"
                )
            del self._slots[name]

    def acquire(self, name: str) -> AdapterSlot:
        """Return a loaded adapter, which stays until `release`, or raise UnknownAdapterError."""
        with self._lock:
            slot = self._slot(name)
            self._num_requests[slot.index] += 1
            return slot

    def release(self, slot: AdapterSlot) -> None:
        with self._lock:
            self._num_requests[slot.index] -= 1

    def release_after(self, answer: Answer) -> None:
        """Release the adapter of a submitted request when it ends; until then it is in `usage`."""
        with self._lock:
            self._answers.add(answer)
        answer.future.add_done_callback(lambda _: self._ended(answer))

    @property
    def usage(self) -> AdapterUsage | None:
        """The adapters of the requests that have not ended; None for a runtime without adapters."""
        if self._layout is None:
            return None
        names: dict[bool, set[str]] = {True: set(), False: set()}
        with self._lock:
            for answer in self._answers:
                assert answer.request.params.adapter is not None
                names[answer.waits].add(answer.request.params.adapter)
        return AdapterUsage(self._most, tuple(sorted(names[False])), tuple(sorted(names[True])))

    def _ended(self, answer: Answer) -> None:
        assert answer.request.adapter is not None
        self.release(answer.request.adapter)
        with self._lock:
            self._answers.discard(answer)

    def with_adapters(self, params: nnx.State, *, partial: bool) -> nnx.State:
        """Return new parameters of the adapted model, with the loaded adapters unless `partial`."""
        if self._layout is None:
            return params
        inside = self._layout.inside(params)
        if partial:
            return inside
        own = self._layout.state(self._arrays)
        return nnx.from_flat_state([*nnx.to_flat_state(inside), *nnx.to_flat_state(own)])

    def _slot(self, name: str) -> AdapterSlot:
        if name not in self._slots:
            known = ", ".join(map(repr, self._slots)) or "none"
            raise UnknownAdapterError(
                f"adapter {name!r} is not loaded; loaded are: {known}. Load it with "
                "rt.load_adapter, or omit it"
            )
        return self._slots[name]

    def _free_index(self, name: str) -> int:
        with self._lock:
            if name in self._slots:
                raise InvalidConfigError(
                    f"an adapter {name!r} is loaded already; drop it first, or choose another name"
                )
            used = {slot.index for slot in self._slots.values()}
        free = [index for index in range(self._most) if index not in used]
        if not free:
            raise InvalidConfigError(
                f"adapter {name!r}: {self._most} adapters are loaded, as many as max_adapters "
                "allows; drop one first (rt.drop_adapter)"
            )
        return free[0]


def _making_room() -> AbstractContextManager[None]:
    return out_of_memory_as(
        "placing an adapter, for which an eighth of the adapters' memory is taken twice",
        "pass a smaller kv_memory, max_adapters or max_adapter_rank",
    )


def _install(executor: ModelExecutor, state: nnx.State) -> None:
    executor.update_params(executor.fitted(state, partial=True))
