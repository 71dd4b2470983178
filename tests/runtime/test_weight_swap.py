"""Updates of weights that fail in their middle, weights that a cast breaks, and prepared ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, final

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import (
    DeviceMemoryError,
    EngineFailedError,
    InvalidParamsError,
    JaxserveError,
)
from jaxserve.engine.answers import Weights
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.runtime.weight_update import swap
from jaxserve.sharding import make_mesh
from jaxserve.testing import SlowExecutor, WrapAll, tiny
from jaxserve.testing.executors import ExecutorWrapper
from jaxserve.testing.tiny import random_prompts, tiny_llama
from tests.common.tiers import some
from tests.common.waiting import until
from tests.runtime.serving import pointers, weights

OPTIONS: dict[str, Any] = tiny.OPTIONS | {"policy": "auto"}
PROMPTS = random_prompts(6, longest=30)
EACH = SamplingParams(max_tokens=20)


@pytest.fixture(scope="module")
def answers() -> dict[int, list[tuple[int, ...]]]:
    """The answers by seed of the weights."""
    tokens = {}
    for seed in (0, 1):
        with Runtime(tiny_llama(seed), **OPTIONS) as rt:
            tokens[seed] = [c.token_ids for c in rt.generate(PROMPTS, EACH)]
    return tokens


def _answers(rt: Runtime, version: int) -> list[tuple[int, ...]]:
    """Return the tokens of all prompts, which have this version."""
    done = rt.generate(PROMPTS, EACH)
    assert {v for c in done for v in c.weights_versions} == {version} == {rt.weights_version}
    return [c.token_ids for c in done]


@final
class _Faulty(ExecutorWrapper):
    """Raises an error once: in `fitted`, when it has other parameters, or at their fingerprint."""

    def __init__(self, inner: Any):
        super().__init__(SlowExecutor(inner, 0.01))
        self.errors: dict[str, BaseException] = {}

    def _fail(self, at: str) -> None:
        if at in self.errors:
            raise self.errors.pop(at)

    def fitted(self, params: Any, *, partial: bool = False) -> Any:
        self._fail("fitted")
        return self.inner.fitted(params, partial=partial)

    def update_params(self, params: Any) -> None:
        self.inner.update_params(params)
        self._fail("update_params")

    @property
    def host_memory(self) -> HostMemory | None:
        memory = self.inner.host_memory
        return None if memory is None else replace(memory, fingerprint=self.fingerprint)

    def fingerprint(self) -> bytes:
        self._fail("fingerprint")
        return self.inner.fingerprint()


@pytest.mark.release
@pytest.mark.parametrize("num_replicas", some([1, 2]))
@pytest.mark.parametrize(
    ("at", "error"),
    some(
        [
            ("update_params", RuntimeError("a device failed")),
            ("fingerprint", OSError("the disk tier failed")),
            ("update_params", KeyboardInterrupt("Ctrl-C")),
        ]
    ),
    ids=["device", "disk", "interrupt"],
)
def test_an_update_that_fails_in_its_middle_is_undone(answers, tmp_path, num_replicas, at, error):
    """Requests that run, and later ones, have the old weights on all replicas; the next one works.

    The last replica fails, when the first has the new weights already.
    """
    executors = WrapAll(_Faulty)
    mesh = None if num_replicas == 1 else make_mesh(data=num_replicas)
    disk = dict(disk_memory="4MB", disk_folder=tmp_path, host_memory="100kB")
    with Runtime(tiny_llama(0), mesh=mesh, wrap_executor=executors, **OPTIONS | disk) as rt:
        assert _answers(rt, 0) == answers[0]
        running = [rt.submit(prompt, EACH) for prompt in PROMPTS]
        executors.executors[-1].errors[at] = error
        with pytest.raises(type(error), match=str(error)):
            rt.update_params(weights(1), running="keep")
        assert not executors.executors[-1].errors
        assert [one.result(60).token_ids for one in running] == answers[0]
        assert {v for one in running for v in one.result().weights_versions} == {0}
        assert _answers(rt, 0) == answers[0]
        rt.check_integrity()
        assert rt.update_params(weights(1), running="keep") == 1
        assert _answers(rt, 1) == answers[1]


@pytest.mark.release
def test_devices_without_room_for_new_weights_serve_the_old_ones(answers):
    executors = WrapAll(_Faulty)
    with Runtime(tiny_llama(0), wrap_executor=executors, **OPTIONS) as rt:
        (executor,) = executors.executors
        executor.errors["fitted"] = RuntimeError("RESOURCE_EXHAUSTED: no room for 9 bytes")
        with pytest.raises(DeviceMemoryError, match="go on serving.*smaller kv_memory"):
            rt.update_params(weights(1))
        assert _answers(rt, 0) == answers[0]


@final
@dataclass
class _Parts:
    """What `swap` uses of a replica: its executor, engine and loop in one."""

    params: str
    fails_at: Callable[[str, str], bool]  # called with a method and its argument
    version: int = 0
    failure: JaxserveError | None = None
    calls: list[str] = field(default_factory=list)

    @property
    def executor(self) -> _Parts:
        return self

    engine = loop = executor

    def _do(self, what: str, argument: str) -> None:
        self.calls.append(what)
        if self.fails_at(what, argument):
            raise LookupError(f"{what} of {argument} failed")

    def update_params(self, params: str) -> None:
        self._do("update_params", params)
        self.params = params

    def name_of(self, version: int) -> str:
        self._do("name_of", self.params)
        return f"{self.params} {version}"

    def weights_changed(self, weights: Weights, name: str, *, keeps_kv: bool) -> None:
        assert name == f"{self.params} {weights.version}" and keeps_kv
        self._do("weights_changed", self.params)
        self.version = weights.version

    def fail(self, error: JaxserveError) -> None:
        self.failure = error


def _swap(fails_at: Callable[[str, str], bool]) -> tuple[_Parts, _Parts]:
    """Swap the weights of two replicas, of which the second fails; return both."""
    first, second = _Parts("old", lambda *_: False), _Parts("old", fails_at)
    try:
        swap(cast(Any, [first, second]), ["new 1", "new 2"], Weights(5), keeps_kv=True)
    except LookupError:
        assert (first.params, second.params) == ("old", "old")
        assert first.failure is second.failure is None and first.version == second.version == 0
    except EngineFailedError as error:
        assert first.failure is second.failure is error
        assert isinstance(error.__cause__, LookupError)
    return first, second


def test_a_swap_is_of_all_replicas_or_none_or_ends_the_runtime():
    """No replica's bookkeeping changes before every executor has the weights and their names."""
    first, second = _swap(lambda *_: False)
    assert (first.version, second.version) == (5, 5)
    assert (first.params, second.params) == ("new 1", "new 2")
    for fails_at in (("update_params", "new 2"), ("name_of", "new 2")):
        first, second = _swap(lambda *call, fails_at=fails_at: call == fails_at)
        assert first.params == "old" and first.failure is None
        assert "weights_changed" not in first.calls
    first, second = _swap(lambda what, _: what == "weights_changed")
    assert "serves no more" in str(first.failure) and first.version == 5
    first, second = _swap(lambda what, params: what == "name_of" or params == "old")
    assert "serves no more" in str(second.failure) and second.version == 0


def _with_norm(params: nnx.State, value: float, dtype: str) -> nnx.State:
    """Return parameters in a dtype, of which the last norm has one such number."""

    def changed(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        array = variable.get_value().astype(dtype)
        is_norm = path[0] == "norm"
        return variable.replace(array.at[0].set(value) if is_norm else array)

    return nnx.map_state(changed, params)


@pytest.mark.release
@pytest.mark.parametrize(
    ("served", "given", "value", "options"),
    some(
        [
            ("float16", "float32", 1e5, {}),
            ("float16", "bfloat16", 1e5, {}),
            ("bfloat16", "float32", 3.4e38, {}),
            ("float16", "float32", 1e5, {"quantize": "int8"}),
        ],
        0,
    ),
)
@pytest.mark.parametrize("as_numpy", some([False, True]))
def test_numbers_that_a_cast_makes_infinite_are_refused(served, given, value, options, as_numpy):
    """The error names the parameter and the dtype; the old weights go on serving."""
    with Runtime(tiny_llama(0, served), **OPTIONS | options) as rt:
        before = _answers(rt, 0)
        # Of a norm, which stays dense.
        large = _with_norm(weights(1), value, given)
        if as_numpy:
            large = jax.tree.map(np.asarray, large)
        with pytest.raises(InvalidParamsError, match=f"norm.*the largest of the model's {served}"):
            rt.update_params(large)
        assert _answers(rt, 0) == before
        fine = _with_norm(weights(1), 3.0, given)
        rt.update_params(jax.tree.map(np.asarray, fine) if as_numpy else fine)
        assert _answers(rt, 1) != before


def test_prepared_weights_are_placed_before_the_pause(answers):
    """They are shared with their owner; the update takes them as they lie."""
    seen = WrapAll()
    with Runtime(tiny_llama(0), wrap_executor=seen, **OPTIONS) as rt:
        new = weights(1)
        prepared = rt.prepare_params(new)
        assert _answers(rt, 0) == answers[0]
        assert rt.update_params(prepared) == 1
        assert pointers(seen.executors[0].params) == pointers(new)
        assert _answers(rt, 1) == answers[1]
        with pytest.raises(InvalidParamsError, match="is missing"):
            rt.prepare_params(nnx.State({}))


def test_prepared_weights_that_were_donated_since_are_refused(answers):
    """The present weights go on serving, on this runtime and after it."""
    with Runtime(tiny_llama(0), **OPTIONS) as rt:
        new = weights(1)
        prepared = rt.prepare_params(new)
        for leaf in jax.tree.leaves(new):
            leaf.delete()  # as a training step does that donates them
        with pytest.raises(InvalidParamsError, match="was deleted since"):
            rt.update_params(prepared)
        assert _answers(rt, 0) == answers[0]


def test_prepared_parts_are_refused_where_there_is_no_rest(answers):
    """The weights were dropped in between; all of them together serve again."""
    flat = nnx.to_flat_state(weights(1))
    part = nnx.from_flat_state([(path, v) for path, v in flat if path[:2] == ("blocks", 0)])
    with Runtime(tiny_llama(0), **OPTIONS) as rt:
        prepared = rt.prepare_params(part, partial=True)
        rt.sleep(drops_weights=True)
        with pytest.raises(InvalidParamsError, match="the weights were dropped"):
            rt.update_params(prepared)
        rt.update_params(weights(1))
        rt.wake_up()
        assert _answers(rt, 1) == answers[1]


def test_prepared_parts_go_on_top_of_what_came_in_between(answers):
    """A part that was prepared before another update keeps that update's other parameters."""
    flat = nnx.to_flat_state(weights(1))
    first = nnx.from_flat_state([(path, v) for path, v in flat if path[:2] == ("blocks", 0)])
    rest = nnx.from_flat_state([(path, v) for path, v in flat if path[:2] != ("blocks", 0)])
    with Runtime(tiny_llama(0), **OPTIONS) as rt, Runtime(tiny_llama(0), **OPTIONS) as other:
        prepared = rt.prepare_params(first, partial=True)
        rt.update_params(rest, partial=True)
        assert _answers(rt, 1) not in (answers[0], answers[1])
        rt.update_params(prepared)
        assert _answers(rt, 2) == answers[1]
        with pytest.raises(InvalidParamsError, match="another runtime has prepared"):
            other.update_params(prepared)


@pytest.mark.release
def test_the_end_of_a_stale_sample_reaches_its_stream_at_once():
    """It does not wait for the request's other sample, which has no token yet and goes on."""
    slow = partial(SlowExecutor, step_s=0.02)
    two = SamplingParams(max_tokens=40, n=2, temperature=1.0, seed=1)
    with Runtime(tiny_llama(0), wrap_executor=slow, **OPTIONS | {"max_slots": 1}) as rt:
        pieces = []
        pending = rt.submit(PROMPTS[0], two, on_piece=pieces.append)
        until(lambda: pieces)
        assert {piece.sample_index for piece in pieces} == {0}
        rt.update_params(weights(1), running="keep", max_staleness=0)
        done = pending.result(60)
    assert [sample.finish_reason for sample in done.samples] == ["error", "length"]
    assert done.samples[1].version_runs == ((1, 40),)
    ends = [i for i, piece in enumerate(pieces) if piece.finish_reason == "error"]
    later = [i for i, piece in enumerate(pieces) if piece.sample_index == 1]
    assert len(ends) == 1 and ends[0] < later[0]
    assert pieces[ends[0]].sample_index == 0 and pieces[ends[0]].weights_version == 0
