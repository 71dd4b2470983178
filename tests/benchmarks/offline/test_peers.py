"""Comparisons with peers: their inputs, their results, and what they leave behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.common.harness import nothing_failed
from benchmarks.common.processes import PeerError, run
from benchmarks.offline.peers import compare
from benchmarks.offline.peers.answering import timed
from benchmarks.offline.peers.compare import (
    GROUPS,
    OPTIONS,
    PEERS,
    SCRIPTS,
    interleave,
    named,
    peers_of,
    summarise,
)
from benchmarks.offline.peers.job import write_job, write_models
from jaxserve.core.errors import InvalidConfigError
from jaxserve.models.gguf import GGUFSource
from jaxserve.models.quantised_folders.folder import QuantisedFolder, method_of
from jaxserve.models.safetensors_source import SafetensorsSource
from jaxserve.workload import WorkloadItem
from tests.common.processes import HEED_INTERRUPTS
from tests.models.gguf_models import TOKENIZER, VOCAB, write_gguf

pytestmark = pytest.mark.release

LENGTHS = [2, 3]
ANSWERS = [[5, 6], [7, 8, 9]]
OTHER_ANSWERS = [[5, 6], [7, 8, 1]]


def _engine(folder: Path, name: str, body: str) -> list[str]:
    """Return a command that appends its name to the file `turns` and then runs `body`."""
    script = folder / f"{name}.py"
    script.write_text(
        "import json, os, subprocess, sys, time\n"
        f"open({str(folder / 'turns')!r}, 'a').write('{name} ')\n"
        "def answer(wall_s, ids):\n"
        "    print('a line of chatter')\n"
        "    print(json.dumps({'startup_s': 1.5, 'wall_s': wall_s, 'token_ids': ids}))\n"
        f"{body}\n",
        encoding="utf-8",
    )
    return [sys.executable, str(script)]


def _answering(wall_s: float, answers: list[list[int]]) -> str:
    return f"answer({wall_s}, {answers})"


def _options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag, settings in OPTIONS:
        parser.add_argument(flag, **settings)
    defaults = {"dtype": None, "kv_dtype": None, "model": "smollm2-135m", "load": None}
    defaults |= {"quantize": None, "num_requests": 4}
    return argparse.Namespace(**(vars(parser.parse_args(arguments)) | defaults))


def test_a_group_stands_for_its_members():
    """`transformers` runs both ways of batching, and the other peers keep their order."""
    assert list(named("vllm,transformers")) == ["vllm", *GROUPS["transformers"]]


def test_every_peer_has_its_script_and_pinned_requirements():
    """pip installs only pinned versions."""
    for name, peer in PEERS.items():
        assert (SCRIPTS / peer.script).is_file(), name
        assert all("==" in requirement for requirement in peer.environment.requirements), name


@pytest.mark.parametrize("names", ["vllm,unknown", "", "vllm,"])
def test_unknown_peers_are_refused_by_name(names: str):
    """The error lists the known peers."""
    with pytest.raises(InvalidConfigError, match=r"known are .*'openvino'"):
        named(names)


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"load": "random"}, "--load"),
        ({"model": "folder"}, "GGUF"),
        ({"kv_dtype": "int8"}, "leave out --kv-dtype"),
        ({"quantize": "keep"}, "'vllm'.*do not have such weights"),
        ({"quantize": "fp8"}, "--quantize bf16, int8, int4, keep, not fp8"),
        ({"fewer_requests": "1,4"}, "numbers from 1 to 3"),
        ({"fewer_requests": "one"}, "numbers from 1 to 3"),
    ],
)
def test_what_cannot_be_compared_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, object], hint: str
):
    """Another precision, random weights and a folder are refused with a remedy."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    options = _options("--compare", "vllm")
    with pytest.raises(InvalidConfigError, match=hint):
        peers_of(argparse.Namespace(**(vars(options) | changed)))
    assert list(peers_of(options)) == ["vllm"]
    assert peers_of(_options()) == {}


def test_runs_are_interleaved_and_summarised(tmp_path: Path):
    """The order is ours, the peer, ours, the peer; medians and ratios come from all runs."""
    commands = {
        "jaxserve": _engine(tmp_path, "jaxserve", _answering(2.0, ANSWERS)),
        "slow": _engine(tmp_path, "slow", _answering(5.0, OTHER_ANSWERS)),
    }
    runs = interleave(commands, tmp_path / "job.json", LENGTHS, repeats=2)
    assert (tmp_path / "turns").read_text() == "jaxserve slow jaxserve slow "
    figures = summarise(runs)
    assert figures["jaxserve"]["output_tokens_per_s"] == 2.5
    assert figures["jaxserve"]["same_answers"] == 2
    assert [run["output_tokens_per_s"] for run in figures["slow"]["runs"]] == [1.0, 1.0]
    assert figures["slow"]["range"]["output_tokens_per_s"] == [1.0, 1.0]
    assert figures["slow"]["jaxserve_is_faster_by"] == 2.5
    assert figures["slow"]["startup_s"] == 1.5
    assert figures["slow"]["same_answers"] == 1
    assert nothing_failed({"engines": figures})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("sys.exit('no such instruction')", "ended with status 1: no such instruction"),
        ("os.abort()", "ended with status -6"),
        ("print('{')", "printed no result"),
        ("", "printed no result"),
        (_answering(1.0, [[5, 6], [7, 8]]), "answer 1 of 2 tokens instead of 3"),
        (_answering(1.0, [[5, 6]]), "1 answers to 2 requests"),
    ],
)
def test_a_peer_that_fails_takes_no_other_with_it(tmp_path: Path, body: str, why: str):
    """Its error is recorded, it does not run again, and the others continue."""
    commands = {
        "jaxserve": _engine(tmp_path, "jaxserve", _answering(2.0, ANSWERS)),
        "broken": _engine(tmp_path, "broken", body),
        "other": _engine(tmp_path, "other", _answering(1.0, ANSWERS)),
    }
    runs = interleave(commands, tmp_path / "job.json", LENGTHS, repeats=2)
    assert (tmp_path / "turns").read_text() == "jaxserve broken other jaxserve other "
    figures = summarise(runs)
    assert why in figures["broken"]["error"]
    assert figures["broken"]["output_tokens_per_s"] is None
    assert figures["other"]["jaxserve_is_faster_by"] == 0.5
    assert figures["other"]["error"] is None
    assert not nothing_failed({"engines": figures})


@pytest.mark.parametrize(("interrupted", "kept"), [(5, 2), (3, 1), (1, None)])
def test_ctrl_c_keeps_whole_rounds(tmp_path: Path, monkeypatch, interrupted: int, kept: int | None):
    """Rounds that all engines have ended count; in the first round there are none."""
    commands = {
        name: _engine(tmp_path, name, _answering(2.0, ANSWERS)) for name in ("jaxserve", "other")
    }
    turns = iter(range(6))
    run_once = compare.run

    def run_until(*arguments: Any) -> dict[str, Any]:
        if next(turns) == interrupted:
            raise KeyboardInterrupt
        return run_once(*arguments)

    monkeypatch.setattr(compare, "run", run_until)
    if kept is None:
        with pytest.raises(KeyboardInterrupt):
            interleave(commands, tmp_path / "job.json", LENGTHS, repeats=3)
        return
    runs = interleave(commands, tmp_path / "job.json", LENGTHS, repeats=3)
    assert [len(engine.results) for engine in runs.values()] == [kept, kept]


def test_memory_is_that_of_all_processes_of_an_engine(tmp_path: Path):
    """The memory of its child processes counts, and that of the benchmark does not."""
    held = np.ones(2**26)  # 512 MiB
    child = "import time; held = bytearray(2**27); time.sleep(2)"
    command = _engine(
        tmp_path, "engine", f"subprocess.run([sys.executable, '-c', {child!r}])\nprint('{{}}')"
    )
    peak_bytes = run(command, tmp_path / "log", limit_s=60.0)["peak_bytes"]
    assert 2**27 < peak_bytes < held.nbytes


def test_a_run_that_hangs_is_ended(tmp_path: Path):
    """The error says how long the run was waited for."""
    command = _engine(tmp_path, "engine", "time.sleep(60)")
    with pytest.raises(PeerError, match="no answer after 0.5 s"):
        run(command, tmp_path / "log", limit_s=0.5)


def test_peers_keep_their_figures_when_ours_fails(tmp_path: Path):
    """Without our run there is no ratio, but the peers' rates are in the result."""
    commands = {
        "jaxserve": _engine(tmp_path, "jaxserve", "sys.exit(3)"),
        "other": _engine(tmp_path, "other", _answering(1.0, ANSWERS)),
    }
    figures = summarise(interleave(commands, tmp_path / "job.json", LENGTHS, repeats=1))
    assert figures["other"]["output_tokens_per_s"] == 5.0
    assert figures["other"]["jaxserve_is_faster_by"] is None
    assert figures["other"]["same_answers"] is None


@pytest.mark.parametrize(
    ("kind", "heeded"), [(signal.SIGINT, "SIG_IGN"), (signal.SIGTERM, "SIG_DFL")]
)
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, kind: signal.Signals, heeded: str):
    """Ctrl-C or SIGTERM ends an engine and its children, even if they resist."""
    started = tmp_path / "started"
    child = f"import signal, time; signal.signal(signal.SIGTERM, signal.{heeded}); time.sleep(60)"
    command = _engine(
        tmp_path,
        "engine",
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "time.sleep(0.5)\n"  # for it to ignore signals
        f"open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(60)",
    )
    program = (
        f"{HEED_INTERRUPTS}; from pathlib import Path\n"
        "from benchmarks.common.processes import run\n"
        f"run({command!r}, Path({str(tmp_path / 'log')!r}), 60.0)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + 20
    while not (started.exists() and started.read_text().endswith(" ")):
        assert time.monotonic() < deadline_s and parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(kind)
    _, errors = parent.communicate(timeout=20)
    assert b"KeyboardInterrupt" in errors
    for pid in map(int, started.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_every_format_holds_the_same_weights(tmp_path: Path):
    """safetensors and both GGUF files agree bit for bit, with the configuration of the source."""
    write_gguf(tmp_path / "source.gguf", "llama", tokenizer=TOKENIZER)
    models = write_models(tmp_path / "source.gguf", tmp_path / "models")
    plain = load_file(Path(models["safetensors"]) / "model.safetensors")
    source = GGUFSource(tmp_path / "source.gguf")
    half, single = GGUFSource(models["F16"]), GGUFSource(models["F32"])
    assert set(plain) == set(source.shapes()) == set(half.shapes()) == set(single.shapes())
    for name, tensor in plain.items():
        assert tensor.dtype == single.read(name).dtype == np.float32
        np.testing.assert_array_equal(tensor, single.read(name))
        np.testing.assert_array_equal(tensor, half.read(name).astype(np.float32))
        np.testing.assert_allclose(tensor, source.read(name), rtol=1e-3, atol=1e-7)
    config = json.loads(Path(models["safetensors"], "config.json").read_text())
    assert config.pop("architectures") == ["LlamaForCausalLM"]
    assert config == half.config == single.config == source.config
    # For llama.cpp, no token that this model generates ends an answer.
    assert "<|end|>" in half.file.metadata["tokenizer.ggml.tokens"]
    assert "<|end|>" not in single.file.metadata["tokenizer.ggml.tokens"]
    assert single.file.metadata["tokenizer.ggml.eos_token_id"] == VOCAB - 1
    assert {info.type_name for info in half.file.tensors.values()} == {"F16", "F32"}
    assert {info.type_name for info in single.file.tensors.values()} == {"F32"}


@pytest.mark.parametrize(("quantize", "blocks"), [("int8", "Q8_0"), ("int4", "Q4_0")])
def test_weights_in_few_bits_are_rounded_from_the_same_numbers(
    tmp_path: Path, quantize: str, blocks: str
):
    """Layers have the blocks that peers have kernels for, the embedding has 8 bits."""
    write_gguf(tmp_path / "source.gguf", "llama", tokenizer=TOKENIZER)
    models = write_models(tmp_path / "source.gguf", tmp_path / "models", quantize)
    single = GGUFSource(models["F32"])
    for kind in ("few_bits", "few_bits_endless"):
        few = GGUFSource(models[kind])
        assert few.type_name("model.layers.0.mlp.down_proj.weight") == blocks
        assert few.type_name("model.embed_tokens.weight") == "Q8_0"
        assert few.type_name("model.norm.weight") == "F32"
        for name in few.shapes():
            error = few.read(name) - single.read(name)
            limit = 0.01 if few.type_name(name) == "Q8_0" else 0.12
            assert np.linalg.norm(error) <= limit * np.linalg.norm(single.read(name))
    assert (
        "<|end|>"
        not in GGUFSource(models["few_bits_endless"]).file.metadata["tokenizer.ggml.tokens"]
    )


@pytest.mark.parametrize(("quantize", "limit"), [("int8", 0.01), ("int4", 0.12)])
def test_vllm_gets_a_folder_in_few_bits(tmp_path: Path, quantize: str, limit: float):
    """A reader of compressed-tensors folders finds the numbers of the model, to the rounding."""
    write_gguf(tmp_path / "source.gguf", "llama", tokenizer=TOKENIZER)
    models = write_models(tmp_path / "source.gguf", tmp_path / "models", quantize)
    single, path = GGUFSource(models["F32"]), Path(models["compressed_tensors"])
    config = json.loads((path / "config.json").read_text())
    method = method_of(config)
    assert method is not None
    folder = QuantisedFolder(SafetensorsSource(path), method)
    assert set(folder.shapes()) == set(single.shapes())
    for name in single.shapes():
        error = folder.read(name) - single.read(name)
        is_rounded = folder.matrix(name) is not None
        assert is_rounded == (".layers." in name and single.read(name).ndim == 2)
        assert np.linalg.norm(error) <= limit * np.linalg.norm(single.read(name)) * is_rounded


def test_blocks_of_the_source_are_kept(tmp_path: Path):
    """Matrices have the bytes of the source; for llama.cpp no token ends an answer."""
    write_gguf(tmp_path / "source.gguf", "llama", tokenizer=TOKENIZER)
    models = write_models(tmp_path / "source.gguf", tmp_path / "models", "keep")
    source = GGUFSource(tmp_path / "source.gguf")
    for kind in ("few_bits", "few_bits_endless"):
        kept = GGUFSource(models[kind])
        for name in source.shapes():
            assert kept.type_name(name) == source.type_name(name)
            np.testing.assert_array_equal(kept.read(name), source.read(name))
    assert "compressed_tensors" not in models
    assert "<|end|>" not in kept.file.metadata["tokenizer.ggml.tokens"]


def test_fewer_requests_have_figures_of_their_own(tmp_path: Path):
    """A process that answers all requests and fewer ones gives a figure for each number."""
    fewer = "[{'wall_s': %s, 'token_ids': [[5, 6]]}]"
    for name, wall_s in (("jaxserve", 1.0), ("other", 4.0)):
        _engine(
            tmp_path,
            name,
            "print(json.dumps({'startup_s': 1, 'wall_s': 2, 'token_ids': "
            f"{ANSWERS}, 'fewer': {fewer % wall_s}}}))",
        )
    commands = {
        name: [sys.executable, str(tmp_path / f"{name}.py")] for name in ("jaxserve", "other")
    }
    runs = interleave(commands, tmp_path / "job.json", LENGTHS, repeats=2)
    figures = summarise(compare.of_fewer(runs, 0))
    assert summarise(runs)["other"]["jaxserve_is_faster_by"] == 1.0
    assert figures["other"]["jaxserve_is_faster_by"] == 4.0
    assert figures["other"]["output_tokens_per_s"] == 0.5


def test_an_engine_is_timed_for_every_number_of_requests():
    """The first requests alone come first, and then all of them."""
    asked = []

    def answers(requests: list[dict]) -> list[list[int]]:
        asked.append(requests)
        return [[1]] * len(requests)

    found = timed(answers, {"requests": [{"prompt": [i]} for i in range(3)], "fewer": [1, 2]})
    assert list(map(len, asked)) == [1, 2, 3]
    assert found["token_ids"] == [[1]] * 3
    assert [len(each["token_ids"]) for each in found["fewer"]] == [1, 2]


def test_the_job_says_how_long_a_sequence_gets(tmp_path: Path):
    """A cache of `kv_cache_gib` holds a whole batch with the longest prompt and answer."""
    write_gguf(tmp_path / "source.gguf", "llama")
    items = [
        WorkloadItem(prompt_token_ids=(1, 2, 3), num_output_tokens=9, max_tokens=10),
        WorkloadItem(prompt_token_ids=(4,), num_output_tokens=10, max_tokens=10),
    ]
    models = {"F16": str(tmp_path / "source.gguf")}
    write_job(tmp_path / "job.json", models, items, batch_size=2, settings={"policy": "orca"})
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["max_context"] == 12
    assert job["kv_cache_gib"] == 1
    assert job["settings"] == {"policy": "orca"}
    assert job["requests"][0] == {"prompt": [1, 2, 3], "num_output_tokens": 9, "max_tokens": 10}
