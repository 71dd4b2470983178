"""The default model, from its quantised file to its answers, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from jaxserve import Runtime, SamplingParams
from jaxserve.models.gguf_source import GGUFSource
from jaxserve.models.store import load_model
from tests.models.hf_checkpoints import greedy_shortfall, torch_logits
from tests.models.serving import Server

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "On 14 July 1789, 1234567 people gathered. In",
)


@pytest.fixture(scope="module")
def runtime(smollm2_path):
    with Runtime.from_pretrained(
        "smollm2-135m",
        max_slots=2,
        max_context=128,
        max_step_tokens=64,
        kv_memory="20MB",
        warmup=False,
        progress=False,
    ) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def reference(smollm2_path):
    source = GGUFSource(smollm2_path)
    config = transformers.LlamaConfig(**source.config)
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = {name: torch.tensor(source.read(name)) for name in source.shapes()}
    missing, surplus = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not surplus
    model.tie_weights()
    return model


def test_logits_equal_pytorch(smollm2_path, reference):
    """Logits of a prompt, by the file converted afresh, agree to 1e-4."""
    # Scanned layers compile in a tenth of the time.
    loaded = load_model(smollm2_path, layer_layout="scanned", cache=False, progress=False)
    assert loaded.tokenizer is not None
    server = Server(loaded.graphdef, loaded.params, loaded.config, "scanned")
    token_ids = np.asarray(loaded.tokenizer.encode(PROMPTS[2]))
    (logits,) = server.step([(0, token_ids)])
    expected = torch_logits(reference, token_ids)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_greedy_tokens_equal_pytorch(runtime, reference):
    """More prompts than slots: each gets the tokens that PyTorch chooses."""
    completions = runtime.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
    for completion in completions:
        assert len(completion.token_ids) == 16
        prompt, answer = completion.prompt_token_ids, completion.token_ids
        assert greedy_shortfall(reference, prompt, answer) < 1e-4


def test_a_chat_is_answered_sensibly(runtime):
    """A chat through template, model and detokenizer gives the right answer, and ends there."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    completion = runtime.generate([chat])[0]
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop"
