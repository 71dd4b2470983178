"""New weights for all replicas of a fleet, or none, with replicas that fail when a test says so."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineBusyError,
    InvalidConfigError,
    InvalidParamsError,
    ReplicaDiedError,
    RuntimeClosedError,
)
from jaxserve.fleet.dispatcher import Dispatcher
from jaxserve.fleet.seats import FleetUpdate, NewestWeights
from jaxserve.runtime.weight_update import WeightUpdate
from tests.common.waiting import until
from tests.fleet.fakes import World, call, serving

pytestmark = pytest.mark.fast

WAIT_S = 20


def _update(source: str, paths: str | None = None, **settings: Any) -> FleetUpdate:
    """Return an update of all parameters, or of the parts that `paths` names by letters."""
    partial = paths is not None
    return FleetUpdate(
        source=source,
        paths=frozenset(paths) if partial else None,
        settings=WeightUpdate(partial=partial, **settings),
    )


def _versions(dispatcher: Dispatcher) -> list[int]:
    return [state.weights_version for state in dispatcher.replicas]


def _all_serve(dispatcher: Dispatcher) -> bool:
    return all(state.started is not None for state in dispatcher.replicas)


def test_every_replica_takes_them_and_versions_agree():
    """Also those that only prefill; versions are counted or given, and increase."""
    world = World()
    with serving(2, world, num_prefill=1) as dispatcher:
        assert dispatcher.update_params(_update("a")) == 1
        assert dispatcher.update_params(_update("b", version=7)) == 7
        assert _versions(dispatcher) == [7] * 3 and dispatcher.weights_version == 7
        with pytest.raises(InvalidConfigError, match="versions increase"):
            dispatcher.update_params(_update("c", version=7))
    assert [each.weights for each in world.replicas] == [[("a", 1), ("b", 7)]] * 3


@pytest.mark.parametrize(
    "error", [InvalidParamsError("it has NaN"), DeviceMemoryError("there is no room")]
)
def test_weights_that_one_replica_refuses_are_used_by_none(error):
    """The others drop what they have placed, and all serve on with the old weights."""
    world = World()
    world.gate_is_open = True
    with serving(3, world) as dispatcher:
        dispatcher.update_params(_update("a"))
        world.refusals["bad", 1] = error
        with pytest.raises(type(error), match=str(error)):
            dispatcher.update_params(_update("bad"))
        assert _versions(dispatcher) == [1] * 3
        assert [each.placed for each in world.replicas] == [None] * 3
        assert dispatcher.submit(call("r")).result(WAIT_S).error is None
        assert dispatcher.update_params(_update("b")) == 2
    assert [each.weights for each in world.replicas] == [[("a", 1), ("b", 2)]] * 3


@pytest.mark.parametrize("error", [ReplicaDiedError("killed"), DeviceMemoryError("no room now")])
def test_a_replica_that_fails_when_others_have_changed_is_replaced(error):
    """Its process ends, and the next one starts with the new weights before it serves."""
    world = World()
    world.failures["a", 0] = error
    with serving(2, world) as dispatcher:
        assert dispatcher.update_params(_update("a")) == 1
        assert world.replicas[0].is_dead and dispatcher.replicas[0].num_deaths == 1
        until(lambda: _all_serve(dispatcher))
        assert _versions(dispatcher) == [1, 1]
    assert [each.weights for each in world.replicas] == [[], [("a", 1)], [("a", 1)]]


def test_a_replica_that_dies_before_does_not_stop_an_update():
    """Those that live take the weights; if all die of them, new processes have the old ones."""
    world = World()
    with serving(2, world) as dispatcher:
        world.refusals["a", 1] = ReplicaDiedError("killed")
        assert dispatcher.update_params(_update("a")) == 1
        until(lambda: _all_serve(dispatcher))
        assert _versions(dispatcher) == [1, 1] and len(world.replicas) == 3
        for index in range(len(world.replicas)):
            world.refusals["deadly", index] = ReplicaDiedError("out of memory")
        with pytest.raises(ReplicaDiedError, match="every replica died .* version 2.*out of mem"):
            dispatcher.update_params(_update("deadly"))
        assert _versions(dispatcher) == [1, 1] and dispatcher.weights_version == 1


def test_a_later_process_starts_with_the_newest_weights():
    """It takes the last update of all parameters, and the parts that followed and still count."""
    world = World()
    with serving(1, world) as dispatcher:
        for update in (
            _update("first"),
            _update("whole"),
            _update("a", "x"),
            _update("b", "yz"),
            _update("c", "xw"),
        ):
            dispatcher.update_params(update)
        world.starts_wait = True
        world.replicas[0].kill()
        with pytest.raises(ReplicaDiedError, match="version 6"):  # which notices the death
            dispatcher.update_params(_update("late"))
        assert not world.replicas[1].weights
        world.starts_wait = False
        until(lambda: _all_serve(dispatcher))
        assert world.replicas[1].weights == [("whole", 2), ("b", 4), ("c", 5)]
        assert _versions(dispatcher) == [5]
        assert dispatcher.update_params(_update("next")) == 6


def test_a_part_that_several_later_ones_replace_is_dropped():
    """Each replaces some of it; a trainer that updates a few layers at a time keeps few parts."""
    newest = NewestWeights()
    given: list[str] = []

    class Taking:
        async def prepare_params(self, source: str, *, partial: bool) -> None:
            given.append(source)

        async def update_params(self, update: WeightUpdate) -> None:
            pass

    for source, paths in (("a", "xy"), ("b", "yz"), ("c", "x"), ("d", "w")):
        newest.add(newest.numbered(_update(source, paths)))
    asyncio.run(newest.give_to(cast(Any, Taking())))
    assert given == ["b", "c", "d"]


def test_weights_that_a_later_process_cannot_take_are_its_error():
    """The fleet goes on without it, as when its model cannot be loaded."""
    world = World()
    world.gate_is_open = True
    with serving(2, world) as dispatcher:
        dispatcher.update_params(_update("a"))
        world.refusals["a", 2] = InvalidParamsError("the folder is gone")
        world.failures["b", 0] = ReplicaDiedError("killed")
        world.refusals["b", 2] = InvalidParamsError("the folder is gone")
        assert dispatcher.update_params(_update("b")) == 2
        until(lambda: dispatcher.replicas[0].error is not None)
        assert "folder is gone" in str(dispatcher.replicas[0].error)
        assert world.replicas[2].is_dead
        assert dispatcher.submit(call("r")).result(WAIT_S).error is None
        assert dispatcher.update_params(_update("c")) == 3


def test_a_process_that_starts_during_an_update_has_its_weights():
    """It begins to serve after the update; requests of other replicas end in between."""
    world = World()
    with serving(2, world) as dispatcher, ThreadPoolExecutor() as threads:
        world.replicas[0].kill()
        runs = [dispatcher.submit(call(f"r{i}", f"slow {i}")) for i in range(2)]
        until(lambda: dispatcher.replicas[0].num_deaths == 1)
        until(lambda: len(world.replicas[1].open) >= 1)
        update = threads.submit(dispatcher.update_params, _update("a"))
        time.sleep(0.05)
        assert not update.done()  # a request runs
        world.gate_is_open = True
        assert update.result(WAIT_S) == 1
        assert all(run.result(WAIT_S).error is None for run in runs)
        until(lambda: _all_serve(dispatcher))
        assert _versions(dispatcher) == [1, 1]
        assert world.replicas[2].weights == [("a", 1)]


def test_updates_come_one_after_another():
    """Two threads that update at once get two versions, in one order on all replicas."""
    world = World()
    with serving(2, world) as dispatcher, ThreadPoolExecutor() as threads:
        names = [f"w{i}" for i in range(8)]
        found = list(threads.map(lambda name: dispatcher.update_params(_update(name)), names))
        assert sorted(found) == list(range(1, 9))
        assert _versions(dispatcher) == [8, 8]
    first, second = (each.weights for each in world.replicas)
    assert first == second == sorted(zip(names, found, strict=True), key=lambda each: each[1])


def test_a_pause_is_of_all_replicas_and_of_those_that_come():
    """Updates that wait for ends are refused meanwhile; a new process joins the pause."""
    world = World()
    with serving(2, world) as dispatcher:
        dispatcher.pause("keep")
        assert dispatcher.is_paused and all(each.is_paused for each in world.replicas)
        for call_ in (
            lambda: dispatcher.update_params(_update("a", running="finish")),
            lambda: dispatcher.pause("finish"),
        ):
            with pytest.raises(EngineBusyError, match=r"fleet\.resume"):
                call_()
        world.failures["a", 0] = ReplicaDiedError("killed")
        assert dispatcher.update_params(_update("a", running="keep")) == 1
        until(lambda: _all_serve(dispatcher))
        assert [each.is_paused for each in world.replicas] == [True] * 3
        dispatcher.resume()
        assert not dispatcher.is_paused
        assert [each.is_paused for each in world.replicas[1:]] == [False] * 2
        world.replicas[1].kill()
        dispatcher.pause("keep")  # which notices the death
        until(lambda: _all_serve(dispatcher))
        assert dispatcher.replicas[1].num_deaths == 1 and world.replicas[3].is_paused


def test_close_ends_an_update_that_waits():
    """It raises that the fleet was closed, and so do later ones."""
    world = World()
    with serving(1, world) as dispatcher, ThreadPoolExecutor() as threads:
        dispatcher.submit(call("r"))
        until(lambda: bool(world.replicas[0].open))
        update = threads.submit(dispatcher.update_params, _update("a"))
        time.sleep(0.02)
        dispatcher.close()
        for late in (update.result, lambda: dispatcher.update_params(_update("b"))):
            with pytest.raises(RuntimeClosedError):
                late()
    assert not any(thread.name == "jaxserve-fleet" for thread in threading.enumerate())
