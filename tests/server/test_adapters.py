"""Adapters that clients name as the model."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve import Runtime, SamplingParams
from tests.common.tiers import some
from tests.models.adapter_checkpoints import folder_of
from tests.server.serving import CHAT, NAME, client, metrics, post, runtime, server

ADAPTER = "poems"
PROMPT = [4, 8, 15, 16, 23, 42]
EACH: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def rt() -> Iterator[Runtime]:
    with runtime(max_adapters=2, max_adapter_rank=2) as rt:
        rng = np.random.default_rng(0)
        shapes = rt.adapter_shapes(2)
        arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        rt.load_adapter(ADAPTER, arrays, scale=0.2)
        yield rt


def _wanted(rt: Runtime, adapter: str | None) -> list[int]:
    params = SamplingParams(**EACH, adapter=adapter)
    return list(rt.generate(PROMPT, params).token_ids)


@pytest.mark.parametrize(
    ("model", "adapter"), some([(NAME, None), (ADAPTER, ADAPTER), (None, None)], 1)
)
def test_tokens_are_those_of_the_named_model(rt: Runtime, url: str, model, adapter):
    """Of the adapter, or of the weights without one; the answer names what it is of."""
    body = {"token_ids": PROMPT, "sampling_params": EACH}
    body |= {} if model is None else {"model": model}
    answer = post(url, "/inference/v1/generate", body).json()
    assert answer["choices"][0]["token_ids"] == _wanted(rt, adapter)
    assert answer["model"] == (adapter or NAME)
    assert _wanted(rt, None) != _wanted(rt, ADAPTER)


@pytest.mark.parametrize("model", some([NAME, ADAPTER]))
def test_every_endpoint_takes_an_adapter(url: str, model: str):
    with client(url) as ai:
        chat = ai.chat.completions.create(model=model, messages=CHAT, max_tokens=2)
        text = ai.completions.create(model=model, prompt="hi", max_tokens=2)
        response = ai.responses.create(model=model, input="hi", max_output_tokens=2)
    assert chat.model == text.model == response.model == model
    assert post(url, "/tokenize", {"model": model, "prompt": "hi"}).json()["count"] == 2


def test_adapters_are_listed_while_they_are_loaded(rt: Runtime, url: str):
    """One that was dropped is no model of this server any more."""
    with client(url) as ai:
        assert [card.id for card in ai.models.list()] == [NAME, ADAPTER]
        assert ai.models.retrieve(ADAPTER).id == ADAPTER
        arrays = {
            "model.layers.0.mlp.down_proj.lora_A": np.zeros((1, 64), np.float32),
            "model.layers.0.mlp.down_proj.lora_B": np.zeros((32, 1), np.float32),
        }
        rt.load_adapter("late", arrays, scale=1.0)
        assert [card.id for card in ai.models.list()] == [NAME, ADAPTER, "late"]
        rt.drop_adapter("late")
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny, poems'"):
            ai.chat.completions.create(model="late", messages=CHAT)


def test_clients_load_and_drop_adapters(tmp_path: Path):
    """Those below the server's folder, while it runs; one that is in use stays."""
    with runtime(max_adapters=1, max_adapter_rank=2, step_s=0.02) as rt:
        shapes = rt.adapter_shapes(2)
        rng = np.random.default_rng(0)
        arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        folder_of(tmp_path / "poems", arrays, r=2, lora_alpha=0.4)
        folder_of(tmp_path / "huge", arrays, r=2, lora_alpha=10**400)
        folder_of(tmp_path / "wrong", {"lm_head.lora_A.weight": np.ones((2, 2), np.float32)}, r=2)
        with server(rt, adapter_folder=tmp_path) as url:

            def ask(verb: str, name: str, path: str | None = None) -> tuple[int, Any]:
                body = {"lora_name": name} | ({} if path is None else {"lora_path": path})
                answer = post(url, f"/v1/{verb}_lora_adapter", body)
                return answer.status_code, answer.json()

            status, card = ask("load", ADAPTER, "poems")
            assert status == 200 and card["id"] == ADAPTER == rt.adapters[0]
            body = {"token_ids": PROMPT, "sampling_params": EACH, "model": ADAPTER}
            tokens = post(url, "/inference/v1/generate", body).json()["choices"][0]["token_ids"]
            assert tokens == _wanted(rt, ADAPTER) != _wanted(rt, None)
            pending = rt.submit(PROMPT, SamplingParams(max_tokens=60, adapter=ADAPTER))
            status, said = ask("unload", ADAPTER)
            assert status == 409 and said["error"]["code"] == "engine_busy"
            pending.result(60)
            for name, path, param in (
                ("a", "../poems", "lora_path"),
                ("a", "/etc", "lora_path"),
                (NAME, "poems", "lora_name"),
                ("a", "nowhere", None),
                ("a", "wrong", None),
                ("a", "huge", None),
                (ADAPTER, "poems", None),
            ):
                status, said = ask("load", name, path)
                assert status == 400 and said["error"]["param"] == param, (name, path)
            assert rt.adapters == (ADAPTER,)
            assert ask("unload", ADAPTER) == (
                200,
                {"id": ADAPTER, "object": "model", "deleted": True},
            )
            assert rt.adapters == () and ask("unload", ADAPTER)[0] == 400
        with server(rt) as url:
            answer = post(url, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "poems"})
            assert answer.status_code == 404
            assert "--adapter-folder" in answer.json()["error"]["message"]


@pytest.mark.release
def test_adapters_of_open_requests_are_in_the_metrics():
    """A gateway reads which adapters run and wait, and how many may; ended requests have none."""
    name = "jaxserve:lora_requests_info"
    begun_s = time.time()
    with runtime(step_s=0.05, max_adapters=1, max_adapter_rank=1, max_slots=1) as slow:
        shapes = slow.adapter_shapes(1)
        arrays = {each: np.zeros(shape, np.float32) for each, shape in shapes.items()}
        slow.load_adapter(ADAPTER, arrays, scale=1.0)
        params = SamplingParams(max_tokens=60, adapter=ADAPTER)
        with server(slow) as address:
            assert _labels(address, name) == ["", "", "1"]
            running = slow.submit(PROMPT, params)
            while _labels(address, name) != ["", "1", ADAPTER]:
                assert time.time() < begun_s + 60
            waiting = slow.submit(PROMPT, params)
            assert _labels(address, name) == ["1", ADAPTER, ADAPTER]
            running.cancel()
            waiting.cancel()
            for each in (running, waiting):
                each.result()
            while _labels(address, name) != ["", "", "1"]:
                assert time.time() < begun_s + 60
        slow.drop_adapter(ADAPTER)
    with runtime() as none, server(none) as address:
        assert not any(each.startswith(name) for each in metrics(address))


def _labels(url: str, name: str) -> list[str]:
    """Return the sorted labels of a metric whose value is the present time."""
    ((found, value),) = [each for each in metrics(url).items() if each[0].startswith(name)]
    assert abs(value - time.time()) < 60
    return ast.literal_eval(found.removeprefix(name))
