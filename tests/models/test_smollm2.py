"""The default model, from its quantised file to its answers, compared with PyTorch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxserve import Runtime, SamplingParams
from jaxserve.core.options import KV_DTYPES
from jaxserve.models.gguf import GGUFSource
from jaxserve.models.store import load_model
from tests.common.tiers import some
from tests.models.hf_checkpoints import greedy_shortfall, torch_logits
from tests.models.serving import NUM_TOKENS, Server

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "On 14 July 1789, 1234567 people gathered. In",
)


TEXT = (
    "The capital of France is Paris. It lies on the river Seine, and about two million people live "
    "there. The capital of Italy is Rome, which lies on the Tiber, and was founded long before it"
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


@pytest.fixture(scope="module")
def loaded(smollm2_path):
    """The file, converted again."""
    # Scanned layers compile in a tenth of the time.
    loaded = load_model(smollm2_path, layer_layout="scanned", cache=False, progress=False)
    assert loaded.tokenizer is not None
    return loaded


@pytest.mark.release
def test_logits_equal_pytorch(loaded, reference):
    """Logits of a prompt agree to 1e-4."""
    server = Server(loaded.graphdef, loaded.params, loaded.config, "scanned")
    token_ids = np.asarray(loaded.tokenizer.encode(PROMPTS[2]))
    (logits,) = server.step([(0, token_ids)])
    expected = torch_logits(reference, token_ids)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.release
@pytest.mark.parametrize("kv_dtype", some(KV_DTYPES))
def test_eight_bits_of_keys_and_values_are_close(loaded, reference, kv_dtype):
    """The distribution of every next token of a text is nearly PyTorch's."""
    server = Server(loaded.graphdef, loaded.params, loaded.config, "scanned", kv_dtype)
    token_ids = np.asarray(loaded.tokenizer.encode(TEXT))
    assert len(token_ids) <= NUM_TOKENS
    (logits,) = server.step([(0, token_ids)])
    expected = torch_logits(reference, token_ids)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    likely, kept = (np.asarray(jax.nn.log_softmax(x)) for x in (expected, logits))
    divergence = (np.exp(likely) * (likely - kept)).sum(-1)
    # Measured: norms 0.024 and 0.051, divergences 0.0008 and 0.0032.
    most_error, most_divergence = {"int8": (0.05, 0.002), "float8_e4m3fn": (0.1, 0.008)}[kv_dtype]
    assert 0.001 < error < most_error
    assert 0.0 <= divergence.mean() < most_divergence


@pytest.mark.release
def test_greedy_tokens_equal_pytorch(runtime, reference):
    """There are more prompts than slots; each answer has PyTorch's tokens."""
    completions = runtime.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
    for completion in completions:
        assert len(completion.token_ids) == 16
        prompt, answer = completion.prompt_token_ids, completion.token_ids
        assert greedy_shortfall(reference, prompt, answer) < 1e-4


@pytest.mark.release
def test_a_chat_is_answered_sensibly(runtime):
    """A chat through template, model and detokenizer gives the right answer, and ends after it."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    completion = runtime.generate([chat])[0]
    assert completion.text == "The capital of France is Paris."
    assert completion.finish_reason == "stop"
