"""A trainer's weights for all replicas on a real Ray, with the tokens of one runtime."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxserve import Fleet, Runtime, SamplingParams
from jaxserve.core.errors import (
    EngineBusyError,
    InvalidConfigError,
    InvalidParamsError,
    JaxserveError,
    UnknownModelError,
)
from jaxserve.fleet.ray_replica import ReplicaActor
from jaxserve.models.families import config_from_hf
from jaxserve.models.loading import random_params
from jaxserve.testing.tiny import random_prompts
from tests.common.waiting import until
from tests.fleet.tiny_model import CONFIG, OPTIONS

pytestmark = pytest.mark.release

PROMPTS = random_prompts(8, longest=40)
EACH = SamplingParams(max_tokens=12)
WAIT_S = 240


def _params(seed: int) -> nnx.State:
    return random_params(config_from_hf(CONFIG), seed)


def _part(params: nnx.State) -> nnx.State:
    flat = nnx.to_flat_state(params)
    return nnx.from_flat_state([(path, v) for path, v in flat if path[:2] == ("blocks", 1)])


def _folder(path: Path, value: float | None = None, **config: object) -> str:
    """Write a checkpoint of random weights, or of one value, in Hugging Face's names."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    rng = np.random.default_rng(5)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    key = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], hidden),
        "lm_head.weight": (CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": s for name, s in of_layer.items()}
    tensors = {name: rng.normal(0, 0.3, shape).astype("f4") for name, shape in shapes.items()}
    if value is not None:
        tensors["model.norm.weight"][:] = value
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_process_loads_a_folder_in_the_form_of_its_weights(tmp_path, dtype):
    """Those of folders in bfloat16 may be in it; the process is this one, without Ray."""
    folders = [_folder(tmp_path / name, dtype=dtype) for name in ("first", "second")]
    options = {name: value for name, value in OPTIONS.items() if name not in ("load", "progress")}

    async def run() -> None:
        actor = ReplicaActor()
        await actor.start(folders[0], 1, options)
        await actor.prepare_params(folders[1], False)
        await actor.drop_prepared()

    asyncio.run(run())


@pytest.fixture(scope="module")
def wanted(model) -> Callable[[int | str], list[tuple[int, ...]]]:
    """The answers of one runtime with the weights of a seed, or of a folder."""
    known: dict[int | str, list[tuple[int, ...]]] = {}

    def answers(which: int | str) -> list[tuple[int, ...]]:
        if which not in known:
            is_seed = isinstance(which, int)
            options = OPTIONS if is_seed else OPTIONS | {"load": "auto"}
            with Runtime.from_pretrained(model if is_seed else which, **options) as rt:
                if is_seed:
                    rt.update_params(_params(which))
                known[which] = [c.token_ids for c in rt.generate(PROMPTS, EACH)]
        return known[which]

    return answers


@pytest.fixture(scope="module")
def fleet(ray, model, wanted) -> Iterator[Fleet]:
    """A fleet that starts after a runtime, which compiled all executables."""
    wanted(7)
    with Fleet(model, replicas=2, **OPTIONS) as fleet:
        yield fleet


def _replace(fleet: Fleet, index: int) -> None:
    """Kill a replica, and wait until another process serves in its place."""
    before = fleet.replicas[index]
    assert before.started is not None
    os.kill(before.started.pid, signal.SIGKILL)

    def is_replaced() -> bool:
        fleet.stats()  # which notices the death
        return fleet.replicas[index].num_deaths > before.num_deaths

    until(is_replaced, WAIT_S)
    until(lambda: fleet.replicas[index].started is not None, WAIT_S)


def _check(fleet: Fleet, tokens: list[tuple[int, ...]], version: int) -> None:
    """Check that all replicas have this version, and answer with these tokens."""
    done = fleet.generate(PROMPTS, EACH)
    assert [c.token_ids for c in done] == tokens
    assert {v for c in done for v in c.weights_versions} == {version}
    assert [state.weights_version for state in fleet.replicas] == [version] * 2
    assert fleet.weights_version == version


def test_a_trainers_arrays_reach_every_replica_and_those_that_come(fleet, wanted):
    """Whole or in part, in another dtype too; a process that replaces another one has them."""
    version = fleet.update_params(_params(7))
    _check(fleet, wanted(7), version)
    _replace(fleet, 0)
    _check(fleet, wanted(7), version)
    assert fleet.update_params(_part(_params(8)), partial=True) == version + 1
    partly = [c.token_ids for c in fleet.generate(PROMPTS, EACH)]
    assert partly != wanted(7)
    _replace(fleet, 1)
    _check(fleet, partly, version + 1)
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params(9))
    assert fleet.update_params(halves, version=version + 5) == version + 5
    rounded = [c.token_ids for c in fleet.generate(PROMPTS, EACH)]
    assert rounded != partly
    _replace(fleet, 0)
    _check(fleet, rounded, version + 5)


def test_a_folder_is_loaded_by_every_replica(fleet, wanted, tmp_path):
    """Also by one that comes later; a folder with NaN or of another model changes nothing."""
    good = _folder(tmp_path / "good")
    version = fleet.update_params(Path(good))
    _check(fleet, wanted(good), version)
    _replace(fleet, 1)
    _check(fleet, wanted(good), version)
    for folder, error, said in (
        (_folder(tmp_path / "nan", np.nan), InvalidParamsError, "NaN"),
        (_folder(tmp_path / "other", rope_theta=1e5), InvalidParamsError, "another rope"),
        (str(tmp_path / "nowhere"), UnknownModelError, "nowhere"),
    ):
        with pytest.raises(error, match=said):
            fleet.update_params(folder)
    with pytest.raises(InvalidConfigError, match="partial=True"):
        fleet.update_params(good, partial=True)
    _check(fleet, wanted(good), version)


def test_arrays_that_do_not_fit_change_nothing(fleet, wanted):
    """They are refused by the fleet or by its replicas, and the old weights go on serving."""
    version = fleet.update_params(_params(7))
    leaves, structure = jax.tree.flatten(_params(8))
    with_nan = jax.tree.unflatten(structure, [leaves[0] * jnp.nan, *leaves[1:]])
    for wrong, error, said in (
        (with_nan, InvalidParamsError, "NaN"),
        (_part(_params(8)), InvalidParamsError, "is missing"),
        (nnx.State({"odd": nnx.Param(jnp.ones(3))}), InvalidParamsError, "is missing"),
    ):
        with pytest.raises(error, match=said):
            fleet.update_params(wrong)
    with pytest.raises(JaxserveError, match="'finish', 'restart'"):
        fleet.update_params(_params(8), running="wait")
    _check(fleet, wanted(7), version)


def test_requests_go_on_with_new_weights_and_pause(fleet):
    """Their tokens have both versions; a paused fleet answers nothing, and takes updates."""
    version = fleet.update_params(_params(7))
    long = SamplingParams(max_tokens=1500)
    pieces = [[] for _ in PROMPTS]
    running = [
        fleet.submit(prompt, long, on_piece=each.append)
        for prompt, each in zip(PROMPTS, pieces, strict=True)
    ]
    until(lambda: sum(map(bool, pieces)) >= 4, WAIT_S)
    assert fleet.update_params(_params(8), running="keep") == version + 1
    fleet.pause()
    waiting = fleet.submit(PROMPTS[0], EACH)
    with pytest.raises(EngineBusyError, match=r"fleet\.resume"):
        fleet.update_params(_params(9), running="finish")
    assert fleet.update_params(_params(9)) == version + 2  # "keep" in a pause
    with pytest.raises(TimeoutError):
        waiting.result(0.2)
    fleet.resume()
    done = [one.result(WAIT_S) for one in running]
    assert [c.error for c in done] == [None] * len(done)
    assert all(list(c.weights_versions) == sorted(c.weights_versions) for c in done)
    changed = [c for c in done if {version, version + 2} <= set(c.weights_versions)]
    assert changed and all(len(c.token_ids) == long.max_tokens for c in changed)
    assert waiting.result(WAIT_S).weights_versions == (version + 2,) * EACH.max_tokens
