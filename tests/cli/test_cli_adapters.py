"""Adapters on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.cli.opening import room_for
from jaxserve.testing import write_chat_model
from tests.cli.common import run

SMALL = ("--load", "random", "--max-slots", "1", "--max-context", "64", "--quiet")
ANSWER = ("hello", "--raw", "--ignore-eos", "--max-tokens", "6")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return write_chat_model(tmp_path_factory.mktemp("tiny"))


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
    common = ("generate", *ANSWER, "--model", model, *SMALL)
    plain = _tokens(run(*common))
    for size in (0.0, 50.0):
        folder = _adapter(tmp_path / str(size), size)
        assert (_tokens(run(*common, "--adapter", f"x={folder}")) == plain) == (size == 0)


@pytest.mark.release
def test_lines_name_one_of_several(model, tmp_path):
    """Each line has the answer of its adapter, and a line without one that of none."""
    some = [f"{name}={_adapter(tmp_path / name, size)}" for name, size in (("a", 0.0), ("b", 50.0))]
    lines = [{"prompt": "hello", **own} for own in ({}, {"adapter": "a"}, {"adapter": "b"})]
    file = tmp_path / "prompts"
    file.write_text("\n".join(map(json.dumps, lines)))
    given = [part for each in some for part in ("--adapter", each)]
    done = run(
        "generate",
        "--jsonl",
        str(file),
        "--raw",
        "--ignore-eos",
        "--max-tokens",
        "6",
        *given,
        "--model",
        model,
        *SMALL,
    )
    plain, zeros, large = _tokens(done)
    assert plain == zeros != large


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("x",), "pass NAME=FOLDER"),
        (("x=a", "x=b"), "each name once"),
        (("x=nowhere",), "not an adapter of PEFT"),
    ],
)
def test_wrong_adapters_are_refused(model, given, said):
    """Exit code 2 and one message."""
    options = [part for each in given for part in ("--adapter", each)]
    done = run("generate", *ANSWER, "--model", model, *SMALL, *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--adapter-folder", "nowhere"), "is no folder"),
        (("--adapter-folder", ".", "--replicas", "2"), "load no adapters"),
        (("--max-adapters", "2", "--replicas", "2"), "load no adapters"),
    ],
)
def test_folders_of_adapters_are_checked_before_the_model_is_loaded(given, said):
    done = run("serve", "smollm2-135m", *given)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


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


def test_an_adapter_with_the_models_name_is_refused_by_the_server():
    """Requests with that name get the model. The error comes before the model is loaded."""
    done = run("serve", "smollm2-135m", "--served-model-name", "poems", "--adapter", "poems=runs")
    assert done.exit_code == 2
    assert "the adapter 'poems' has the name" in " ".join(done.stderr.split())
