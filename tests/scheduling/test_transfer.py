"""KV of prompts that goes from one engine to another, on simulated devices."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from jaxserve.core.clock import VirtualClock
from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import InvalidConfigError
from jaxserve.core.request import EncoderPrompts
from jaxserve.engine.answers import Weights
from jaxserve.engine.engine import Engine
from jaxserve.execution.executor import StepHandle
from jaxserve.execution.simulated import SimulatedExecutor
from jaxserve.memory.disk_tier import HostMemory
from jaxserve.scheduling.kv.transfer import KVPages
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.testing.executors import ExecutorWrapper
from tests.scheduling.simulated import engine_of, request_of

CONFIG = EngineConfig(
    page_size=4,
    num_pages=40,
    max_slots=4,
    max_context=64,
    max_step_tokens=64,
    max_decode_iterations=4,
    num_host_pages=20,
)
PROMPT = tuple(range(1, 23))  # five full pages, and two tokens


def _engine(config: EngineConfig = CONFIG) -> Engine:
    return engine_of("auto", config)


def _answer(engine: Engine, prompt: tuple[int, ...], num_tokens: int, name: str) -> list[int]:
    padded = EncoderPrompts(start_token_id=0, page_size=4).around(prompt)
    whole, encoded, padding = padded if engine.scheduler.config.has_encoder else (prompt, 0, 0)
    request = request_of(name, whole, max_tokens=num_tokens)
    [sequence] = engine.add(replace(request, num_encoded=encoded, num_padding=padding))
    while sequence.finish_reason is None:
        engine.step()
    engine.scheduler.check_integrity()
    return list(sequence.output)


@pytest.mark.parametrize("has_encoder", [False, True])
def test_an_engine_goes_on_from_the_pages_of_another(has_encoder: bool):
    """It computes what is behind the full pages only, and its tokens are those of one engine."""
    config = replace(CONFIG, has_encoder=has_encoder)
    alone, prefill, decode = _engine(config), _engine(config), _engine(config)
    wanted = _answer(alone, PROMPT, 10, "alone")
    _answer(prefill, PROMPT, 1, "prefill")
    kv = prefill.export_kv(PROMPT)
    assert len(kv.pages) == (6 if has_encoder else 5)  # an encoder's prompt has its padding
    assert decode.import_kv(PROMPT, kv) == len(kv.pages)
    assert _answer(decode, PROMPT, 10, "decode") == wanted
    assert decode.stats.num_prefix_hit_on_host == 4 * len(kv.pages)
    assert decode.stats.num_tokens < alone.stats.num_tokens


def test_pages_are_read_while_others_run_and_again_later():
    """Steps in flight go on, and the pages of an answer that runs can be read, too."""
    engine, other = _engine(), _engine()
    wanted = _answer(_engine(), PROMPT, 12, "alone")
    [sequence] = engine.add(request_of("a", PROMPT, max_tokens=12))
    for _ in range(3):
        engine.step()
    assert sequence.finish_reason is None
    kv = engine.export_kv(PROMPT)
    while engine.has_work:
        engine.step()
    assert list(sequence.output) == wanted and len(kv.pages) == 5
    assert engine.export_kv(PROMPT) == kv and engine.export_kv(PROMPT[:9]).pages == kv.pages[:2]
    assert engine.export_kv((9, *PROMPT)).pages == []
    engine.scheduler.check_integrity()
    assert other.import_kv(PROMPT, KVPages(kv.identity, kv.pages[:3])) == 3
    assert _answer(other, PROMPT, 12, "b") == wanted
    assert other.stats.num_prefix_hit_on_host == 12


def test_pages_are_read_in_parts_while_a_prompt_is_computed():
    """Each part follows the one before, comes after its copy, and is that of the whole export."""
    config = replace(CONFIG, max_step_tokens=8, token_buckets=())
    engine, other = _engine(config), _engine(config)
    wanted = _answer(_engine(), PROMPT, 10, "alone")
    [sequence] = engine.add(request_of("a", PROMPT, max_tokens=1))
    parts: list[KVPages] = []
    pages: list[bytes] = []
    while sequence.finish_reason is None:
        engine.step()
        found = engine.export_kv(PROMPT, len(pages), waits=False)
        engine.scheduler.check_integrity()
        parts += [found] if found.pages else []
        pages += found.pages
    assert len(parts) >= 1 and len(pages) < 5  # the last page is computed in the last step
    last = engine.export_kv(PROMPT, len(pages))
    whole = engine.export_kv(PROMPT)
    assert [*pages, *last.pages] == whole.pages and len(whole.pages) == 5
    assert other.import_kv(PROMPT, whole) == 5
    assert _answer(other, PROMPT, 10, "b") == wanted
    assert engine.export_kv(PROMPT, 5).pages == [] == engine.export_kv(PROMPT, 9).pages


def test_a_page_on_its_way_to_the_host_is_not_read():
    """Neither before a plan copies it, nor while that plan is in flight."""
    engine = _engine(replace(CONFIG, max_step_tokens=8, token_buckets=()))
    engine.add(request_of("a", PROMPT, max_tokens=9))
    assert engine.export_kv(PROMPT, waits=False).pages == []
    engine.step()  # plans the first two pages
    assert engine.export_kv(PROMPT, waits=False).pages == []  # has them copied
    engine.step()  # plans the copies, and collects the step before
    assert engine.export_kv(PROMPT, waits=False).pages == []
    engine.step()
    assert len(engine.export_kv(PROMPT, waits=False).pages) == 2


def test_what_has_no_room_is_left_out():
    """A small host takes a part of the pages, and one without host memory none."""
    prefill = _engine(replace(CONFIG, num_host_pages=3))
    wanted = _answer(prefill, PROMPT, 8, "prefill")
    assert len(prefill.export_kv(PROMPT).pages) == 3
    without = _engine(replace(CONFIG, num_host_pages=0))
    kv = _filled(PROMPT)
    assert without.import_kv(PROMPT, kv) == 0 and without.export_kv(PROMPT).pages == []
    small = _engine(replace(CONFIG, num_host_pages=3))
    assert small.import_kv(PROMPT, kv) <= 3
    assert _answer(small, PROMPT, 8, "small") == _answer(without, PROMPT, 8, "w") == wanted


def test_pages_of_another_size_are_refused():
    """The error says both sizes, whichever page it is, and the engine goes on."""
    engine, kv = _engine(), _filled(PROMPT)
    with pytest.raises(InvalidConfigError, match="16 bytes"):
        engine.import_kv(PROMPT, KVPages(kv.identity, [*kv.pages[:2], b"0" * 16]))
    assert engine.import_kv(PROMPT, KVPages(kv.identity, [])) == 0
    assert _answer(engine, PROMPT, 3, "a") == _answer(_engine(), PROMPT, 3, "b")


def test_pages_of_other_weights_are_refused():
    """They have the right size; so has the KV that an engine had before an update."""
    engine, kv = _engine(), _filled(PROMPT)
    with pytest.raises(InvalidConfigError, match="same weights"):
        engine.import_kv(PROMPT, KVPages(b"others", kv.pages))
    assert engine.import_kv(PROMPT, kv) == len(kv.pages)
    engine.weights_changed(Weights(1), engine.name_of(1), keeps_kv=False)
    assert engine.residency(PROMPT) == ["nowhere"] * 5
    with pytest.raises(InvalidConfigError, match="same weights"):
        engine.import_kv(PROMPT, kv)
    assert _answer(engine, PROMPT, 3, "a") == _answer(_engine(), PROMPT, 3, "b")


@pytest.mark.parametrize("fails", ["submit", "read"])
def test_a_failed_export_leaves_nothing_on_the_host(fails: str):
    """Pages that were not copied are not taken for copied: the next export has their contents."""
    engine, executor = _failing()
    wanted = _answer(engine, PROMPT, 8, "a")
    executor.fails = fails
    with pytest.raises(OSError, match="no memory"):
        engine.export_kv(PROMPT)
    engine.scheduler.check_integrity()
    executor.fails = ""
    kv, other = engine.export_kv(PROMPT), _engine()
    assert other.import_kv(PROMPT, kv) == len(kv.pages) == 5
    assert _answer(other, PROMPT, 8, "b") == _answer(engine, PROMPT, 8, "c") == wanted


class _Failing(ExecutorWrapper):
    """An executor that fails to copy pages to the host or to read them."""

    fails = ""

    @property
    def host_memory(self) -> HostMemory:
        return cast(HostMemory, _FailingHost(self))

    def submit(self, plan: StepPlan) -> StepHandle:
        if self.fails == "submit":
            raise OSError("no memory")
        return self.inner.submit(plan)


class _FailingHost(ExecutorWrapper):
    """The host memory of a failing executor."""

    def __init__(self, executor: _Failing):
        super().__init__(executor.inner.host_memory)
        self._executor = executor

    def read(self, entry: int) -> bytes:
        if self._executor.fails == "read":
            raise OSError("no memory")
        return self.inner.read(entry)


def _failing() -> tuple[Engine, _Failing]:
    clock = VirtualClock()
    executor = _Failing(SimulatedExecutor(CONFIG, clock))
    return Engine(executor, PRESETS["auto"], clock), executor


def _filled(prompt: tuple[int, ...]) -> KVPages:
    engine = _engine()
    _answer(engine, prompt, 1, "filled")
    return engine.export_kv(prompt)
