"""The greedy answers of every family are those of PyTorch transformers, however it is served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.sharding import make_mesh
from tests.models.adapter_checkpoints import SCALE, adapter_of, folder_of, merged_checkpoint
from tests.models.hf_checkpoints import VARIANTS, VOCAB_SIZE, greedy_shortfall, write_checkpoint
from tests.runtime.serving import CHECKPOINT

pytestmark = pytest.mark.release

# Closer logits may have either order.
ROUNDING = 1e-4
OPTIONS = CHECKPOINT | dict(max_context=80)
# More prompts than slots; some are longer than a step.
NUM_TOKENS = (1, 9, 61, 30, 2, 44)
_RNG = np.random.default_rng(5)
PROMPTS = [_RNG.integers(0, VOCAB_SIZE, n).tolist() for n in NUM_TOKENS]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
# Variants that only have another scaling of the rotation than "llama".
_ROTATIONS = ("llama3_rope", "linear_rope", "yarn_rope")


@dataclass(frozen=True)
class Checkpoint:
    name: str
    folder: str
    model: torch.nn.Module
    answers: list[list[int]]  # of each prompt alone


def _answers(folder: str, prompts=tuple(PROMPTS), params=PARAMS, **options) -> list[list[int]]:
    with Runtime.from_pretrained(folder, **OPTIONS | options) as rt:
        return [list(answer.token_ids) for answer in rt.generate(list(prompts), params)]


def _assert_greedy(model: torch.nn.Module, answers: list[list[int]]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer) == PARAMS.max_tokens
        assert greedy_shortfall(model, prompt, answer) < ROUNDING


@pytest.fixture(scope="module", params=[name for name in VARIANTS if name not in _ROTATIONS])
def checkpoint(request, tmp_path_factory):
    """A checkpoint and its answers, one prompt at a time."""
    folder = str(tmp_path_factory.mktemp(request.param))
    model = write_checkpoint(request.param, tmp_path_factory.getbasetemp() / folder)
    with Runtime.from_pretrained(folder, **OPTIONS) as rt:
        answers = [list(rt.generate(prompt, PARAMS).token_ids) for prompt in PROMPTS]
    return Checkpoint(request.param, folder, model, answers)


def test_alone(checkpoint):
    """Prompts longer than a step are prefilled in chunks."""
    _assert_greedy(checkpoint.model, checkpoint.answers)
    assert len({token for answer in checkpoint.answers for token in answer}) > 10


def test_in_mixed_batches(checkpoint):
    """Sequences that decode share steps with chunks of prompts."""
    assert _answers(checkpoint.folder) == checkpoint.answers


def test_after_preemption(checkpoint):
    """With too few pages, sequences are preempted; a model without pages takes no such size."""
    with Runtime.from_pretrained(checkpoint.folder, **OPTIONS) as rt:
        page_bytes = rt.stats().pool_bytes // rt.config.num_pages
        num_tables = rt.config.page_layout.num_tables
    if not page_bytes:
        with pytest.raises(InvalidConfigError, match="kv_memory"):
            Runtime.from_pretrained(checkpoint.folder, **OPTIONS, kv_memory="1MiB")
        return
    few = dict(policy="vllm_like", kv_memory=(1 + 13 * num_tables) * page_bytes)
    with Runtime.from_pretrained(checkpoint.folder, **OPTIONS | few) as rt:
        answers = [list(answer.token_ids) for answer in rt.generate(PROMPTS * 2, PARAMS)]
        assert rt.stats().num_preemptions > 0
        rt.check_integrity()
    assert answers == checkpoint.answers * 2


def test_on_two_devices(checkpoint):
    """A mesh splits heads, inner sizes, channels and the vocabulary; states are on all devices."""
    _assert_greedy(checkpoint.model, _answers(checkpoint.folder, mesh=make_mesh(tensor=2)))


def test_in_eight_bits(checkpoint):
    """Answers of quantised weights do not depend on the batch either."""
    alone = [_answers(checkpoint.folder, [prompt], quantize="int8")[0] for prompt in PROMPTS[1:3]]
    assert _answers(checkpoint.folder, quantize="int8")[1:3] == alone


def test_with_an_adapter(checkpoint, tmp_path):
    """Answers are those of PyTorch's model with the adapter's merged weights."""
    name, model = checkpoint.name, checkpoint.model
    tensors = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    rng = np.random.default_rng(2)
    adapter = {key: 0.2 * value for key, value in adapter_of(tensors, name, rng).items()}
    merged = merged_checkpoint(tensors, adapter, name, scale=SCALE)
    folder = folder_of(tmp_path / "adapter", adapter, lora_alpha=SCALE * 3)
    with Runtime.from_pretrained(checkpoint.folder, **OPTIONS, max_adapters=1) as rt:
        rt.load_adapter("mine", str(folder))
        params = SamplingParams(max_tokens=12, ignore_eos=True, adapter="mine")
        answers = [list(answer.token_ids) for answer in rt.generate(PROMPTS, params)]
    assert answers != checkpoint.answers
    model.load_state_dict({key: torch.from_numpy(value) for key, value in merged.items()})
    try:
        _assert_greedy(model, answers)
    finally:
        model.load_state_dict({key: torch.from_numpy(value) for key, value in tensors.items()})
