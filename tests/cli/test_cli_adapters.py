"""Adapters on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.cli.opening import room_for
from tests.cli.common import SMALL, assert_refused, run

ANSWER = "generate --raw --ignore-eos --max-tokens 6"


def _adapter(folder: Path, size: float) -> str:
    """Write an adapter of the model's `down_proj` [32, 48]."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    own = "base_model.model.model.layers.1.mlp.down_proj."
    arrays = {
        f"{own}lora_A.weight": size * rng.standard_normal((2, 48), np.float32),
        f"{own}lora_B.weight": rng.standard_normal((32, 2), np.float32),
    }
    save_file(arrays, folder / "adapter_model.safetensors")
    return str(folder)


def _tokens(done) -> list:
    assert done.exit_code == 0, done.stderr
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


@pytest.mark.release
def test_one_adapter_is_that_of_all_prompts(model, tmp_path):
    """One of zeros changes nothing, and a large one does."""
    common = f"{ANSWER} hello --model {model} {SMALL}"
    plain = _tokens(run(common))
    for size in (0.0, 50.0):
        folder = _adapter(tmp_path / str(size), size)
        assert (_tokens(run(f"{common} --adapter x={folder}")) == plain) == (size == 0)


@pytest.mark.release
def test_lines_name_one_of_several(model, tmp_path):
    """Each line has the answer of its adapter, and a line without one that of none."""
    zeros, large = _adapter(tmp_path / "a", 0.0), _adapter(tmp_path / "b", 50.0)
    lines = [{"prompt": "hello", **own} for own in ({}, {"adapter": "a"}, {"adapter": "b"})]
    file = tmp_path / "prompts"
    file.write_text("\n".join(map(json.dumps, lines)))
    both = f"--adapter a={zeros} --adapter b={large}"
    done = run(f"{ANSWER} --jsonl {file} {both} --model {model} {SMALL}")
    plain, zeros, large = _tokens(done)
    assert plain == zeros != large


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--adapter x", "pass NAME=FOLDER"),
        ("--adapter x=a --adapter x=b", "each name once"),
        ("--adapter x=nowhere", "not an adapter of PEFT"),
    ],
)
def test_wrong_adapters_are_refused(model, given, said):
    assert_refused(run(f"{ANSWER} hello --model {model} {SMALL} {given}"), said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--adapter-folder nowhere", "is no folder"),
        ("--adapter-folder . --replicas 2", "load no adapters"),
        ("--max-adapters 2 --replicas 2", "load no adapters"),
        # Requests with the name of the model get the model.
        ("--served-model-name poems --adapter poems=runs", "the adapter 'poems' has the name"),
    ],
)
def test_adapters_of_a_server_are_checked_before_the_model_is_loaded(given, said):
    assert_refused(run(f"serve smollm2-135m {given}"), said)


@pytest.mark.parametrize(
    ("most", "rank", "room"),
    [
        (None, None, {}),
        (0, None, {}),
        (3, None, {"max_adapters": 3}),
        (3, 8, {"max_adapters": 3, "max_adapter_rank": 8}),
    ],
)
def test_room_for_adapters_that_come_later(most, rank, room):
    assert room_for({}, most, rank) == room
