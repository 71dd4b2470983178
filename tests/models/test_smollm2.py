"""The default model, from its quantised file to its answers, against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from jaxserve.models.gguf_source import GGUFSource
from jaxserve.models.store import load_model
from tests.models.hf_checkpoints import torch_logits
from tests.models.serving import NUM_TOKENS, PAGE_SIZE, PAGES_PER_SEQUENCE, Server

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "On 14 July 1789, 1234567 people gathered. In",
)
NUM_GREEDY = 16


@pytest.fixture(scope="module")
def loaded(smollm2_path):
    # Scanned layers compile in a tenth of the time.
    return load_model(smollm2_path, layer_layout="scanned", cache=False, progress=False)


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


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_tokens_equal_pytorch(loaded, reference, prompt):
    """Logits of prompt and continuation agree to 1e-4; PyTorch would choose the same tokens."""
    server = Server(loaded.graphdef, loaded.params, loaded.config, "scanned")
    token_ids = loaded.tokenizer.encode(prompt)
    (logits,) = server.step([(0, np.asarray(token_ids))])
    rows, greedy = [logits], [int(logits[-1].argmax())]
    while len(greedy) < NUM_GREEDY:
        rows += server.decode({0: greedy[-1]})
        greedy.append(int(rows[-1][0].argmax()))
    expected = torch_logits(reference, np.asarray(token_ids + greedy[:-1]))
    logits = np.concatenate(rows)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    assert expected[len(token_ids) - 1 :].argmax(-1).tolist() == greedy


def test_a_chat_is_answered_sensibly(loaded):
    """A chat prompt through template, model and streaming decoder gives the right answer."""
    server = Server(loaded.graphdef, loaded.params, loaded.config, "scanned")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    token_ids = loaded.tokenizer.apply_chat_template(chat)
    assert len(token_ids) <= NUM_TOKENS
    token = int(server.step([(0, np.asarray(token_ids))])[0][-1].argmax())
    decoder, text = loaded.tokenizer.stream_decoder(), ""
    for _ in range(PAGE_SIZE * PAGES_PER_SEQUENCE - len(token_ids)):
        if token in loaded.eos_token_ids:
            break
        text += decoder.push([token])
        token = int(server.decode({0: token})[0][-1].argmax())
    assert text + decoder.flush() == "The capital of France is Paris."
    assert token in loaded.eos_token_ids
