"""The answers of a runtime made from a checkpoint on disk are PyTorch's answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve import Runtime, SamplingParams
from tests.common.tiers import some
from tests.models.hf_checkpoints import VOCAB_SIZE, greedy_shortfall, write_checkpoint

# Closer logits may have either order; the best two of the seed below differ by 0.01.
ROUNDING = 1e-4
# Length of a prompt -> of its answer. The last prompt takes two steps; with one token less, its
# answer ends at the same time as the others, so that one window size is compiled.
NUM_TOKENS = {1: 13, 5: 13, 21: 13, 61: 12}
OPTIONS: dict[str, Any] = dict(
    max_slots=4,
    max_context=80,
    max_step_tokens=64,
    page_size=8,
    kv_memory="500KB",
    warmup=False,
    progress=False,
)


@pytest.mark.release
@pytest.mark.parametrize(
    "family", some(["llama", "llama3_rope", "mistral", "qwen2", "qwen3", "smollm2"])
)
def test_greedy_tokens_equal_pytorch(tmp_path, family):
    """A batch of long and short prompts gets PyTorch's tokens from every family's checkpoint."""
    model = write_checkpoint(family, tmp_path)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in NUM_TOKENS]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in NUM_TOKENS.values()]
    with Runtime.from_pretrained(str(tmp_path), **OPTIONS) as runtime:
        answers = [completion.token_ids for completion in runtime.generate(prompts, params)]
    assert [len(answer) for answer in answers] == list(NUM_TOKENS.values())
    assert len({token for answer in answers for token in answer}) > 20
    for prompt, answer in zip(prompts, answers, strict=True):
        assert greedy_shortfall(model, prompt, answer) < ROUNDING
