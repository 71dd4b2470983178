"""Models with recurrent layers speculate: states go on by the accepted tokens alone."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import InvalidConfigError
from jaxserve.execution.sizes import nbytes
from jaxserve.models.batch import empty_cache
from jaxserve.models.families.llama import Llama
from jaxserve.models.store import load_model
from jaxserve.sharding import make_mesh
from jaxserve.testing import WrapAll, tiny_llama
from tests.models.hf_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.runtime.serving import CHECKPOINT

# Mamba-2, gated delta rule, short convolution, Mamba, and attention with Mamba-2 in each layer.
NAMES = ["bamba", "qwen3_5", "lfm2", "mamba2", "mamba", "falcon_h1_norm"]
QUOTED = [7, 3, 9, 4, 11, 6, 2, 8]
LOOKUP: dict[str, Any] = {"speculation": "lookup"}


def _asked(seed: int, histories: list[list[int]]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that repeat themselves or go on from histories, and parameters for each.

    Some answers favour tokens that were there before, and some end at one of these.
    """
    rng = random.Random(seed)
    prompts, params = [], []
    for _ in range(rng.choice([2, 6])):
        history = rng.choice([[], *histories])[:60]
        prompts.append([*history, rng.randrange(VOCAB_SIZE), *QUOTED * rng.randint(1, 3)])
        bias = {token: 30.0 for token in QUOTED[:3]}
        common: dict[str, Any] = dict(max_tokens=rng.randint(1, 40), seed=rng.randrange(100))
        common["ignore_eos"] = True
        params += rng.choices(
            [
                SamplingParams(**common, temperature=0),
                SamplingParams(**common, temperature=0, logit_bias={5: 100.0}),
                SamplingParams(**common, temperature=0, logit_bias=bias, stop_token_ids=(7,)),
                SamplingParams(**common, temperature=0.8, logit_bias=bias, stop_token_ids=(9,)),
                SamplingParams(**common, temperature=1.0, repetition_penalty=1.3, logprobs=1),
            ]
        )
    return prompts, params


def _check_rounds(plain: Runtime, given: Runtime, num_rounds: int) -> None:
    """Check the tokens of prompts that repeat themselves, and of turns that go on from answers."""
    for seed in range(5 * num_rounds):
        # Loops speculate as long as it pays by measured times, which vary with the machine's load.
        if seed >= num_rounds and given.stats().num_accepted_tokens > 20:
            break
        histories: list[list[int]] = []
        for turn in range(3):
            prompts, params = _asked(10 * seed + turn, histories)
            wanted, answers = (runtime.generate(prompts, params) for runtime in (plain, given))
            for one, other in zip(wanted, answers, strict=True):
                assert other.token_ids == one.token_ids, seed
                assert other.finish_reason == one.finish_reason
            histories = [
                [*prompt, *answer.token_ids]
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        given.check_integrity()
    stats = given.stats()
    # Some proposals were right, and some were wrong.
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens


def _sizes(folder: str) -> tuple[int, int]:
    """Return the bytes of a state with its page, and of a page."""
    config = load_model(folder, dtype="float32", progress=False).config
    one = jax.eval_shape(lambda: empty_cache(config, 1, 8, "float32", "unrolled", num_slots=1))
    return nbytes(one), nbytes(one.pages)


@pytest.fixture(scope="module")
def bamba(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bamba")
    write_checkpoint("bamba", folder)
    return str(folder)


@pytest.mark.release
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_without_speculation(name, tmp_path):
    """Greedy and drawn, over turns that begin with snapshots, and preemptions."""
    write_checkpoint(name, tmp_path)
    snapshot_bytes, page_bytes = _sizes(str(tmp_path))
    small: dict[str, Any] = dict(state_memory=8 * snapshot_bytes, policy="pensieve")
    if page_bytes:
        small["kv_memory"] = 24 * page_bytes
    with (
        Runtime.from_pretrained(str(tmp_path), state_memory=0, **CHECKPOINT) as plain,
        Runtime.from_pretrained(str(tmp_path), **small, **LOOKUP, **CHECKPOINT) as runtime,
    ):
        _check_rounds(plain, runtime, 10)
        stats = runtime.stats()
    assert stats.num_snapshots_restored > 5
    assert stats.num_preemptions > 0 or not page_bytes


@pytest.mark.release
def test_nothing_compiles_after_the_warm_up(bamba):
    warm = CHECKPOINT | dict(warmup=True, strict=True)
    with (
        Runtime.from_pretrained(bamba, **CHECKPOINT) as plain,
        Runtime.from_pretrained(bamba, **LOOKUP, **warm) as runtime,
    ):
        _check_rounds(plain, runtime, 4)


@pytest.mark.release
@pytest.mark.parametrize("state_size", [10, 512], ids=["together", "in turn"])
def test_no_step_copies_the_states_of_all_slots(bamba, tmp_path, state_size):
    config = json.loads((Path(bamba) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_d_state": state_size}))
    seen, many = WrapAll(), dict(max_slots=29, max_step_tokens=32, load="random")
    with Runtime.from_pretrained(tmp_path, wrap_executor=seen, **LOOKUP, **CHECKPOINT | many):
        texts = [step.as_text() for step in seen.executors[0].compiled_steps()]
    for text in texts:
        assert "f32[1,29," in text and not re.search(r"= f32\[1,29,\S+ copy\(", text)


@pytest.mark.release
def test_scanned_layers_speculate_too(tmp_path):
    write_checkpoint("mamba2", tmp_path)
    model = load_model(tmp_path, dtype="float32", layer_layout="scanned", progress=False)
    options = {name: value for name, value in CHECKPOINT.items() if name != "dtype"}
    with (
        Runtime.from_pretrained(str(tmp_path), **CHECKPOINT) as plain,
        Runtime(nnx.merge(model.graphdef, model.params), **LOOKUP, **options) as runtime,
    ):
        _check_rounds(plain, runtime, 5)


@pytest.mark.release
def test_two_shards_speculate_too(bamba):
    with (
        Runtime.from_pretrained(bamba, **CHECKPOINT) as plain,
        Runtime.from_pretrained(bamba, mesh=make_mesh(tensor=2), **LOOKUP, **CHECKPOINT) as runtime,
    ):
        _check_rounds(plain, runtime, 5)


@pytest.mark.release
def test_a_draft_model_with_attention_proposes(bamba):
    """Both models favour the same tokens, so that proposals are often right."""
    model = tiny_llama()
    config = replace(model.config, vocab_size=VOCAB_SIZE)
    draft = {"speculation": "draft", "draft_model": Llama(config, rngs=nnx.Rngs(0))}
    with (
        Runtime.from_pretrained(bamba, state_memory=0, **CHECKPOINT) as plain,
        Runtime.from_pretrained(bamba, policy="pensieve", **draft, **CHECKPOINT) as runtime,
    ):
        _check_rounds(plain, runtime, 8)
        assert runtime.stats().num_snapshots_restored > 0


@pytest.mark.release
def test_draft_models_that_do_not_fit_states_are_refused(bamba, tmp_path):
    recurrent = {"speculation": "draft", "draft_model": bamba}
    with pytest.raises(InvalidConfigError, match="draft model must be .* recurrent layers"):
        Runtime.from_pretrained(bamba, **recurrent, **CHECKPOINT)
    write_checkpoint("mamba2", tmp_path)
    draft = {"speculation": "draft", "draft_model": tiny_llama()}
    with pytest.raises(InvalidConfigError, match="layers of attention.*speculation='lookup'"):
        Runtime.from_pretrained(str(tmp_path), **draft, **CHECKPOINT)
