"""A runtime reuses cached pages: counted, across restarts, and not with other weights."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

import pytest

from jaxserve import Request, Runtime, SamplingParams
from jaxserve.core.clock import WallClock
from jaxserve.core.errors import InvalidConfigError
from jaxserve.engine.engine import Engine
from jaxserve.execution.executor import StepHandle
from jaxserve.report import draw_residency
from jaxserve.scheduling.kv.transfer import KVPages
from jaxserve.scheduling.plan import StepPlan
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import StagePlan, make_mesh
from jaxserve.testing import FreeCopiesExecutor, WrapAll, tiny
from jaxserve.testing.tiny import random_prompts, tiny_llama
from tests.common.tiers import some
from tests.common.waiting import until
from tests.runtime.serving import weights

PROMPTS = [prompt[:30] + (1,) * 10 for prompt in random_prompts(4, seed=3, longest=60)]
PARAMS = SamplingParams(max_tokens=12)
OPTIONS = tiny.OPTIONS | {"policy": "pensieve"}
FREE = OPTIONS | {"wrap_executor": FreeCopiesExecutor}
FOLLOW_UP = (5, 6, 7)
STAGES = StagePlan.of([1, 1], tensor=[2, 1])


def _talk(rt: Runtime) -> list[tuple[int, ...]]:
    """Return the tokens of two turns of four conversations."""
    first = rt.generate(list(map(list, PROMPTS)), PARAMS)
    histories = [[*p, *c.token_ids, *FOLLOW_UP] for p, c in zip(PROMPTS, first, strict=True)]
    return [c.token_ids for c in (*first, *rt.generate(histories, PARAMS))]


@pytest.fixture(scope="module")
def expected():
    """The tokens of a runtime without cached pages, by seed of the weights."""
    tokens = {}
    for seed in (0, 1):
        with Runtime(tiny_llama(seed), **{**OPTIONS, "policy": "vllm_like"}) as rt:
            tokens[seed] = _talk(rt)
            assert rt.stats().num_prefix_queried == 0
    return tokens


@pytest.mark.release
def test_pages_come_back_from_the_host_layer_by_layer(expected):
    """The pool holds half of the cached pages; nothing compiles after the start."""
    options = FREE | {"restore": "both", "kv_memory": "40kB", "strict": True, "warmup": True}
    with Runtime(tiny_llama(), **options) as rt:
        assert _talk(rt) == expected[0] == _talk(rt)
        assert rt.stats().num_pages_in > 0 and rt.config.num_incoming_pages == 16
    with pytest.raises(InvalidConfigError, match=r"restore='later' .*'on_admission', 'prefetch'"):
        Runtime(tiny_llama(), **OPTIONS, restore="later")


SMALL_PAGES = OPTIONS | {"page_size": 1}
LONG_PROMPTS = [list(prompt * 100)[:100] for prompt in random_prompts(3, seed=5, longest=100)]
GOING_ON = SamplingParams(max_tokens=60)


@pytest.fixture(scope="module")
def small_pages():
    """The tokens for a long prompt, its continuation and a short one, without cached pages."""
    prompts = [LONG_PROMPTS[0], [*LONG_PROMPTS[0], *FOLLOW_UP], [7, 8]]
    with Runtime(tiny_llama(), **{**SMALL_PAGES, "policy": "vllm_like"}) as rt:
        return [each.token_ids for each in rt.generate(prompts, [PARAMS, PARAMS, GOING_ON])]


@pytest.mark.release
@pytest.mark.parametrize(
    ("restore", "mesh", "kv_memory"),
    some([("on_admission", None, "45kB"), ("per_layer", None, "45kB"), ("both", STAGES, "22kB")]),
    ids=str,
)
def test_many_pages_come_back_over_several_steps(
    small_pages, restore: str, mesh: StagePlan | None, kv_memory: str
):
    """Pages of one token each: no step brings more than 64 while another answer goes on."""
    wanted, history, going = small_pages
    options = SMALL_PAGES | {"restore": restore, "mesh": mesh, "kv_memory": kv_memory}
    options |= {"host_memory": "1MiB", "max_decode_iterations": 1, "wrap_executor": _SlowCopies}
    with Runtime(tiny_llama(), **options) as rt:
        assert rt.generate(LONG_PROMPTS[0], PARAMS).token_ids == wanted
        for each in LONG_PROMPTS[1:]:  # they take the pages
            rt.generate(each, PARAMS)
        pieces: list[object] = []
        going_on = rt.submit([7, 8], GOING_ON, on_piece=pieces.append)
        until(lambda: pieces)
        assert rt.generate([*LONG_PROMPTS[0], *FOLLOW_UP], PARAMS).token_ids == history
        assert going_on.result(60).token_ids == going
        brought = [step.pages_in for step in rt.report().steps]
        assert max(brought) == 64 and sum(brought) > 70
        rt.check_integrity()


class _SlowCopies(FreeCopiesExecutor):
    """Copies count as free, and every step takes a little longer, so that answers overlap."""

    def submit(self, plan: StepPlan) -> StepHandle:
        time.sleep(0.02)
        return self.inner.submit(plan)


@pytest.mark.release
def test_shards_of_pages_in_eight_bits_come_back_layer_by_layer():
    """Layers are scanned, over two devices; also after a resize and after timing steps."""
    options, model = OPTIONS | {"kv_dtype": "int8"}, tiny_llama(layer_layout="scanned")
    with Runtime(model, **{**options, "policy": "vllm_like"}) as rt:
        expected = _talk(rt)
    options |= FREE | {"restore": "both", "kv_memory": "8kB", "strict": True, "warmup": True}
    with Runtime(model, mesh=make_mesh(tensor=2), **options) as rt:
        assert _talk(rt) == expected == _talk(rt)
        assert rt.stats().num_pages_in > 0
        rt.resize_kv("12kB")
        assert _talk(rt) == expected
        rt.measure_step_times(rounds=1)
        assert _talk(rt) == expected


@pytest.mark.parametrize("policy", some(["pensieve", "pensieve_device_only", "auto"]))
def test_the_next_turn_finds_the_one_before(expected, policy):
    """Nearly all of it is hit; the report has the number of tokens."""
    with Runtime(tiny_llama(), **{**OPTIONS, "policy": policy}) as rt:
        assert _talk(rt) == expected[0]
        stats = rt.stats()
        assert stats.num_prefix_hit >= sum(len(prompt) + 12 - 8 for prompt in PROMPTS)
        assert rt.report().figures()["hit_rate"] == stats.num_prefix_hit / stats.num_prefix_queried
        assert max(step.pages_cached for step in rt.report().steps) > 0
        tiers = rt.residency([*PROMPTS[0], *FOLLOW_UP])
        assert tiers == ["device"] * (len(PROMPTS[0]) // rt.config.page_size)
        assert set(rt.residency([9] * len(PROMPTS[0]))) == {"nowhere"}
        assert draw_residency({"a": tiers, "b": []})._repr_png_().startswith(b"\x89PNG")
        rt.forget_kept_pages()
        assert _talk(rt) == expected[0]
        assert rt.stats().num_prefix_hit == 2 * stats.num_prefix_hit
        rt.measure_step_times(rounds=1)  # which overwrites pages
        assert _talk(rt) == expected[0]


@pytest.mark.release
@pytest.mark.parametrize(
    ("kv_dtype", "mesh"), some([(None, None), ("int8", None), ("int8", STAGES)])
)
def test_another_runtime_goes_on_from_exported_pages(kv_dtype, mesh):
    """It finds the full pages of prompts that it never computed; nothing compiles."""
    options = OPTIONS | {"policy": "auto", "kv_dtype": kv_dtype, "mesh": mesh}
    options |= {"strict": True, "warmup": True}
    prompts = list(map(list, PROMPTS))
    one = SamplingParams(max_tokens=1)
    with Runtime(tiny_llama(), **options) as first, Runtime(tiny_llama(), **options) as second:
        alone = [c.token_ids for c in first.generate(prompts, PARAMS)]
        first.forget_kept_pages()
        first.generate(prompts, one)
        num_pages = [len(prompt) // first.config.page_size for prompt in prompts]
        for prompt, num in zip(prompts, num_pages, strict=True):
            kv = first.export_kv(prompt)
            assert len(kv.pages) == num == second.import_kv(prompt, kv)
        assert [c.token_ids for c in second.generate(prompts, PARAMS)] == alone
        wanted = sum((len(p) - 1) // first.config.page_size for p in prompts)
        hit = second.stats().num_prefix_hit_on_host
        assert hit == wanted * first.config.page_size
        with pytest.raises(InvalidConfigError, match="bytes are not allowed"):
            second.import_kv(prompts[0], KVPages(kv.identity, [b"0"]))
        second.update_params(weights(1))
        with pytest.raises(InvalidConfigError, match="same weights"):
            second.import_kv(prompts[0], kv)
        first.check_integrity()
        second.check_integrity()


def test_new_weights_find_nothing_of_the_old(expected):
    """Other weights have other keys and values."""
    with Runtime(tiny_llama(), **OPTIONS) as rt:
        assert _talk(rt) == expected[0]
        found = rt.stats().num_prefix_hit
        rt.update_params(weights(1))
        assert _talk(rt) == expected[1]
        assert rt.stats().num_prefix_hit == 2 * found


def test_a_runtime_finds_what_the_one_before_it_wrote(expected, tmp_path):
    """All cached pages are on disk after closing; other weights, or an update, do not hit them."""
    disk = {"disk_memory": "4MB", "disk_folder": tmp_path, "host_memory": "100kB"}
    with Runtime(tiny_llama(), **FREE, **disk) as rt:
        assert _talk(rt) == expected[0]
        assert rt.stats().num_prefix_hit_on_disk == 0
    num_files = len(list(tmp_path.rglob("*.page")))
    with Runtime(tiny_llama(), **OPTIONS, **disk) as rt:
        assert rt.stats().num_disk_pages == num_files > 0
        assert _talk(rt) == expected[0]
        stats = rt.stats()
        assert stats.num_prefix_hit_on_disk >= sum(len(prompt) - 8 for prompt in PROMPTS)
        page_size = stats.page_size
        assert stats.num_pages_from_disk * page_size >= stats.num_prefix_hit_on_disk
        assert stats.num_disk_pages == num_files + stats.num_pages_to_disk
        rt.forget_kept_pages()
        assert _talk(rt) == expected[0]
        assert rt.stats().num_prefix_hit_on_disk == stats.num_prefix_hit_on_disk
    with Runtime(tiny_llama(1), **OPTIONS, **disk) as rt:
        assert _talk(rt) == expected[1]
        assert rt.stats().num_prefix_hit_on_disk == 0
        rt.update_params(weights(0))
        assert _talk(rt) == expected[0]
        assert rt.stats().num_prefix_hit_on_disk == 0


@pytest.mark.release
def test_a_runtime_in_stages_finds_what_the_one_before_it_wrote(expected, tmp_path):
    """Each file has the parts of all stages; a model in one piece does not hit it."""
    disk = {"disk_memory": "4MB", "disk_folder": tmp_path, "host_memory": "100kB"}
    with Runtime(tiny_llama(), **FREE, **disk, mesh=STAGES) as rt:
        assert _talk(rt) == expected[0]
    with Runtime(tiny_llama(), **OPTIONS, **disk, mesh=STAGES) as rt:
        assert _talk(rt) == expected[0]
        assert rt.stats().num_prefix_hit_on_disk >= sum(len(prompt) - 8 for prompt in PROMPTS)
        rt.check_integrity()
    with Runtime(tiny_llama(), **OPTIONS, **disk) as rt:
        assert _talk(rt) == expected[0]
        assert rt.stats().num_prefix_hit_on_disk == 0


@final
class _SlowFiles:
    """Page files that are read when `is_open` is set: pipes that threads fill once each."""

    def __init__(self, folder: Path):
        self.is_open = threading.Event()
        self.num_asked = 0
        self._paths = list(folder.glob("*.page"))
        for path in self._paths:
            contents = path.read_bytes()
            path.unlink()
            os.mkfifo(path)
            threading.Thread(target=self._fill, args=(path, contents), daemon=True).start()

    def _fill(self, path: Path, contents: bytes) -> None:
        with suppress(BrokenPipeError), path.open("wb") as pipe:  # when the pipe is read
            self.num_asked += 1
            assert self.is_open.wait(60)
            whole = path.with_suffix(".whole")
            whole.write_bytes(contents)
            whole.replace(path)
            pipe.write(contents)

    def close(self) -> None:
        """End the threads of files that were not read."""
        self.is_open.set()
        for path in self._paths:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


@contextmanager
def _slow_reads(folder: Path) -> Iterator[_SlowFiles]:
    files = _SlowFiles(folder)
    try:
        yield files
    finally:
        files.close()


@pytest.mark.release
def test_a_slow_disk_delays_only_those_that_need_it(expected, tmp_path):
    """Other requests are answered meanwhile; waiting ones get the disk's pages and the same tokens.

    Closing a runtime does not wait for requests that wait for the disk.
    """
    disk = {"disk_memory": "4MB", "disk_folder": tmp_path, "host_memory": "100kB"}
    with Runtime(tiny_llama(), **FREE, **disk) as rt:
        _talk(rt)
    with _slow_reads(tmp_path / "0") as slow, Runtime(tiny_llama(), **OPTIONS, **disk) as rt:
        waiting = [rt.submit(prompt, PARAMS) for prompt in PROMPTS[:3]]
        others = rt.generate(random_prompts(4, seed=9), PARAMS)
        assert all(other.finish_reason == "length" for other in others)
        assert slow.num_asked and not any(one.future.done() for one in waiting)
        planning_s = rt.stats().planning_s
        time.sleep(0.05)
        assert rt.stats().planning_s == planning_s
        slow.is_open.set()
        assert [one.result(60).token_ids for one in waiting] == expected[0][:3]
        assert rt.stats().num_prefix_hit_on_disk >= sum(len(prompt) - 8 for prompt in PROMPTS[:3])
        slow.is_open.clear()
        num_asked = slow.num_asked
        closed = rt.submit(PROMPTS[3], PARAMS)
        until(lambda: slow.num_asked > num_asked)  # else the request ends with an error
        threading.Timer(0.2, slow.is_open.set).start()
    assert (closed.result(0).finish_reason, closed.result(0).token_ids) == ("cancelled", ())


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"policy": "orca", "disk_memory": "1MB"}, "keeps no pages on the host"),
        ({"disk_memory": "1MB", "host_memory": 0}, "there are no host pages"),
        ({"disk_memory": 100}, "does not hold one page, or state"),
        ({"disk_folder": "pages"}, "disk_memory"),
        ({"disk_memory": "1MB", "disk_folder": "/dev/null/pages"}, "disk_folder"),
    ],
)
def test_a_disk_without_pages_for_it_is_refused(options, reason):
    with pytest.raises(InvalidConfigError, match=reason):
        Runtime(tiny_llama(), **{**OPTIONS, **options})


def _answers(engine: Engine, prompts: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the tokens of a batch, from an engine of this test."""
    sequences = []
    for prompt in prompts:
        request = Request(id=str(prompt), prompt=tuple(prompt), params=PARAMS, arrival_s=0.0)
        sequences += engine.add(request)
    while engine.has_work:
        engine.step()
    return [tuple(sequence.output) for sequence in sequences]


@pytest.mark.release
def test_pages_come_back_to_stages_layer_by_layer(expected):
    """The pool holds half of the cached pages; the first micro-batch brings them. It is resized."""
    options = FREE | {"restore": "both", "kv_memory": "20kB", "strict": True, "warmup": True}
    with Runtime(tiny_llama(), mesh=STAGES, **options) as rt:
        assert _talk(rt) == expected[0] == _talk(rt)
        assert rt.stats().num_pages_in > 0 and rt.config.num_incoming_pages == 16
        rt.resize_kv("24kB")
        assert _talk(rt) == expected[0]
        rt.check_integrity()


@pytest.mark.release
def test_stages_hit_pages_around_holes(expected):
    """Rows of one sequence go through the stages in order."""
    plan, seen = StagePlan.of([1, 1], micro_batches=2), WrapAll()
    with Runtime(tiny_llama(), **OPTIONS, mesh=plan, wrap_executor=seen) as rt:
        assert _talk(rt) == expected[0]
        assert rt.stats().num_prefix_hit >= sum(len(prompt) + 12 - 8 for prompt in PROMPTS)
        engine = Engine(seen.executors[0], PRESETS["pensieve"], WallClock())
        first = _answers(engine, PROMPTS)
        histories = [(*p, *o, *FOLLOW_UP) for p, o in zip(PROMPTS, first, strict=True)]
        for history in histories:
            engine.evict(history, range(0, len(history) // rt.config.page_size, 2))
        assert [*first, *_answers(engine, histories)] == expected[0]
        assert engine.stats.num_evicted_tokens > 0
