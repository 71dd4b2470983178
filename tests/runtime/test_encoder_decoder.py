"""Runtimes of encoder-decoder models give the answers of PyTorch transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jaxserve import Runtime, SamplingParams
from tests.models.t5_checkpoints import (
    VARIANTS,
    greedy,
    random_prompts,
    torch_encoded,
    torch_logits,
    write_checkpoint,
)

OPTIONS = dict(
    max_slots=4, max_step_tokens=64, page_size=8, max_context=128, progress=False, dtype="float32"
)
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = random_prompts(7)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    """A folder, and PyTorch's model of it."""
    folder = tmp_path_factory.mktemp(request.param)
    return str(folder), write_checkpoint(request.param, folder)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A folder with a T5 of version 1.0, and PyTorch's greedy answers to PROMPTS."""
    folder = tmp_path_factory.mktemp("t5")
    model = write_checkpoint("t5", folder)
    return str(folder), [greedy(model, prompt, 12) for prompt in PROMPTS]


def test_answers_and_logprobs_are_those_of_pytorch(checkpoint):
    """Prompts of all lengths in one batch have PyTorch's greedy tokens and log-probabilities."""
    folder, model = checkpoint
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        answers = rt.generate(PROMPTS, params)
    start = model.config.decoder_start_token_id
    distinct = set()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.error is None
        assert list(answer.prompt_token_ids) == prompt
        assert list(answer.token_ids) == greedy(model, prompt, 12)
        distinct |= {*answer.token_ids}
        logits = torch_logits(model, prompt, [start, *answer.token_ids[:-1]])
        wanted = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        got = [each.logprob for each in answer.logprobs]
        np.testing.assert_allclose(got, wanted[np.arange(12), answer.token_ids], atol=1e-4)
    assert len(distinct) > 10  # answers that differ can show differences


def test_encoder_outputs_are_those_of_pytorch(checkpoint):
    """`encode` gives the encoder's last hidden states of ragged prompts, alone and in a batch."""
    folder, model = checkpoint
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        together = rt.encode(PROMPTS)
        alone = rt.encode(PROMPTS[0])
        assert rt.encode([]) == []
    np.testing.assert_allclose(alone, together[0], atol=1e-5)
    for prompt, got in zip(PROMPTS, together, strict=True):
        wanted = torch_encoded(model, prompt)
        assert got.shape == wanted.shape and got.dtype == np.float32
        assert np.linalg.norm(got - wanted) < 1e-4 * np.linalg.norm(wanted)
