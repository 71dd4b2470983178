"""A model with sliding windows keeps no pages behind them, and answers as with one group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.models.families import config_from_hf
from jaxserve.models.families.gemma import Gemma
from jaxserve.runtime.stats import RuntimeStats
from jaxserve.scheduling.policy import Policy
from jaxserve.scheduling.preemption import LastInOrder
from jaxserve.scheduling.presets import PRESETS
from jaxserve.sharding import make_mesh
from jaxserve.testing import OPTIONS, FreeCopiesExecutor, random_prompts

CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 128,
    "sliding_window": 11,
    "sliding_window_pattern": 4,
}
PROMPTS = random_prompts(8, longest=90)
PARAMS = SamplingParams(max_tokens=24)
# Preempted sequences are copied to the host.
SWAPPING = replace(PRESETS["vllm_like"], preemption=LastInOrder(keeps_state=True))
# A pool of 48 pages, where the longest sequence has 31; copies to the host count as free.
SMALL: dict[str, Any] = {"kv_memory": 50_000, "wrap_executor": FreeCopiesExecutor}


def _model(**config: Any) -> Gemma:
    """Return a model with random weights, whose greedy answers repeat themselves rarely."""
    model = Gemma(config_from_hf(CONFIG | config), rngs=nnx.Rngs(0))
    model.embedding[...] = model.embedding[...] * 0.1
    for block in model.blocks:
        for weight in (block.attention.wqkv, block.attention.wo, block.mlp.down):
            weight[...] = weight[...] * 4
    return model


def _served(model: Gemma, **options: Any) -> tuple[list[tuple[int, ...]], RuntimeStats]:
    """Return the tokens of two turns of eight conversations, and the counters after them."""
    with Runtime(model, **OPTIONS, **options) as rt:
        first = rt.generate(list(map(list, PROMPTS)), PARAMS)
        turns = [[*p, *c.token_ids, 5, 6] for p, c in zip(PROMPTS, first, strict=True)]
        second = rt.generate(turns, SamplingParams(max_tokens=2))
        rt.check_integrity()
        assert rt.config.page_layout.is_grouped == (options.get("restore") != "per_layer")
        stats = rt.stats()
    return [c.token_ids for c in (*first, *second)], stats


def test_pages_come_back_from_the_host():
    """An answer after a history that left the device is that after one that is computed again."""
    options = OPTIONS | SMALL | {"kv_memory": 33_000, "host_memory": "1MiB", "policy": "pensieve"}
    with Runtime(_model(num_hidden_layers=2, sliding_window_pattern=2), **options) as rt:
        assert rt.config.page_layout.num_tables == 2 and rt.config.num_host_pages == 1024
        history = [*PROMPTS[0], *rt.generate(list(PROMPTS[0]), PARAMS).token_ids, 5]
        rt.generate(list(map(list, PROMPTS[1:4])), PARAMS)
        assert "host" in rt.residency(history)
        answer = rt.generate(history, PARAMS).token_ids
        stats = rt.stats()
        assert stats.num_prefix_hit_on_host > 0 and stats.num_pages_in > 0
        rt.forget_kept_pages()
        assert rt.generate(history, PARAMS).token_ids == answer


@pytest.fixture(scope="module")
def one_group() -> tuple[list[tuple[int, ...]], RuntimeStats]:
    """What a runtime answers that keeps all pages of a sequence."""
    tokens, stats = _served(_model(), restore="per_layer")
    assert len({token for each in tokens for token in each}) > 20
    return tokens, stats


@pytest.mark.release
def test_answers_are_those_of_one_group(one_group: tuple[list[tuple[int, ...]], RuntimeStats]):
    """Chunked prompts, second turns from cached pages, and a pool in which some are preempted."""
    wanted, stats = one_group
    grouped, own = _served(_model())
    assert grouped == wanted and own.num_prefix_hit > stats.num_prefix_hit / 2
    small, own = _served(_model(), kv_memory=50_000, host_memory=0)
    assert small == wanted and own.num_preemptions and not own.num_pages_out


@pytest.mark.release
@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("auto", {}),
        (SWAPPING, {}),
        ("pensieve", {"restore": "on_admission"}),
        ("pensieve", {"mesh": make_mesh(tensor=2), "kv_memory": 25_000}),
    ],
    ids=["auto", "swapping", "pensieve", "tensor"],
)
def test_answers_are_the_same_from_pages_of_the_host(
    one_group: tuple[list[tuple[int, ...]], RuntimeStats],
    policy: str | Policy,
    more: dict[str, Any],
):
    """Cached pages or whole sequences go to the host, and come back."""
    tokens, stats = _served(_model(), **SMALL | {"policy": policy} | more)
    assert tokens == one_group[0]
    assert stats.num_pages_out and stats.num_pages_in


@pytest.mark.release
def test_answers_are_the_same_with_proposals(
    one_group: tuple[list[tuple[int, ...]], RuntimeStats],
):
    """Loops compute several tokens of a row, some of which are taken back."""
    # Windows are larger by what loops may propose, so that the longest sequence has 64 pages.
    for options in ({}, SMALL | {"policy": "pensieve", "kv_memory": 70_000}):
        tokens, stats = _served(_model(), speculation="lookup", **options)
        assert tokens == one_group[0]
        assert stats.num_accepted_tokens
