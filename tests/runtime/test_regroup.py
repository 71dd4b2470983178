"""Devices that move between the two groups of a runtime: the same answers, and nothing lost."""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import (
    EngineFailedError,
    InvalidConfigError,
    InvalidProfileError,
    RegroupError,
)
from jaxserve.execution import regroup
from jaxserve.execution.executor import StepHandle
from jaxserve.planning import GroupTimes, StepTimes
from jaxserve.planning.schedules.schedule import Division
from jaxserve.planning.step_times import Curve, keep_times
from jaxserve.scheduling.admission import OnDemand
from jaxserve.scheduling.iteration.waa import WAA
from jaxserve.scheduling.plan import StepPlan, StepResult
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import DeviceGroups, StagePlan, make_groups, make_mesh
from jaxserve.testing import ExecutorWrapper, SlowExecutor, WrapAll
from jaxserve.testing.tiny import OPTIONS, random_prompts, tiny_llama

# Pages on demand, so that the groups take back what they have; several iterations of a decode step.
POLICY = replace(
    PRESETS["exegpt_waa_c"],
    name="waa on demand",
    admission=OnDemand(0.0),
    families=(),  # every division of the devices
    iteration=WAA(encode_batch=4, decode_iterations=2),
)
SMALL: dict[str, Any] = OPTIONS | dict(policy=POLICY)
# Of a runtime whose steps are all measured.
FEW_SHAPES = dict(max_slots=2, max_step_tokens=32)
PROMPTS = random_prompts(12, longest=60)
PARAMS = [
    SamplingParams(
        max_tokens=6 + 5 * (i % 5), temperature=0.8 * (i % 2), seed=i, n=1 + (i % 4 == 3)
    )
    for i in range(len(PROMPTS))
]


def _samples(completions):
    return [[s.token_ids for s in completion.samples] for completion in completions]


@pytest.fixture(scope="module")
def wanted():
    """Return the answers of one device under the default policy."""
    with Runtime(tiny_llama(num_heads=8), **OPTIONS) as rt:
        return _samples(rt.generate(PROMPTS, PARAMS))


def _runtime(**options: Any) -> Runtime:
    settings = SMALL | dict(mesh=make_groups(encode=1, decode=2)) | options
    rt = Runtime(tiny_llama(num_heads=8), **settings)
    gc.collect()  # the model, whose arrays would count as another's
    return rt


def _devices(executor: Any) -> list[list[int]]:
    """Return the ids of the devices that hold the weights of each group."""
    return [
        sorted(device.id for device in jax.tree.leaves(group.params)[0].sharding.device_set)
        for group in executor.groups
    ]


@pytest.mark.release
def test_requests_streams_and_conversations_go_on(wanted):
    """Before, through and after moves; then other weights, and another page pool."""
    seen = WrapAll(partial(SlowExecutor, step_s=0.0))
    with _runtime(wrap_executor=seen) as rt:
        (slow,) = seen.executors
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        talk = rt.conversation()
        talk.send(PROMPTS[0], SamplingParams(max_tokens=4))
        slow.step_s = 0.01
        pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
        stream = rt.stream(PROMPTS[4], replace(PARAMS[4], n=1))
        streamed = tuple(next(stream).token_ids)
        assert _devices(slow) == [[0], [1, 2]]
        assert 0 < rt.regroup(encode=2, decode=1, max_pause_s=60) < 60
        assert _devices(slow) == [[0, 1], [2]]
        slow.step_s = 0.0
        for piece in stream:
            streamed += tuple(piece.token_ids)
        assert streamed == wanted[4][0]
        assert _samples([each.result() for each in pending]) == wanted
        assert len(talk.send(PROMPTS[1][:8], SamplingParams(max_tokens=4)).token_ids) == 4
        stats = rt.stats()
        assert stats.num_moves == 1 and 0 < stats.move_pause_s < 60
        rt.check_integrity()

        rt.update_params(nnx.state(tiny_llama(seed=1, num_heads=8)))
        assert _samples(rt.generate(PROMPTS, PARAMS)) != wanted
        rt.regroup(encode=1, decode=1, max_pause_s=60)
        rt.update_params(nnx.state(tiny_llama(num_heads=8)))
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        size = rt.stats().pool_bytes
        rt.resize_kv(size // 2)
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.regroup(encode=1, decode=2, max_pause_s=60)
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted and rt.stats().num_moves == 3


@pytest.mark.release
def test_moves_under_random_cancellations(wanted):
    """Every answer that was not cancelled is whole, and the others are beginnings of it."""
    rng = random.Random(7)
    seen = WrapAll(partial(SlowExecutor, step_s=0.002))
    with _runtime(wrap_executor=seen) as rt:
        for _ in range(3):
            pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
            cancelled = set()
            for encode, decode in ((2, 1), (1, 2)):
                for index in rng.sample(range(len(PROMPTS)), 2):
                    cancelled.add(index)
                    rt.cancel(pending[index].request_id)
                rt.regroup(encode=encode, decode=decode, max_pause_s=60)
                rt.check_integrity()
                time.sleep(0.01 * rng.random())
            found = _samples([each.result() for each in pending])
            for index, samples in enumerate(found):
                for tokens, whole in zip(samples, wanted[index], strict=True):
                    begun = whole[: len(tokens)] if index in cancelled else whole
                    assert tokens == begun
        assert rt.stats().num_moves == 6
        rt.check_integrity()


class _Failing:
    """Places arrays, except at some of its calls, counted from 1."""

    def __init__(self, *fails_at: int):
        self.num_calls = 0
        self._fails_at = fails_at

    def __call__(self, leaf: Any, sharding: Any) -> Any:
        self.num_calls += 1
        if self.num_calls in self._fails_at:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory for weights")
        return jax.device_put(leaf, sharding)


def test_a_move_that_fails_leaves_the_groups_serving(wanted, monkeypatch):
    """Weights that cannot be placed during the pause: all answers are as before, and go on."""
    seen = WrapAll(partial(SlowExecutor, step_s=0.005))
    with _runtime(wrap_executor=seen) as rt:
        pages = rt.config.num_pages
        pending = [rt.submit(p, each) for p, each in zip(PROMPTS, PARAMS, strict=True)]
        failing = _Failing(8)
        with monkeypatch.context() as patched:
            patched.setattr(regroup, "placed", failing)
            with pytest.raises(RegroupError, match="serve as before.*no memory for weights"):
                rt.regroup(encode=2, decode=1, max_pause_s=60)
        assert failing.num_calls > 8  # those that were placed were put back
        assert _devices(seen.executors[0]) == [[0], [1, 2]]
        assert _samples([each.result() for each in pending]) == wanted
        assert rt.stats().num_moves == 0 and rt.config.num_pages == pages
        rt.check_integrity()
        rt.regroup(encode=2, decode=1, max_pause_s=60)
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted


@pytest.mark.release
def test_weights_that_cannot_be_put_back_end_every_request(monkeypatch):
    """The move, the requests, the waiting ones and later ones fail alike; nothing hangs."""
    seen = WrapAll(partial(SlowExecutor, step_s=0.02))
    with _runtime(wrap_executor=seen) as rt:
        # None of them ends in a second.
        long = SamplingParams(max_tokens=100, ignore_eos=True)
        pending = [rt.submit(p, long) for p in PROMPTS]
        monkeypatch.setattr(regroup, "placed", _Failing(8, 9))
        said = "could not be put back.*no memory for weights.*this runtime serves no more"
        with pytest.raises(EngineFailedError, match=said):
            rt.regroup(encode=2, decode=1, max_pause_s=60)
        ended = [each.result(10) for each in pending]
        assert ended and all(isinstance(each.error, EngineFailedError) for each in ended)
        for call in (
            partial(rt.submit, PROMPTS[0]),
            partial(rt.regroup, encode=2, decode=1),
            partial(rt.plan, lengths=[(8, 8)]),
        ):
            with pytest.raises(EngineFailedError, match=said):
                call()
        assert rt.stats().num_moves == 0


def _live_bytes() -> Counter[int]:
    """Return the bytes of all arrays on each device, by its id."""
    found = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            found[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    total: Counter[int] = Counter()
    for (device, _), num_bytes in found.items():
        total[device] += num_bytes
    return total


@pytest.mark.release
def test_no_device_needs_more_memory_than_the_fullest_one_had(monkeypatch):
    """With a pool that is small beside the weights, of which no device has two copies."""
    gc.collect()
    others = _live_bytes()
    model = tiny_llama(num_layers=4, num_heads=8)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    own: dict[str, Any] = dict(mesh=make_groups(encode=1, decode=2), max_context=32, max_slots=1)
    with Runtime(model, **SMALL | own) as rt:
        assert rt.stats().pool_bytes < weights / 4
        # The caller's copy on the first device would stay there.
        with pytest.raises(InvalidConfigError, match="the memory of the present groups"):
            rt.regroup(encode=2, decode=1, max_pause_s=60)
        del model
        gc.collect()
        before = max((_live_bytes() - others).values())
        most: Counter[int] = Counter()

        def watched(leaf: Any, sharding: Any) -> Any:
            nonlocal most
            new = jax.block_until_ready(jax.device_put(leaf, sharding))
            now = _live_bytes() - others
            if max(now.values()) >= before + weights / 8:  # with what waits for the collector
                gc.collect()
                now = _live_bytes() - others
            most |= now
            return new

        monkeypatch.setattr(regroup, "placed", watched)
        rt.regroup(encode=2, decode=1, max_pause_s=60)
        assert weights < max(most.values()) < before + weights / 8
        rt.check_integrity()


@pytest.mark.release
def test_steps_are_measured_for_the_new_groups():
    """What a step needs is what it needs in a runtime that began with these groups."""
    more = dict(max_slots=32, max_step_tokens=32)  # pages enough for all weights on a device
    with _runtime(mesh=make_groups(encode=2, decode=2), **more) as rt:
        pool_bytes = rt.stats().pool_bytes
    with _runtime(mesh=make_groups(encode=2, decode=2), kv_memory=pool_bytes, **more) as rt:
        before = rt.stats().step_bytes
        assert before is not None
        rt.regroup(encode=1, decode=2, max_pause_s=60)
        moved = rt.stats()
        assert moved.step_bytes != before
    with _runtime(kv_memory=moved.pool_bytes, **more) as rt:
        stats = rt.stats()
        assert (stats.num_pages, stats.pool_bytes) == (moved.num_pages, moved.pool_bytes)
        assert stats.step_bytes == moved.step_bytes


@pytest.mark.release
def test_what_is_refused():
    """Divisions that devices or model do not allow, a pause above its bound, other runtimes."""
    with _runtime(mesh=make_groups(encode=2, decode=2)) as rt:
        # The room of a half of the weights does not hold all of them and as long an answer.
        with pytest.raises(InvalidConfigError, match=r"encode=1, decode=2 .* pass one of 2/2 "):
            rt.regroup(encode=1, decode=2)
    with _runtime() as rt:
        with pytest.raises(InvalidConfigError, match=r"2, decode=2 .* pass one of 1/1, 1/2, 2/1 "):
            rt.regroup(encode=2, decode=2)
        with pytest.raises(RegroupError, match=r"expected to pause the engine.*max_pause_s=0"):
            rt.regroup(encode=2, decode=1, max_pause_s=0)
        assert rt.regroup(encode=1, decode=2, max_pause_s=0) == 0.0
        assert rt.stats().num_moves == 0
    stages = DeviceGroups(make_mesh(), StagePlan.of([1, 1], devices=jax.devices()[1:]))
    for options in (dict(mesh=stages), dict(mesh=None, policy="auto")):
        with (
            _runtime(**options) as rt,
            pytest.raises(InvalidConfigError, match="devices cannot move between groups here"),
        ):
            rt.regroup(encode=1, decode=1)


@pytest.mark.release
def test_nothing_compiles_after_a_move(wanted):
    """The executables are made before the pause, in strict mode too."""
    sizes = dict(max_slots=2, max_step_tokens=16, max_decode_iterations=1)
    with _runtime(**sizes, strict=True, warmup="full") as rt:
        rt.regroup(encode=2, decode=1, max_pause_s=60)
        before = rt.stats().num_compilations
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        assert rt.stats().num_compilations == before


def _scaled(times: StepTimes, size: int, *, decode: float, prefill: float) -> StepTimes:
    """Return times of a group of `size` devices, whose steps take as many times as long."""

    def scaled(curves: dict[int, Curve], factor: float) -> dict[int, Curve]:
        return {
            key: Curve(tuple((x, factor * s) for x, s in curve.points))
            for key, curve in curves.items()
        }

    return replace(
        times,
        origin=replace(times.origin, device={**times.origin.device, "count": size}),
        decode_s=scaled(times.decode_s, decode),
        loop_s={key: decode * s for key, s in times.loop_s.items()},
        prefill_s=scaled(times.prefill_s, prefill),
    )


class _Late:
    """A step that ends later than it does."""

    def __init__(self, handle: StepHandle, late_s: float):
        self._handle = handle
        self._late_s = late_s

    def is_ready(self) -> bool:
        return self._handle.is_ready()

    def collect(self) -> StepResult:
        time.sleep(self._late_s)
        return self._handle.collect()


class SlowSteps(ExecutorWrapper):
    """Prompts take 15 ms more a step, and answers 8 ms, so that the host's time does not matter.

    Attributes:
      meanwhile: called once, when a plan that is made next reads the configuration.
    """

    meanwhile: Callable[[], object] | None = None

    @property
    def config(self) -> EngineConfig:
        call, self.meanwhile = self.meanwhile, None
        if call is not None:
            call()
        return self.inner.config

    def submit(self, plan: StepPlan) -> StepHandle:
        handle = self.inner.submit(plan)
        if plan.handovers:
            return handle
        return _Late(handle, 0.008 if plan.is_decode_loop else 0.015)


@pytest.fixture(scope="module")
def slow_times() -> GroupTimes:
    """The times of `SlowSteps` on groups of one device, to which devices were moved."""
    with _runtime(wrap_executor=WrapAll(SlowSteps)) as rt:
        rt.regroup(encode=1, decode=1, max_pause_s=60)
        return rt.measure_group_times(rounds=1)


def _load(rt: Runtime, times: GroupTimes, folder: Path) -> None:
    """Give a runtime the times of its groups, through a file."""
    path = folder / "measured.json"
    times.save(path)
    rt.load_group_times(path)


@pytest.mark.release
def test_a_plan_moves_devices_and_so_does_a_drift(
    wanted,
    slow_times,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """By times of two devices from the cache folder, which encode faster and decode slower."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    seen = WrapAll(SlowSteps)
    prompts = [tuple(range(i % 40, i % 40 + 55)) for i in range(70)]
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    with _runtime(wrap_executor=seen) as rt:
        (executor,) = seen.executors
        rt.regroup(encode=1, decode=1, max_pause_s=60)
        _load(rt, slow_times, tmp_path)
        two = _scaled(slow_times.groups[0], 2, decode=100.0, prefill=0.001)
        keep_times(tmp_path / "profiles", two)

        stays = rt.plan(lengths=[(60, 2)] * 9, max_pause_s=0.0)
        assert stays.schedule.division == Division(1, 1) and stays.move is not None
        assert stays.move.is_measured and "max_pause_s is 0" in stays.move.refused
        # A plan for groups that another thread changes meanwhile is made anew.
        executor.meanwhile = lambda: rt.regroup(encode=2, decode=1, max_pause_s=60)
        anew = rt.plan(lengths=[(60, 2)] * 9, max_pause_s=0.0)
        assert "planning again: devices have moved" in caplog.text
        assert anew.schedule.division == Division(2, 1) and anew.move is None
        assert _devices(executor) == [[0, 1], [2]] and rt.stats().plan == anew
        rt.regroup(encode=1, decode=1, max_pause_s=60)

        moves = rt.plan(lengths=[(60, 2)] * 9, max_pause_s=60.0, adapt=False)
        assert moves.schedule.division == Division(2, 1) and moves.move is not None
        assert moves.move.pause_s is not None and 0 < moves.move.pause_s < 60
        assert f"was {moves.move.pause_s:.3g} s" in str(moves) and rt.stats().plan == moves
        assert _devices(executor) == [[0, 1], [2]]
        assert rt.report().figures()["plan"]["move"]["division"] == "2/1"
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted

        rt.regroup(encode=1, decode=1, max_pause_s=60)
        assert rt.stats().plan is None and _devices(executor) == [[0], [1]]
        plan = rt.plan(lengths=[(4, 100)] * 9, max_pause_s=60.0)
        assert plan.schedule.division == Division(1, 1)
        for _ in range(30):
            if rt.stats().num_moves == 6:
                break
            rt.generate(prompts, short)
        assert rt.stats().num_moves == 6 and _devices(executor) == [[0, 1], [2]]
        now = rt.stats().plan
        assert now is not None and now.schedule.division == Division(2, 1)
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        rt.check_integrity()


@pytest.mark.release
def test_times_of_both_groups_are_kept_for_the_next_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A plan reads them from the cache folder; a saved file is taken, one of one group refused."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    lengths = [(20, 8)] * 9
    options = FEW_SHAPES | dict(mesh=make_groups(encode=1, decode=1))
    with _runtime(**options) as rt:
        first = rt.plan(lengths=lengths, max_pause_s=0.0)
        (kept,) = (tmp_path / "profiles").glob("groups-*.json")
        times = rt.find_group_times(tmp_path / "profiles")
        assert times is not None
        times.save(tmp_path / "saved.json")
        with pytest.raises(InvalidConfigError, match="this runtime has two"):
            rt.find_step_times(tmp_path)
    written = kept.stat().st_mtime_ns
    with _runtime(**options) as rt:
        again = rt.plan(lengths=lengths, max_pause_s=0.0)
        assert again.schedule == first.schedule and again.tokens_per_s == first.tokens_per_s
        assert rt.load_group_times(tmp_path / "saved.json").page_s == times.page_s
        assert kept.stat().st_mtime_ns == written
        times.groups[0].save(tmp_path / "one.json")
        with pytest.raises(InvalidProfileError, match="does not hold times of two groups"):
            rt.load_group_times(tmp_path / "one.json")
    with (
        _runtime(mesh=None, policy="auto") as rt,
        pytest.raises(InvalidConfigError, match="one group of devices"),
    ):
        rt.load_group_times(tmp_path / "saved.json")


@pytest.mark.release
def test_the_papers_rules_divide_the_devices(wanted, slow_times, tmp_path: Path, monkeypatch):
    """WAA-C by computation, WAA-M by memory: each moves to its own division, with equal tokens."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    seen = WrapAll(SlowSteps)
    with _runtime(wrap_executor=seen) as rt:
        (executor,) = seen.executors
        rt.regroup(encode=1, decode=1, max_pause_s=60)
        _load(rt, slow_times, tmp_path)
        two = _scaled(slow_times.groups[0], 2, decode=1.0, prefill=0.01)
        keep_times(tmp_path / "profiles", two)
        lengths = [(60, 2)] * 9
        by_computing = rt.plan(lengths=lengths, policies=("waa_c",), adopt=False, max_pause_s=60)
        by_memory = rt.plan(lengths=lengths, policies=("waa_m",), adopt=False, max_pause_s=60)
        assert by_computing.schedule.layout.policy.value == "waa_c"
        assert by_memory.schedule.layout.policy.value == "waa_m"
        for plan in (by_computing, by_memory):
            assert plan.schedule.division is not None
        assert by_computing.schedule.division == Division(2, 1)  # prompts take the longest
        rt.plan(lengths=lengths, policies=("waa_c",), max_pause_s=60, adapt=False)
        division = by_computing.schedule.division
        assert [len(each) for each in _devices(executor)] == [division.encode, division.decode]
        assert _samples(rt.generate(PROMPTS, PARAMS)) == wanted
        with pytest.raises(InvalidConfigError, match="pass some of"):
            rt.plan(lengths=lengths, policies=("rra",))


@pytest.mark.release
def test_a_plan_is_adapted_after_devices_were_moved_by_hand(
    slow_times, tmp_path: Path, monkeypatch
):
    """The next answers make a plan for the groups of now, which are measured, and stay."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    prompts = [tuple(range(i % 40, i % 40 + 20)) for i in range(70)]
    one, other = slow_times.groups
    with _runtime() as rt:
        two = _scaled(other, 2, decode=1.0, prefill=1.0)
        _load(rt, replace(slow_times, groups=(one, two)), tmp_path)
        rt.plan(lengths=[(20, 4)] * 90, max_pause_s=0.0)
        rt.regroup(encode=2, decode=1, max_pause_s=60)
        assert rt.stats().plan is None
        moves = rt.stats().num_moves
        for _ in range(20):
            if rt.stats().plan is not None:
                break
            rt.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True))
        plan = rt.stats().plan
        assert plan is not None and plan.schedule.division == Division(2, 1)
        assert rt.stats().num_moves == moves
