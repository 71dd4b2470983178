"""Executables are kept between processes, and never taken where they do not belong."""

from __future__ import annotations

import json
import logging
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels import build
from jaxserve.kernels.cpu_targets import target_names
from jaxserve.steps.executable_store import (
    ExecutableStore,
    Unnameable,
    compiler_flags,
    describe_devices,
    installed_versions,
    key_of,
)
from jaxserve.steps.step_function import Placement, Shelf, StepFunction, abstract, shelf_of
from tests.common.tiers import some

_COMPILED = "/jax/core/compile/backend_compile_duration"
X = np.arange(8, dtype=np.float32)

# Serves a tiny model from the cache folder in the environment, and prints tokens and what compiled.
_SERVES = """
import json, logging, sys
import jax
logging.basicConfig(level=logging.WARNING)
from jaxserve import Runtime, SamplingParams
from jaxserve.testing import tiny_llama
from jaxserve.kernels import dispatch
names = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **about: names.append(about.get("fun_name", ""))
    if event == "/jax/core/compile/jaxpr_trace_duration" else None
)
options = dict(max_slots=2, max_step_tokens=8, max_context=32, page_size=4, kv_memory="40KB")
with Runtime(tiny_llama(), warmup="full", host_memory=0, progress=False, **options) as runtime:
    six = SamplingParams(max_tokens=6, ignore_eos=True)
    done = runtime.generate([1, 2, 3], six, progress=False)
kernels = sorted(f"{c.operation}: {c.implementation}, {c.shapes}" for c in dispatch.choices())
print(json.dumps({"tokens": done.samples[0].token_ids, "traced": names, "kernels": kernels}))
"""


def _function(folder: Path, *parts: str) -> StepFunction:
    return _function_of(folder, lambda x, y: jnp.sort(x * y), *parts)


def _function_of(folder: Path, function: Callable[..., Any], *parts: str) -> StepFunction:
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    shelf = shelf_of(ExecutableStore(folder), place, *parts)
    return StepFunction("scaled", function, shelf, num_fixed=0)


@pytest.fixture
def compiled():
    """The number of compilations since the test began, in a list."""
    count = []

    def on_event(event: str, _: float, **__: object) -> None:
        if event == _COMPILED:
            count.append(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    yield count
    jax.monitoring.unregister_event_duration_listener(on_event)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.compiled"), key=lambda path: path.stat().st_size)


def test_an_executable_is_loaded_and_not_compiled(tmp_path, compiled):
    """Another function of the same name on an equal shelf compiles nothing, and computes the same.

    Functions stand for processes here: nothing that they share is in memory.
    """
    first = _function(tmp_path)(X, X)
    assert len(compiled) == 1
    np.testing.assert_array_equal(_function(tmp_path)(X, X), first)
    assert len(compiled) == 1


def test_another_configuration_has_its_own_executable(tmp_path):
    """What a function computes may depend on parts of its shelf alone, as on a model's sizes."""
    for factor in (2, 3):
        function = _function_of(tmp_path, lambda x, y, by=factor: by * x + y, str(factor))
        np.testing.assert_array_equal(function(X, X), (factor + 1) * X)


@pytest.mark.parametrize("other", ["shelf", "shape", "dtype", "settings"])
def test_another_program_is_compiled(tmp_path, compiled, other):
    """A key differs if what decides the program differs."""
    _function(tmp_path)(X, X)
    if other == "shelf":
        _function(tmp_path, "another")(X, X)
        assert len(compiled) == 1, "the lowered program is the same, so its executable serves"
        return
    if other == "settings":
        with_settings = jax.config.values["jax_numpy_rank_promotion"]
        jax.config.update("jax_numpy_rank_promotion", "warn")
        try:
            _function(tmp_path)(X, X)
        finally:
            jax.config.update("jax_numpy_rank_promotion", with_settings)
    else:
        x = X[:4] if other == "shape" else X.astype(np.int32)
        _function(tmp_path)(x, x)
    assert len(compiled) == 2


@pytest.mark.parametrize("damage", some(["cut", "flipped", "empty", "foreign", "another's"], 0, 1))
def test_a_damaged_entry_is_compiled_anew(tmp_path, compiled, caplog, damage):
    """The log has one line, the result is right, and the next load finds a good entry."""
    wanted = _function(tmp_path)(X, X)
    entry = _entries(tmp_path)[-1]
    contents = bytearray(entry.read_bytes())
    if damage == "flipped":
        contents[len(contents) // 2] ^= 1
    elif damage == "foreign":  # a good digest of something else
        ExecutableStore(tmp_path).write(entry.stem, b"not an executable")
        contents = bytearray(entry.read_bytes())
    elif damage == "another's":  # that of another program with the same arguments
        _function_of(tmp_path / "other", lambda x, y: jnp.sort(x + y))(X, X)
        contents = bytearray(_entries(tmp_path / "other")[-1].read_bytes())
        compiled.pop()
    else:
        del contents[0 if damage == "empty" else len(contents) // 2 :]
    entry.write_bytes(contents)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        np.testing.assert_array_equal(_function(tmp_path)(X, X), wanted)
    assert len(caplog.records) == 1 and "compiled again" in caplog.text
    assert len(compiled) == 2
    np.testing.assert_array_equal(_function(tmp_path)(X, X), wanted)
    assert len(compiled) == 2


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, compiled, caplog):
    """Executables are code, so nothing is loaded from such a folder or written to it."""
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        for _ in range(2):
            _function(tmp_path)(X, X)
    assert "this user alone" in caplog.text and len(compiled) == 2
    assert _entries(tmp_path) == []


@pytest.mark.parametrize("how", ["writable", "link"])
def test_an_entry_that_others_may_have_written_is_not_loaded(tmp_path, compiled, caplog, how):
    """It is compiled again, with one line in the log, and replaced by an own entry."""
    wanted = _function(tmp_path)(X, X)
    entry = _entries(tmp_path)[-1]
    if how == "writable":
        entry.chmod(0o666)
    else:
        entry.symlink_to(entry.rename(tmp_path / "elsewhere"))
    with caplog.at_level(logging.WARNING, "jaxserve"):
        np.testing.assert_array_equal(_function(tmp_path)(X, X), wanted)
    assert len(caplog.records) == 1 and len(compiled) == 2
    _function(tmp_path)(X, X)
    assert len(compiled) == 2


def test_what_a_start_used_first_is_loaded_early(tmp_path, compiled):
    """The next process has it before it asks; stores stand for processes here."""
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))

    def started() -> tuple[ExecutableStore, StepFunction]:
        store = ExecutableStore(tmp_path)
        shelf = shelf_of(store, place)
        return store, StepFunction("scaled", lambda x, y: jnp.sort(x * y), shelf, num_fixed=0)

    store, function = started()
    assert not store.expect("start") and not store.expect("start")
    function.prepare(X[:2], X[:2])  # never called
    for x in (X, X[:4], X):
        function(x, x)
    assert len((store.read("start") or b"").split()) == 2
    store, function = started()
    assert store.expect("start") and not store.expect("start")
    store.load_expected(jax.devices()[:1])
    for entry in _entries(tmp_path):
        if entry.stat().st_size > 200:
            entry.unlink()
    num = len(compiled)
    np.testing.assert_array_equal(function(X, X), X * X)
    np.testing.assert_array_equal(function(X[:4], X[:4]), X[:4] * X[:4])
    assert len(compiled) == num
    # What a start did not use is dropped at its end, and a later start waits for nothing of it.
    store, function = started()
    assert not store.knows_first
    assert store.expect("start") and store.knows_first
    store.end_start()
    assert not store.knows_first and not store.expect("start")
    store.load_expected(jax.devices()[:1])
    # A start that does not wait for the early load loads for itself.
    store, function = started()
    assert store.expect("start")
    np.testing.assert_array_equal(function(X, X), X * X)


def test_a_program_without_a_kernel_that_failed_is_not_found_again(tmp_path, compiled):
    """A kernel that did not compile while a program was traced may compile for the next process."""
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for kernels, num_entries in ((("one that failed since",), 1), (target_names(), 2)):
        shelf = Shelf(place, ExecutableStore(tmp_path), "below", "above", kernels)
        StepFunction("scaled", lambda x, y: jnp.sort(x * y), shelf, num_fixed=0)(X, X)
        assert len(_entries(tmp_path)) == num_entries  # the program, and its name
    assert len(compiled) == 1


def test_jax_keeps_no_second_copy(tmp_path):
    """An executable of the store is not in JAX's own cache; what is compiled beside it is."""

    def kept_by_the_store(x):
        return jnp.sort(x * 3)

    def kept_by_jax(x):
        return jnp.sort(x * 5)

    before = {
        name: jax.config.values[name]
        for name in (
            "jax_persistent_cache_min_compile_time_secs",
            "jax_persistent_cache_min_entry_size_bytes",
        )
    }
    place = Placement.like(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    shelf = shelf_of(ExecutableStore(tmp_path), place)
    try:
        for name in before:
            jax.config.update(name, 0)
        StepFunction("tripled", kept_by_the_store, shelf, num_fixed=0)(X)
        jax.jit(kept_by_jax)(X)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    names = [path.name for path in Path(jax.config.values["jax_compilation_cache_dir"]).iterdir()]
    assert any("kept_by_jax" in name for name in names)
    assert not any("kept_by_the_store" in name for name in names)
    assert len(_entries(tmp_path)) == 2


def test_arrays_that_an_executable_refuses_are_served_by_jit(tmp_path, caplog):
    """The log says so once, and later calls do not try again."""
    function = _function(tmp_path)
    there = jax.device_put(X, jax.devices()[1])
    function.prepare(jax.device_put(X, jax.devices()[0]), X)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        for _ in range(3):
            np.testing.assert_array_equal(function(there, X), np.sort(X * X))
    assert len(caplog.records) == 1 and "refuses these arrays" in caplog.text


def test_a_new_folder_is_for_its_user_alone(tmp_path):
    """No other user can read or write it."""
    folder = tmp_path / "cache" / "executables"
    ExecutableStore(folder).write("key", b"contents")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_an_earlier_process_made_is_remembered(tmp_path):
    """It is made once, and again if its entry cannot be read."""
    made = []

    def make() -> list[int]:
        made.append(1)
        return [1, 2]

    for _ in range(2):
        assert ExecutableStore(tmp_path).remembered("key", make) == [1, 2]
    assert len(made) == 1
    ExecutableStore(tmp_path).write("key", b"not a pickle")
    assert ExecutableStore(tmp_path).remembered("key", make) == [1, 2]
    assert len(made) == 2


def test_the_oldest_entries_are_removed(tmp_path):
    """The size of all entries stays below the bound, and what was read last stays."""
    executable = jax.jit(lambda x: x + 1).lower(X).compile()
    ExecutableStore(tmp_path).save("key3", executable)
    size = (tmp_path / "key3.compiled").stat().st_size
    (tmp_path / "key3.compiled").unlink()
    store = ExecutableStore(tmp_path, max_bytes=size + 2 * 932)
    for number in range(3):
        store.write(f"key{number}", bytes(900))
        os.utime(tmp_path / f"key{number}.compiled", (number, number))
    assert store.read("key0") is not None  # now the newest
    store.save("key3", executable)
    assert [store.read(f"key{number}") is not None for number in range(4)] == [
        *(True, False, True, True)
    ]


def test_an_executable_whose_kernel_is_not_there_stays(tmp_path, caplog):
    """Without the compiler of an earlier start it is not loaded, and a later start finds it."""
    store = ExecutableStore(tmp_path)
    called = b"pallas_kernels.nothing.0123456789abcdef"
    store.write("key", pickle.dumps((called, None, None)))
    with caplog.at_level(logging.INFO, "jaxserve"):
        assert store.load("key", jax.devices()[:1]) is None
    assert len(caplog.records) == 1 and "which is not there" in caplog.text
    assert store.read("key") is not None


_LOADS_AT_THE_END = """
import pickle, sys, threading
from pathlib import Path
from jaxserve.steps.executable_store import ExecutableStore
from jaxserve.kernels.cpu_targets import target_names

store = ExecutableStore(Path(sys.argv[1]))
store.write("key", pickle.dumps((target_names()[0].encode(), None, None)))

def load():
    threading.main_thread().join()
    print(store.load("key", [None]), store.read("key") is not None)

threading.Thread(target=load).start()
"""


@pytest.mark.release
@pytest.mark.skipif(not build.has_compiler(), reason="needs a C++ compiler")
def test_an_entry_that_is_loaded_while_its_process_ends_stays(tmp_path):
    """Then no thread begins that would register its kernel; a later start finds the entry."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADS_AT_THE_END, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == ["None", "True"], done.stderr
    assert "compiled again" not in done.stderr


def test_a_prepared_executable_serves_without_compiling(tmp_path, compiled):
    """`prepare` from shapes is what a call with arrays needs."""
    function = _function(tmp_path)
    x = jax.device_put(X, jax.devices()[0])
    function.prepare(abstract(x), X)
    num = len(compiled)
    np.testing.assert_array_equal(function(x, X), X * X)
    assert len(compiled) == num == 1


def test_things_without_a_stable_name_are_refused():
    """A function made in another function, and an object of a foreign class, have none."""
    for thing in (lambda: 0, partial(lambda: 0), object(), pytest.Item):
        with pytest.raises(Unnameable):
            key_of(thing)
    assert key_of(jax.nn.silu, np.dtype("float32"), {"a": (1, 2.0)}) == key_of(
        jax.nn.silu, np.dtype("float32"), {"a": (1, 2.0)}
    )
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 2, "b": 1})
    assert len({key_of(1), key_of("1"), key_of(1.0), key_of((1,)), key_of(True)}) == 5


def _key_on(environ: dict[str, str], **about: str) -> str:
    """Return the key of a program on a GPU, in a process with this environment."""
    client = SimpleNamespace(platform="cuda", platform_version="cuda 12090")
    device = {"device_kind": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", **about}
    devices = [SimpleNamespace(id=0, client=client, **device)]
    return key_of(compiler_flags(environ), describe_devices(devices))


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"XLA_CLIENT_MEM_FRACTION": "0.92"},
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        {"XLA_FLAGS": "--xla_gpu_autotune_level=4 --xla_dump_to=/tmp/of_this_job"},
    ],
)
def test_replicas_and_jobs_on_equal_devices_share_executables(environ):
    """Which of the devices a process has, its share of their memory, and its dumps do not count."""
    flags = {"XLA_FLAGS": "--xla_gpu_autotune_level=4"}
    assert _key_on(flags | environ) == _key_on(flags)


def test_other_flags_and_other_devices_have_their_own_executables(tmp_path):
    """Flags may be in a file; a later flag replaces an earlier one."""
    one, two = "--xla_gpu_autotune_level=4", "--xla_gpu_autotune_level=0"
    (tmp_path / "flags").write_text(one)
    assert _key_on({"XLA_FLAGS": str(tmp_path / "flags")}) == _key_on({"XLA_FLAGS": one})
    others = [
        _key_on({}),
        _key_on({"XLA_FLAGS": one}),
        _key_on({"XLA_FLAGS": f"{one} {two}"}),
        _key_on({"XLA_FLAGS": f"{two} {one}"}),
        _key_on({"NVIDIA_TF32_OVERRIDE": "0"}),
        _key_on({}, device_kind="NVIDIA H200"),
        _key_on({}, compute_capability="10.0"),
    ]
    assert len(set(others)) == len(others)


def test_the_versions_of_a_gpu_plugin_and_its_libraries_count(tmp_path, monkeypatch):
    """An upgrade of cuBLAS alone may leave executables with algorithms that it no longer has."""
    before = installed_versions()
    for name in ("jax_cuda13_plugin", "nvidia_cublas"):
        about = tmp_path / f"{name}-90.1.dist-info/METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 90.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    lines = installed_versions()
    assert {"jax-cuda13-plugin 90.1", "nvidia-cublas 90.1"} == set(lines) - set(before)


@pytest.mark.release
def test_a_second_process_traces_no_step(tmp_path):
    """It gets the tokens of the first, which started at the same time as a third on one cache.

    It knows the kernels that serve it, too.
    """
    environment = {**os.environ, "JAXSERVE_CACHE": str(tmp_path)}
    begin = partial(
        subprocess.Popen,
        [sys.executable, "-c", _SERVES],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def result(process: subprocess.Popen[str]) -> tuple[dict[str, list], str]:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return json.loads(out.splitlines()[-1]), err

    both = [begin(), begin()]
    (first, _), (other, _) = map(result, both)
    second, err = result(begin())
    assert first["tokens"] == other["tokens"] == second["tokens"]
    assert first["kernels"] == second["kernels"] and first["kernels"]
    traced, traced_again = first["traced"], second["traced"]
    assert any("decode_loop" in name for name in traced)
    assert not any("decode_loop" in name or "mixed" in name for name in traced_again)
    assert "compiled again" not in err
