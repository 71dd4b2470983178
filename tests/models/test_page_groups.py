"""A decoder whose layers have page tables by window, and keep nothing behind a window."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx

from jaxserve.core.page_layout import page_layout
from jaxserve.models.families import config_from_hf
from jaxserve.models.families.gemma import Gemma
from tests.common.tiers import some
from tests.models.serving import Server

CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 64,
    "sliding_window": 7,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention"),
        *("sliding_attention", "sliding_attention"),
    ],
}


@pytest.mark.parametrize("implementation", some([None, "xla"]))
def test_logits_are_those_of_one_group(implementation):
    """Prompts in chunks, and single tokens, while pages behind the window are those of others."""
    config = config_from_hf(CONFIG)
    graphdef, params = nnx.split(Gemma(config, rngs=nnx.Rngs(0)))
    layout = page_layout(config.sliding_windows)
    assert [(group.window, group.num_tables) for group in layout.groups] == [(None, 1), (7, 4)]
    servers = [
        Server(graphdef, params, config, layout=each, implementation=implementation)
        for each in (layout, page_layout(()))
    ]
    rng = np.random.default_rng(0)
    for sizes in ((20, 3, 9), (14, 30, 1), (1, 2, 1)):
        rows = [(i, rng.integers(1, 50, size)) for i, size in enumerate(sizes)]
        for own, wanted in zip(*(server.step(rows) for server in servers), strict=True):
            np.testing.assert_allclose(own, wanted, atol=1e-5)
    for _ in range(9):
        tokens = {i: int(rng.integers(1, 50)) for i in range(3)}
        for own, wanted in zip(*(server.decode(tokens) for server in servers), strict=True):
            np.testing.assert_allclose(own, wanted, atol=1e-5)
