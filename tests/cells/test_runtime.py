"""A runtime of cells computes what its cells compute one by one, whatever else runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.cells import BatchMaker, Cell, CellRuntime, Graph, Repeat
from jaxserve.core.errors import (
    CyclicGraphError,
    DeviceMemoryError,
    DownloadError,
    EmptyGraphError,
    EngineFailedError,
    InputMismatchError,
    InvalidCellError,
    InvalidConfigError,
    InvalidGraphError,
    InvalidRequestError,
    MissingInputError,
    NumericalError,
    RuntimeClosedError,
    TooManyNodesError,
    UnfoldError,
)
from jaxserve.testing import ExecutorWrapper
from tests.cells import modules
from tests.cells.models.alone import evaluate
from tests.cells.modules import SIZE, distance

CELLS = modules.cells()
RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(12, SIZE)).astype(np.float32)
TOLERANCE = 1e-5


# A request is a function that returns its graph.
Item = Callable[[], Any]


def unfold(item: Item) -> Any:
    """Return the graph of a request."""
    return item()


def sentence(*tokens: int, every_step: bool = False) -> Item:
    """Return a chain."""
    return partial(modules.sentence_graph, CELLS, tokens, every_step=every_step)


def answer(state: int, max_steps: int = 12) -> Item:
    """Return a loop that starts with one of `STATES`."""

    def graph() -> Graph:
        given = {"h": STATES[state], "bias": STATES[state - 1]}
        found = CELLS["decode"](token=0, max_steps=max_steps, **given)
        merged = CELLS["merge"](left=found["h"], right=found["h"])
        steps = {"tokens": found.steps("token"), "last": found["token"], "merged": merged["h"]}
        return Graph(steps)

    return graph


def root(value: float) -> Item:
    """Return a square root."""
    return lambda: Graph({"root": CELLS["root"](x=value, number=4, use=True)["x"]})


def raises(error: Exception) -> Item:
    """Return a request that cannot be unfolded."""

    def graph() -> Graph:
        raise error

    return graph


def missing() -> Graph:
    """Return a node without its input."""
    return Graph({"x": CELLS["embed"]()["x"]})


def cycle() -> Graph:
    """Return a graph of two nodes that take each other's outputs."""
    inputs = [{"left": (1, "h"), "right": 0.0}, {"left": (0, "h"), "right": 0.0}]
    return Graph.from_edges([CELLS["merge"]] * 2, inputs, {"h": (1, "h")})


def million() -> Graph:
    """Return a chain of a million nodes."""
    given = {"token": np.zeros(10**6, np.int32)}
    return Graph({"h": CELLS["decoder"].chain(given, {"h": "h"}, h=0.0, bias=0.0)["h"]})


def search(state: int) -> Graph:
    """Return two candidates; the host makes two steps from the one with the larger norm."""
    candidates = [CELLS["decoder"](token=token, h=STATES[state], bias=0.0) for token in (1, 2)]

    def then(values: dict[str, np.ndarray]) -> Any:
        best = int(np.argmax(np.linalg.norm(values["h"], axis=-1)))
        after = CELLS["decoder"](token=best, h=candidates[best]["h"], bias=STATES[0])
        return Graph({"h": after["h"]}, then=lambda last: {"h": last["h"], "best": best})

    states = [candidate["h"] for candidate in candidates]
    return Graph({"h": states}, then=then, keep=states)


def needs_much() -> Graph:
    """Return a graph whose `then` returns four nodes beside a value that was kept."""
    first = CELLS["decoder"](token=1, h=0.0, bias=0.0)

    def then(values: dict[str, np.ndarray]) -> Graph:
        nodes = [CELLS["decoder"](token=t, h=first["h"], bias=0.0) for t in range(4)]
        return Graph({"h": [node["h"] for node in nodes]})

    return Graph({"h": first["h"]}, then=then, keep=[first["h"]])


def wrong_then(kind: str) -> Graph:
    """Return a graph whose `then` raises, takes a value that was not kept, or returns a number."""
    first = CELLS["embed"](token=1)

    def then(values: dict[str, np.ndarray]) -> Any:
        if kind == "takes":
            merged = CELLS["merge"](left=first["x"], right=first["x"])
            return Graph({"h": merged["h"]})
        return 1 / 0 if kind == "raises" else 3

    return Graph({"x": first["x"]}, then=then)


def check(item: Item, completion: Any) -> None:
    """Compare a completion with the same computed node by node."""
    assert completion.error is None
    expected = evaluate(unfold(item))
    assert completion.values.keys() == expected.keys()
    for name, value in expected.items():
        if np.issubdtype(np.asarray(value).dtype, np.integer):
            np.testing.assert_array_equal(completion[name], value)
        else:
            assert distance(completion[name], value) < TOLERANCE
    is_cut = expected.get("last", modules.END) != modules.END
    assert completion.finish_reason == ("length" if is_cut else "stop")


def random_items(num: int, seed: int) -> list[Item]:
    """Return requests of all kinds."""
    rng = np.random.default_rng(seed)

    def tree(num_leaves: int) -> Any:
        if num_leaves == 1:
            return int(rng.integers(modules.VOCAB))
        left = int(rng.integers(1, num_leaves))
        return tree(left), tree(num_leaves - left)

    def item(kind: int) -> Item:
        if kind == 0:
            tokens = rng.integers(modules.VOCAB, size=rng.integers(1, 9))
            return sentence(*tokens.tolist(), every_step=bool(rng.integers(2)))
        if kind == 1:
            return partial(modules.tree_graph, CELLS, tree(int(rng.integers(2, 9))))
        state = int(rng.integers(len(STATES)))
        if kind == 2:
            return answer(state, int(rng.integers(1, 13)))
        return partial(search, state) if kind == 3 else root(float(rng.random()))

    return [item(int(kind)) for kind in rng.integers(5, size=num)]


@pytest.fixture(scope="module")
def runtime() -> Iterator[CellRuntime]:
    """A runtime of all cells on one device."""
    with CellRuntime(list(CELLS.values()), unfold, slot_memory="64KiB", progress=False) as rt:
        yield rt


def test_every_kind_alone_and_in_a_mix(runtime: CellRuntime):
    """Chains, trees, loops and searches are right, and all slots are free afterwards."""
    items = random_items(40, 0)
    for item, completion in zip(items, runtime.generate(items), strict=True):
        check(item, completion)
    for item in items[:6]:
        check(item, runtime.generate([item])[0])
    runtime.check_integrity()


def test_nothing_compiles_after_the_warm_up(runtime: CellRuntime):
    """A random workload calls executables that exist."""
    compiled = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        runtime.generate(random_items(20, 1))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_bad_input_fails_alone(runtime: CellRuntime):
    """Each has its own typed error, and the neighbours are right."""
    good = random_items(11, 2)
    bad = {
        missing: MissingInputError,
        (lambda: "no graph"): InvalidGraphError,
        raises(KeyError("unknown")): UnfoldError,
        raises(DownloadError("no file")): DownloadError,
        root(-1.0): NumericalError,
        sentence(*[1] * 500): TooManyNodesError,
        million: TooManyNodesError,
        cycle: CyclicGraphError,
        (lambda: CELLS["merge"](left=STATES[0][1:], right=0.0)): InputMismatchError,
        (lambda: Graph({})): EmptyGraphError,
        root(-4.0): NumericalError,
    }
    mixed = [item for pair in zip(good, bad, strict=True) for item in pair]
    completions = runtime.generate(mixed)
    for item, completion in zip(good, completions[::2], strict=True):
        check(item, completion)
    for error, completion in zip(bad.values(), completions[1::2], strict=True):
        assert completion.finish_reason == "error"
        assert type(completion.error) is error
    assert "node 0 (cell 'root')" in str(completions[9].error)
    runtime.check_integrity()


class Log(nnx.Module):
    """The logarithm, which is infinite for 0 and NaN for negative numbers."""

    def __call__(self, x):
        return {"x": jnp.log(x)}


def test_infinite_values_may_be_allowed():
    """For a cell that says so; NaN is an error in any case."""
    module, number = Log(), {"x": jax.ShapeDtypeStruct((), jnp.float32)}
    strict = Cell(module, number, name="strict", batch_sizes=(4,))
    lax = Cell(module, number, name="lax", batch_sizes=(4,), allows_infinite=True)
    repeated = Repeat(lax, {"x": "x"}, name="repeated")

    def logs(given: tuple[Cell, float]) -> Graph:
        cell, value = given
        node = cell(value, max_steps=1) if cell is repeated else cell(value)
        return Graph({"x": node["x"]})

    given = [(cell, value) for cell in (strict, lax, repeated) for value in (0.0, -1.0)]
    with CellRuntime([strict, lax, repeated], logs, warmup=False, progress=False) as rt:
        done = rt.generate(given)
    assert [done[2]["x"], done[4]["x"]] == [-np.inf, -np.inf]
    for number in (0, 1, 3, 5):
        assert isinstance(done[number].error, NumericalError)
    assert "allows_infinite" in str(done[0].error)


def test_a_bad_single_input_is_refused(runtime: CellRuntime):
    """It is refused at submission, with its cause."""
    with pytest.raises(MissingInputError, match="cell 'embed'"):
        runtime.submit(missing)
    with pytest.raises(UnfoldError, match="KeyError") as caught:
        runtime.submit(raises(KeyError("unknown")))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("raises", UnfoldError, "ZeroDivisionError"),
        ("returns", UnfoldError, "must return a Graph"),
        ("takes", InvalidGraphError, "keep"),
    ],
)
def test_a_then_that_fails_ends_its_request(runtime: CellRuntime, kind, error, message):
    """With the values that it had, and a typed error; the neighbour is right."""
    failed, good = runtime.generate([partial(wrong_then, kind), root(4.0)])
    assert isinstance(failed.error, error) and message in str(failed.error)
    assert failed["x"].shape == (SIZE,)
    check(root(4.0), good)
    runtime.check_integrity()


def test_more_searches_than_slots():
    """Values that a `then` did not keep are freed, so requests that wait do not stop each other.

    A request whose next graph needs more than there is ends alone.
    """
    items: list[Item] = [partial(search, number % len(STATES)) for number in range(12)]
    items.insert(5, needs_much)
    memory = 6 * 136  # four slots for values of each shape
    options = {"slot_memory": memory, "warmup": False, "progress": False}
    with CellRuntime([CELLS["decoder"]], unfold, **options) as rt:
        completions = rt.generate(items)
        rt.check_integrity()
    for item, completion in zip(items, completions, strict=True):
        if item is needs_much:
            assert isinstance(completion.error, DeviceMemoryError)
        else:
            check(item, completion)


def test_values_are_streamed(runtime: CellRuntime):
    """Steps of loops and members of lists come in order, and errors at the end."""
    item = answer(3)
    pieces = list(runtime.stream(item))
    tokens = [int(piece.value) for piece in pieces if piece.name == "tokens"]
    assert tokens == evaluate(unfold(item))["tokens"].tolist()
    assert [piece.index for piece in pieces if piece.name == "tokens"] == list(range(len(tokens)))
    members = [
        p.index for p in runtime.stream(sentence(1, 2, 3, every_step=True)) if p.name == "all"
    ]
    assert members == [0, 1, 2]
    with pytest.raises(NumericalError):
        list(runtime.stream(root(-1.0)))


def test_asyncio_twins(runtime: CellRuntime):
    item = answer(5)

    async def run() -> tuple[Any, list[Any]]:
        (completion,) = await runtime.agenerate([item])
        return completion, [piece async for piece in runtime.astream(item)]

    completion, pieces = asyncio.run(run())
    check(item, completion)
    tokens = [int(piece.value) for piece in pieces if piece.name == "tokens"]
    assert completion["tokens"].tolist() == tokens


def test_cancelled_requests_leave(runtime: CellRuntime):
    """They end with what they have; the others are right, and their slots are free."""
    items = random_items(30, 3)
    pending = [runtime.submit(item, request_id=f"r{i}") for i, item in enumerate(items)]
    for one in pending[::3]:
        one.cancel()
    runtime.cancel("unknown")
    for number, (item, one) in enumerate(zip(items, pending, strict=True)):
        completion = one.result(60)
        if number % 3 or completion.finish_reason != "cancelled":
            check(item, completion)
    runtime.check_integrity()


def test_ids_of_running_requests_are_unique(runtime: CellRuntime):
    """An id may be used again when its request has ended."""
    started, release = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        started.set()
        release.wait(60)

    first = runtime.submit(sentence(1, 2), request_id="same", on_piece=hold)
    started.wait(60)
    with pytest.raises(InvalidRequestError, match="same"):
        runtime.submit(sentence(1, 2), request_id="same")
    release.set()
    first.result(60)
    with pytest.raises(InvalidRequestError, match="reserved"):
        runtime.submit(sentence(1, 2), request_id="cells-1")
    with pytest.raises(InvalidRequestError, match="request_id=3"):
        runtime.submit(sentence(1, 2), request_id=3)


def test_the_records_make_a_report(runtime: CellRuntime):
    """Tasks are steps, named after their cells."""
    completion = runtime.generate([sentence(1, 2, 3)])[0]
    assert completion.num_nodes == 6
    timing = completion.timing
    assert timing.arrival_s <= timing.admitted_s <= timing.first_token_s <= timing.finished_s
    report = runtime.report()
    assert report.policy == "batchmaker"
    assert {"embed", "recurrent"} <= {step.kind for step in report.steps}
    assert report.figures()["num_requests"] >= 1
    stats = runtime.stats()
    assert stats.num_calls < stats.num_tasks < stats.num_nodes


@pytest.mark.release
def test_eight_devices():
    """Values follow the nodes that take them; bad and cancelled requests harm no others."""
    options = {"devices": jax.devices()[:8], "max_tasks_to_submit": 1, "max_in_flight": 1}
    items = random_items(120, 4)
    errors = {root(-1.0): NumericalError, partial(wrong_then, "takes"): InvalidGraphError}
    items[5::20], items[9::40] = ([item] * num for item, num in zip(errors, (6, 3), strict=True))
    options |= {"slot_memory": "64KiB", "warmup": False, "progress": False}
    with CellRuntime(list(CELLS.values()), unfold, **options) as rt:
        pending = []
        for number, item in enumerate(items):
            pending.append(rt.submit(item))
            if number % 5 == 4:
                pending[number - 2].cancel()
        completions = [one.result(60) for one in pending]
        assert {step.group for step in rt.report().steps} == set(range(8))
        rt.check_integrity()
    num_right = 0
    for item, completion in zip(items, completions, strict=True):
        if completion.finish_reason == "cancelled":
            continue
        if item in errors:
            assert type(completion.error) is errors[item]
        else:
            check(item, completion)
            num_right += 1
    assert num_right > 80


def test_inputs_run_while_others_are_unfolded():
    """A batch is handed over in chunks, and one whose inputs end with an error is cancelled."""
    has_run = threading.Event()

    def then(values: dict[str, np.ndarray]) -> Any:
        has_run.set()
        return values

    def inputs() -> Iterator[int]:
        yield from range(64)
        assert has_run.wait(60)
        raise OSError("no more inputs")

    def embedded(token: int) -> Graph:
        return Graph({"x": CELLS["embed"](token=token % 5)["x"]}, then=then)

    with CellRuntime([CELLS["embed"]], embedded, warmup=False, progress=False) as rt:
        with pytest.raises(OSError, match="no more"):
            rt.generate(inputs())
        assert rt.generate([1])[0].error is None


def test_a_callback_may_close_the_runtime():
    """Requests that have not ended are cancelled."""
    rt = CellRuntime([CELLS["embed"], CELLS["recurrent"]], unfold, warmup=False, progress=False)
    others = [rt.submit(sentence(*[1] * 30)) for _ in range(3)]
    first = rt.submit(sentence(1, 2), on_piece=lambda piece: rt.close())
    assert first.result(60).finish_reason == "stop"
    assert {one.result(60).finish_reason for one in others} <= {"stop", "cancelled"}


def test_close_ends_everything():
    """Requests that have begun are cancelled, and later calls raise."""
    rt = CellRuntime([CELLS["embed"], CELLS["recurrent"]], unfold, warmup=False)
    pending = [rt.submit(sentence(*[1] * 8)) for _ in range(20)]
    rt.close()
    reasons = {one.result(60).finish_reason for one in pending}
    assert reasons <= {"stop", "cancelled", "error"}
    with pytest.raises(RuntimeClosedError):
        rt.submit(sentence(1, 2))
    with pytest.raises(RuntimeClosedError):
        rt.generate([])


class Broken(ExecutorWrapper):
    """An executor that fails at its first task."""

    def submit(self, worker: int, tasks: Any) -> Any:
        raise ValueError("broken")


def test_a_failed_device_fails_all():
    """Every request ends with the same typed error."""
    cells = [CELLS["embed"], CELLS["recurrent"]]
    with CellRuntime(cells, unfold, warmup=False, wrap_executor=Broken) as rt:
        completions = rt.generate([sentence(1, 2), sentence(3)])
        assert {type(c.error) for c in completions} == {EngineFailedError}
        with pytest.raises(EngineFailedError, match="broken"):
            rt.submit(sentence(1, 2))


def test_options_are_checked():
    """Each bad option has an error that names it."""
    cells = [CELLS["embed"]]
    for options in (
        *({"max_in_flight": 0}, {"max_nodes": 0}, {"devices": []}),
        {"max_tasks_to_submit": 0, "policy": BatchMaker()},
    ):
        with pytest.raises(InvalidConfigError, match=next(iter(options))):
            CellRuntime(cells, unfold, warmup=False, **options)
    with pytest.raises(InvalidConfigError, match="slot_memory"):
        CellRuntime(cells, unfold, warmup=False, slot_memory=100)
    with pytest.raises(InvalidCellError):
        CellRuntime([], unfold)
