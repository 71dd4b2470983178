"""Replicas that die when a test says so, without processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import final

from jaxserve.core.errors import JaxserveError, ReplicaDiedError
from jaxserve.core.request import Completion, Sample, Timing
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece, PieceSink
from jaxserve.engine.loop import Running
from jaxserve.fleet.dispatcher import Dispatcher
from jaxserve.fleet.replica import ReplicaCall, Started, make_call
from jaxserve.models.families import config_from_hf
from jaxserve.runtime import RuntimeStats
from jaxserve.runtime.weight_update import WeightUpdate
from jaxserve.testing.tiny import CONFIG

PAGE_SIZE = 4
ANSWER = tuple(range(2, 2 + 3 * PAGE_SIZE))


# The value of every counter and every size of a process.
EACH_COUNTER = 3


def call(name: str, prompt: object = "slow", max_tokens: int = 10) -> ReplicaCall:
    """Return a request. "deadly" kills its replica, "odd" raises an error in the replica's code.

    "slow" is answered when the gate is open.
    """
    params = SamplingParams(max_tokens=max_tokens)
    return make_call(name, prompt, params, priority=0, page_size=PAGE_SIZE)


def _show(show: PieceSink, start: int, end: int, size: int) -> None:
    """Show the tokens of the answer in pieces of this size, with one letter of text per token."""
    for at in range(start, end, size):
        tokens = ANSWER[at : min(at + size, end)]
        show(Piece(text="".join(chr(95 + token) for token in tokens), token_ids=tokens))


@final
class World:
    """All replicas that were made, and the requests that they got."""

    def __init__(self) -> None:
        self.replicas: list[FakeReplica] = []
        self.asked: Counter[str] = Counter()
        self.asked_whom: dict[str, int] = {}  # the replica that got the request last
        self.gate_is_open = False
        self.num_shown = 5  # number of tokens of a stream that are shown while the gate is closed
        self.starts_wait = False
        self.start_errors: list[JaxserveError] = []
        self.prefilled: list[tuple[str, int]] = []  # (request, replica)
        self.taken: dict[str, object] = {}  # request -> the KV that came with it last
        self.prefills_die = False
        self.prefills_wait = False
        # What a replica says to the weights of a source: when it places them, and later.
        self.refusals: dict[tuple[object, int], JaxserveError] = {}
        self.failures: dict[tuple[object, int], JaxserveError] = {}

    def make(self) -> FakeReplica:
        self.replicas.append(FakeReplica(self))
        return self.replicas[-1]


@final
class FakeReplica:
    """See `ReplicaProcess`."""

    def __init__(self, world: World):
        self.world = world
        self.open: dict[str, bool] = {}  # request -> whether it was cancelled
        self.is_dead = False
        self.placed: object = None
        self.weights: list[tuple[object, int | None]] = []  # source and version, oldest first
        self.is_paused = False

    async def start(self) -> Started:
        while self.world.starts_wait:
            await asyncio.sleep(0.001)
        if self.world.start_errors:
            raise self.world.start_errors.pop(0)
        return Started(
            pid=len(self.world.replicas),
            host="here",
            max_context=100,
            max_length=100,
            max_prompt_tokens=99,
            model_config=config_from_hf(CONFIG),
            num_host_pages=10,
        )

    async def stats(self) -> RuntimeStats:
        if self.is_dead:
            raise ReplicaDiedError("it was killed")
        return RuntimeStats(**{field.name: EACH_COUNTER for field in fields(RuntimeStats)})

    async def prefill(self, call: ReplicaCall) -> object:
        self.world.prefilled.append((call.id, self.world.replicas.index(self)))
        while self.world.prefills_wait:
            await asyncio.sleep(0.001)
        if self.world.prefills_die:
            self.is_dead = True
            raise ReplicaDiedError("it was killed")
        return f"KV of {call.id}"

    async def answer(
        self, call: ReplicaCall, on_piece: PieceSink | None = None, kv: object = None
    ) -> Completion:
        self.world.taken[call.id] = kv
        self.world.asked[call.id] += 1
        self.world.asked_whom[call.id] = self.world.replicas.index(self)
        self.open[call.id] = False
        if call.prompt == "deadly":
            self.is_dead = True
        if call.prompt == "odd":
            raise LookupError("a fault of the code")
        if on_piece is not None:
            _show(on_piece, 0, self.world.num_shown, len(self.world.replicas))
        while not (self.is_dead or self.world.gate_is_open or self.open[call.id]):
            await asyncio.sleep(0.001)
        if self.is_dead:
            raise ReplicaDiedError("it was killed")
        reason = "cancelled" if self.open.pop(call.id) else "length"
        if on_piece is not None:
            _show(on_piece, self.world.num_shown, len(ANSWER), 4)
            on_piece(Piece(text="", token_ids=(), finish_reason=reason))
        return Completion(
            request_id=call.id,
            prompt_token_ids=tuple(map(int, call.prompt)) if call.has_tokens else (1,),
            samples=(Sample(text=call.id, token_ids=ANSWER, finish_reason=reason),),
            timing=Timing(arrival_s=0.0),
        )

    @property
    def _index(self) -> int:
        return self.world.replicas.index(self)

    def _raise_if_dead(self) -> None:
        if self.is_dead:
            raise ReplicaDiedError("it was killed")

    async def prepare_params(self, source: object, *, partial: bool) -> None:
        await asyncio.sleep(0.001)
        self._raise_if_dead()
        if error := self.world.refusals.get((source, self._index)):
            raise error
        self.placed = source

    async def drop_prepared(self) -> None:
        self._raise_if_dead()
        self.placed = None

    async def update_params(self, update: WeightUpdate) -> None:
        self._raise_if_dead()
        if error := self.world.failures.get((self.placed, self._index)):
            raise error
        while update.running == "finish" and self.open and not self.is_dead:
            await asyncio.sleep(0.001)
        self._raise_if_dead()
        self.weights.append((self.placed, update.version))
        self.placed = None

    async def pause(self, running: Running) -> None:
        self._raise_if_dead()
        self.is_paused = True

    async def resume(self) -> None:
        self._raise_if_dead()
        self.is_paused = False

    def cancel(self, request_id: str) -> None:
        if request_id in self.open:
            self.open[request_id] = True

    def kill(self) -> None:
        self.is_dead = True


@contextmanager
def serving(num_replicas: int, world: World, num_prefill: int = 0) -> Iterator[Dispatcher]:
    """Yield a dispatcher whose replicas have started, and close it."""
    dispatcher = Dispatcher(world.make, num_replicas, page_size=PAGE_SIZE, num_prefill=num_prefill)
    try:
        for started in dispatcher.start():
            started.result(20)
        yield dispatcher
    finally:
        dispatcher.close()
