"""Logits of tiny models with keys and values in 8 bits, compared with exact ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.common.tiers import some
from tests.models.hf_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.models.serving import Server

PROMPT = np.random.default_rng(0).integers(0, VOCAB_SIZE, 37)
# Bounds of the relative norm of the logits' errors. Numbers are off by at most a 254th of the
# largest of their head, or by a sixteenth of themselves: about 0.5 and 2.5 % of a head's norm. Two
# layers of large random weights multiply this by up to four. Measured: up to 0.022 and 0.091.
BOUNDS = {"int8": 0.04, "float8_e4m3fn": 0.16}


@pytest.fixture(scope="module", params=some(["gemma2", "llama", "gpt2", "mistral"]))
def folder(request, tmp_path_factory):
    """Checkpoints with grouped and plain heads, biases, soft caps, windows and key norms."""
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, folder)
    return folder


def _logits(folder, kv_dtype: str) -> np.ndarray:
    """Return logits, [tokens, vocab], of ragged chunks beside other rows, and of decoding."""
    server = Server.from_folder(folder, kv_dtype=kv_dtype)
    got = [server.step([(1, PROMPT[:5]), (0, PROMPT[:14])])[1]]
    got.append(server.step([(0, PROMPT[14:29]), (1, PROMPT[5:6])])[0])
    for i in range(29, 37):
        got.append(server.decode({1: PROMPT[i - 20], 0: PROMPT[i]})[1])
    return np.concatenate(got)


@pytest.mark.parametrize("kv_dtype", some(BOUNDS))
def test_logits_are_close_to_exact_ones(folder, kv_dtype):
    """They are not equal, which shows that numbers are rounded."""
    wanted = _logits(folder, "float32")
    error = np.linalg.norm(_logits(folder, kv_dtype) - wanted) / np.linalg.norm(wanted)
    assert 0.0005 < error < BOUNDS[kv_dtype]
