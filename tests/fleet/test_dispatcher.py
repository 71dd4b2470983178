"""Deaths, replacements and retries, with replicas that die when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from jaxserve.core.errors import (
    CheckpointError,
    EngineFailedError,
    InvalidConfigError,
    InvalidRequestError,
    ReplicaDiedError,
    RuntimeClosedError,
)
from jaxserve.core.request import Completion
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.answers import Piece
from jaxserve.fleet.dispatcher import Dispatcher
from jaxserve.fleet.replica import make_call
from tests.common.waiting import until
from tests.fleet.fakes import ANSWER, EACH_COUNTER, PAGE_SIZE, World, call, serving

pytestmark = pytest.mark.fast

WAIT_S = 20


@contextmanager
def _serving(num_replicas: int, world: World, num_prefill: int = 0) -> Iterator[Dispatcher]:
    """Serve, and check that nothing is left of the requests and of the dispatcher's thread."""
    with serving(num_replicas, world, num_prefill) as dispatcher:
        yield dispatcher
        until(lambda: all(state.work == 0 for state in dispatcher.replicas))
        assert all(state.num_unfinished == 0 for state in dispatcher.replicas)
    assert not any(thread.name == "jaxserve-fleet" for thread in threading.enumerate())


def _submit_all(dispatcher: Dispatcher, world: World, count: int) -> list[Future[Completion]]:
    """Submit slow requests, and wait until each of them is with a replica."""
    futures = [dispatcher.submit(call(f"r{i}", f"slow {i}")) for i in range(count)]
    until(lambda: len(world.asked) == count)
    return futures


def _joined(pieces: list[Piece]) -> tuple[tuple[int, ...], str, list[str | None]]:
    tokens = tuple(token for piece in pieces for token in piece.token_ids)
    return tokens, "".join(p.text for p in pieces), [p.finish_reason for p in pieces]


def test_a_stream_goes_on_where_another_replica_has_come_as_far():
    """The replica dies after five tokens; the next one cuts other pieces; no token repeats."""
    world, pieces = World(), []
    with _serving(2, world) as dispatcher:
        future = dispatcher.submit(call("r"), pieces.append)
        until(lambda: len(_joined(pieces)[0]) == 5)
        world.num_shown = 7
        world.replicas[world.asked_whom["r"]].is_dead = True
        until(lambda: len(_joined(pieces)[0]) == 7)
        world.gate_is_open = True
        assert future.result(WAIT_S).token_ids == ANSWER and world.asked["r"] == 2
    tokens, text, reasons = _joined(pieces)
    assert tokens == ANSWER and text == "".join(chr(95 + token) for token in ANSWER)
    assert reasons == [None] * (len(pieces) - 1) + ["length"]


PROMPT = list(range(3, 3 + 3 * PAGE_SIZE))


def test_kv_of_a_prompt_goes_to_the_replica_that_answers():
    """Long prompts are computed by the prefill replica, unless the other one has their pages."""
    world = World()
    world.gate_is_open = True
    with _serving(1, world, num_prefill=1) as dispatcher:
        assert [state.role for state in dispatcher.replicas] == ["decode", "prefill"]
        for name, prompt in (("long", PROMPT), ("short", [1, 2]), ("again", PROMPT)):
            assert dispatcher.submit(call(name, prompt)).result(WAIT_S).token_ids == ANSWER
        scored = SamplingParams(prompt_logprobs=0)
        other = make_call("scored", [50, *PROMPT], scored, priority=0, page_size=PAGE_SIZE)
        assert dispatcher.submit(other).result(WAIT_S).error is None
    assert world.prefilled == [("long", 1)]
    assert world.taken == {"long": "KV of long", "short": None, "again": None, "scored": None}
    assert set(world.asked_whom.values()) == {0}


def test_a_prompt_is_computed_again_if_its_prefill_replica_dies():
    """The replica that answers gets no KV, and a new process takes the other one's seat."""
    world = World()
    world.gate_is_open = world.prefills_die = True
    with _serving(1, world, num_prefill=1) as dispatcher:
        assert dispatcher.submit(call("r", PROMPT)).result(WAIT_S).token_ids == ANSWER
        assert world.taken == {"r": None}
        until(lambda: dispatcher.replicas[1].started is not None)
        assert [state.num_deaths for state in dispatcher.replicas] == [0, 1]
        world.prefills_die = False
        assert dispatcher.submit(call("s", [9, *PROMPT])).result(WAIT_S).error is None
        assert world.taken["s"] == "KV of s"


def test_the_kv_is_sent_again_if_the_replica_that_answers_dies():
    """The prefill replica is asked again, and a stream repeats no token."""
    world, pieces = World(), []
    with _serving(2, world, num_prefill=1) as dispatcher:
        future = dispatcher.submit(call("r", PROMPT), pieces.append)
        until(lambda: len(_joined(pieces)[0]) == 5)
        world.taken.clear()
        world.replicas[world.asked_whom["r"]].is_dead = True
        world.gate_is_open = True
        assert future.result(WAIT_S).token_ids == ANSWER and world.asked["r"] == 2
    assert world.taken == {"r": "KV of r"} and _joined(pieces)[0] == ANSWER
    assert world.prefilled == [("r", 2)] * 2


def test_no_prompt_is_computed_while_no_replica_can_answer():
    """The request waits for a decode replica, and is cancelled without one."""
    world = World()
    world.gate_is_open = True
    with _serving(1, world, num_prefill=1) as dispatcher:
        world.starts_wait = True
        dispatcher.submit(call("deadly", "deadly"))
        until(lambda: dispatcher.replicas[0].num_deaths == 1)
        future, other = (dispatcher.submit(call(name, PROMPT)) for name in ("r", "s"))
        dispatcher.cancel("s")
        assert other.result(WAIT_S).finish_reason == "cancelled" and not world.prefilled
        dispatcher.cancel("deadly")
        world.starts_wait = False
        assert future.result(WAIT_S).token_ids == ANSWER
    assert world.prefilled == [("r", 1)] and world.taken["r"] == "KV of r"


def test_another_replica_answers_if_the_chosen_one_dies_meanwhile():
    """The work is reserved before the prompt is computed, and is not left over after a death."""
    world = World()
    world.gate_is_open, world.prefills_wait = True, True
    with _serving(2, world, num_prefill=1) as dispatcher:
        future = dispatcher.submit(call("r", PROMPT))
        until(lambda: len(world.prefilled) == 1)
        [chosen] = [i for i in (0, 1) if dispatcher.replicas[i].work]
        assert not world.asked
        world.replicas[chosen].is_dead = True
        assert dispatcher.stats().num_steps  # which notices the death
        world.prefills_wait = False
        assert future.result(WAIT_S).token_ids == ANSWER and world.asked["r"] == 1
    assert world.asked_whom["r"] != chosen


def test_prefill_replicas_alone_answer_nothing():
    """When no replica that answers will serve again, requests fail; one for prompts cannot help."""
    world = World()
    with _serving(1, world, num_prefill=1) as dispatcher:
        world.start_errors = [InvalidConfigError("the weights are gone")]
        future = dispatcher.submit(call("deadly", "deadly"))
        assert isinstance(future.result(WAIT_S).error, ReplicaDiedError)


def test_a_stream_ends_as_its_request_does():
    """Two deaths, a cancellation and `close` each give one end, even if the sink raises."""
    world, pieces = World(), {name: [] for name in ("deadly", "cancelled", "closed")}

    def fail(piece: Piece) -> None:
        raise ValueError("a consumer's own fault")

    with _serving(2, world) as dispatcher:
        deadly = dispatcher.submit(call("deadly", "deadly"), pieces["deadly"].append)
        assert isinstance(deadly.result(WAIT_S).error, ReplicaDiedError)
        futures = [
            dispatcher.submit(call(name), sink)
            for name, sink in (
                ("cancelled", pieces["cancelled"].append),
                ("closed", pieces["closed"].append),
                ("fails", fail),
            )
        ]
        until(lambda: world.asked["cancelled"] and world.asked["closed"] and world.asked["fails"])
        dispatcher.cancel("cancelled")
        dispatcher.cancel("fails")
        assert [futures[i].result(WAIT_S).finish_reason for i in (0, 2)] == ["cancelled"] * 2
        dispatcher.close()
        assert isinstance(futures[1].result(WAIT_S).error, RuntimeClosedError)
    ends = {name: [r for r in _joined(each)[2] if r] for name, each in pieces.items()}
    assert ends == {"deadly": ["error"], "cancelled": ["cancelled"], "closed": ["error"]}
    assert _joined(pieces["closed"])[0] == ANSWER[:5]


def test_a_fault_of_the_code_ends_its_request_and_its_stream():
    """They end with a typed error that has the fault as its cause; the replica continues."""
    world, pieces = World(), []
    with _serving(1, world) as dispatcher:
        error = dispatcher.submit(call("odd", "odd"), pieces.append).result(WAIT_S).error
        assert isinstance(error, EngineFailedError) and isinstance(error.__cause__, LookupError)
        assert _joined(pieces) == ((), "", ["error"])
        world.gate_is_open = True
        assert dispatcher.submit(call("next")).result(WAIT_S).error is None


def test_requests_are_shared_out():
    """Unrelated requests go to the least work; each caller gets its own answer."""
    world = World()
    with _serving(3, world) as dispatcher:
        futures = _submit_all(dispatcher, world, 9)
        assert [state.num_unfinished for state in dispatcher.replicas] == [3, 3, 3]
        world.gate_is_open = True
        assert [f.result(WAIT_S).text for f in futures] == [f"r{i}" for i in range(9)]


def test_turns_go_where_the_answers_before_were_given():
    """This includes pages that only the answer fills; after a death turns go elsewhere."""
    world = World()
    world.gate_is_open = True
    with _serving(3, world) as dispatcher:
        prompts = {name: [10 + i] * PAGE_SIZE for i, name in enumerate("abc")}
        for name, prompt in prompts.items():
            dispatcher.submit(call(name, prompt)).result(WAIT_S)
        assert sorted(world.asked_whom.values()) == [0, 1, 2]
        world.gate_is_open = False
        home = world.asked_whom["a"]
        # This work outweighs the prompt's one page, but not the pages of the answer.
        busy = dispatcher.submit(call("busy", prompts["a"], max_tokens=20))
        until(lambda: world.asked_whom.get("busy") == home)
        later = dispatcher.submit(call("later", [*prompts["a"], *ANSWER, 1, 2, 3]))
        until(lambda: "later" in world.asked_whom)
        assert world.asked_whom["later"] == home
        world.replicas[home].kill()
        until(lambda: world.asked_whom["later"] != home)
        world.gate_is_open = True
        assert busy.result(WAIT_S).error is None and later.result(WAIT_S).error is None


def test_a_death_loses_nothing():
    """Its requests are answered by another replica, once; the dead one is replaced."""
    world = World()
    with _serving(2, world) as dispatcher:
        futures = _submit_all(dispatcher, world, 6)
        lost = set(world.replicas[0].open)
        world.replicas[0].kill()
        until(lambda: sum(world.asked.values()) == 9)
        assert set(world.replicas[1].open) == {f"r{i}" for i in range(6)}
        until(lambda: all(state.started for state in dispatcher.replicas))
        assert [state.num_deaths for state in dispatcher.replicas] == [1, 0]
        assert len(world.replicas) == 3
        world.gate_is_open = True
        assert all(f.result(WAIT_S).error is None for f in futures)
        assert {name for name, count in world.asked.items() if count == 2} == lost


def test_a_second_death_fails_that_request_alone():
    """A request that kills replicas kills two and fails; the other requests are answered."""
    world = World()
    with _serving(3, world) as dispatcher:
        other = _submit_all(dispatcher, world, 1)[0]
        deadly = dispatcher.submit(call("poison", "deadly")).result(WAIT_S)
        assert isinstance(deadly.error, ReplicaDiedError)
        assert "two replicas died" in str(deadly.error) and deadly.finish_reason == "error"
        assert world.asked["poison"] == 2
        world.gate_is_open = True
        assert other.result(WAIT_S).error is None
        until(lambda: all(state.started for state in dispatcher.replicas))
        later = [dispatcher.submit(call(f"later-{i}")) for i in range(6)]
        assert all(f.result(WAIT_S).error is None for f in later)


def test_the_only_replica_is_waited_for():
    """Requests wait while it is replaced, also those that are submitted then."""
    world = World()
    with _serving(1, world) as dispatcher:
        first = _submit_all(dispatcher, world, 1)[0]
        assert dispatcher.is_serving
        world.starts_wait = True
        world.replicas[0].kill()
        until(lambda: dispatcher.replicas[0].num_deaths == 1)
        second = dispatcher.submit(call("r1"))
        world.gate_is_open = True
        time.sleep(0.02)
        assert not first.done() and not second.done()
        assert not dispatcher.is_serving
        world.starts_wait = False
        assert first.result(WAIT_S).text == "r0" and second.result(WAIT_S).text == "r1"


def test_a_replica_that_cannot_be_replaced():
    """The others continue without it; if no replica is left, requests fail with the reason."""
    world = World()
    with _serving(2, world) as dispatcher:
        world.gate_is_open = True
        world.start_errors = [InvalidConfigError("the disk is gone") for _ in range(2)]
        world.replicas[0].kill()
        for i in range(4):
            assert dispatcher.submit(call(f"a{i}", f"other {i}")).result(WAIT_S).error is None
        until(lambda: dispatcher.replicas[0].error is not None)
        world.replicas[1].kill()
        error = dispatcher.submit(call("b")).result(WAIT_S).error
        assert isinstance(error, ReplicaDiedError) and "the disk is gone" in str(error)


def test_starts_are_tried_again_after_deaths_only():
    """A process that dies while loading is replaced twice; an invalid model is not retried."""
    world = World()
    world.start_errors = [ReplicaDiedError("killed") for _ in range(2)]
    with _serving(1, world):
        assert len(world.replicas) == 3
    world = World()
    world.start_errors = [CheckpointError("x", ["it is empty"], "fetch it again")]
    dispatcher = Dispatcher(world.make, 1, page_size=PAGE_SIZE)
    with pytest.raises(CheckpointError, match="it is empty"):
        dispatcher.start()[0].result(WAIT_S)
    dispatcher.close()
    assert len(world.replicas) == 1


def test_cancel_wherever_a_request_is():
    """With a replica the completion has the tokens so far; without one, or after a death, none."""
    world = World()
    with _serving(1, world) as dispatcher:
        first, second = _submit_all(dispatcher, world, 2)
        dispatcher.cancel("r0")
        assert first.result(WAIT_S).finish_reason == "cancelled"
        world.starts_wait = True
        world.replicas[0].kill()
        until(lambda: dispatcher.replicas[0].num_deaths == 1)
        waiting = dispatcher.submit(call("r2"))
        for name in ("r1", "r2", "unknown"):
            dispatcher.cancel(name)
        assert second.result(WAIT_S).finish_reason == "cancelled"
        assert waiting.result(WAIT_S).finish_reason == "cancelled"
        assert world.asked == {"r0": 1, "r1": 1}
        world.starts_wait = False


def test_close_ends_everything():
    """Unfinished requests end with the error, replicas are killed, and later calls raise."""
    world = World()
    dispatcher = Dispatcher(world.make, 2, page_size=PAGE_SIZE)
    for started in dispatcher.start():
        started.result(WAIT_S)
    futures = [dispatcher.submit(call(f"r{i}")) for i in range(50)]
    dispatcher.close()
    dispatcher.close()
    dispatcher.cancel("r0")
    assert all(isinstance(f.result(WAIT_S).error, RuntimeClosedError) for f in futures)
    assert all(replica.is_dead for replica in world.replicas)
    with pytest.raises(RuntimeClosedError):
        dispatcher.submit(call("late"))


def test_stats_are_those_of_all_processes():
    """Counters are summed and sizes are not; those of a dead process stay, its pages do not."""
    world = World()
    # The dispatcher closes first, which ends what a thread still waits for.
    with ThreadPoolExecutor() as threads, _serving(3, world) as dispatcher:
        stats = dispatcher.stats()
        assert stats.num_tokens == stats.busy_s == 3 * EACH_COUNTER
        assert stats.max_pages_owned == stats.num_pages == stats.weights_bytes == EACH_COUNTER
        world.starts_wait = True
        world.replicas[1].kill()
        stats = dispatcher.stats()
        assert stats.num_tokens == 3 * EACH_COUNTER
        assert stats.num_pages_owned == stats.num_host_pages == 2 * EACH_COUNTER
        assert [state.num_deaths for state in dispatcher.replicas] == [0, 1, 0]
        world.replicas[0].kill()
        world.replicas[2].kill()
        waiting = threads.submit(dispatcher.stats)
        until(lambda: all(state.num_deaths for state in dispatcher.replicas))
        with pytest.raises(ReplicaDiedError, match="no replica serves now"):
            dispatcher.stats(wait=False)
        assert not waiting.done()
        world.starts_wait = False
        assert waiting.result(WAIT_S).num_tokens >= (3 + 1) * EACH_COUNTER
        # One that dies while it starts is not counted.
        until(lambda: all(state.started is not None for state in dispatcher.replicas))
        world.starts_wait = True
        for replica in world.replicas:
            replica.kill()
        waiting = threads.submit(dispatcher.stats)
        until(lambda: sum(state.num_deaths for state in dispatcher.replicas) == 6)
        dispatcher.close()
        with pytest.raises(RuntimeClosedError):
            waiting.result(WAIT_S)
    with pytest.raises(RuntimeClosedError):
        dispatcher.stats()


def test_stats_that_do_not_wait_notice_a_death():
    """Where they find that the last replica has died, they raise and do not wait for another."""
    world = World()
    with _serving(1, world) as dispatcher:
        assert dispatcher.stats(wait=False).num_tokens == EACH_COUNTER
        world.starts_wait = True
        world.replicas[0].kill()
        with pytest.raises(ReplicaDiedError, match="no replica serves now"):
            dispatcher.stats(wait=False)
        world.starts_wait = False
        assert dispatcher.stats().num_tokens == 2 * EACH_COUNTER


def test_ids_are_unique_over_all_replicas():
    """A running id is refused, and is free when its completion is there."""
    world = World()
    with _serving(2, world) as dispatcher:
        running = _submit_all(dispatcher, world, 1)[0]
        with pytest.raises(InvalidRequestError, match="'r0' is still running"):
            dispatcher.submit(call("r0", "other"))
        world.gate_is_open = True
        assert running.result(WAIT_S).error is None
        for _ in range(50):
            assert dispatcher.submit(call("r0")).result(WAIT_S).error is None


def test_what_waits_for_replicas_is_refused_on_the_dispatchers_thread():
    """A call by a stream's sink would deadlock; it raises, and the stream continues."""
    world, refused = World(), []
    world.gate_is_open = True

    def look(piece: Piece) -> None:
        with pytest.raises(InvalidRequestError, match="on another thread"):
            dispatcher.stats()
        refused.append(piece)

    with _serving(1, world) as dispatcher:
        assert dispatcher.submit(call("r"), look).result(WAIT_S).token_ids == ANSWER
        assert _joined(refused)[0] == ANSWER
