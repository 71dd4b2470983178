"""longrope's factors follow the longest context of a runtime, so that cached keys stay valid."""

from __future__ import annotations

import json

import numpy as np
import pytest
import transformers

from jaxserve import Runtime, SamplingParams
from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.families import config_from_hf
from jaxserve.testing import OPTIONS
from tests.models.hf_checkpoints import (
    LONGROPE,
    VARIANTS,
    VOCAB_SIZE,
    greedy_shortfall,
    write_checkpoint,
)

ORIGINAL = 32
ROUNDING = 1e-4
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with an original context of 32 tokens, and PyTorch's model of it."""
    folder = tmp_path_factory.mktemp("longrope")
    write_checkpoint("phi3_longrope", folder)
    config = json.loads((folder / "config.json").read_text())
    config["original_max_position_embeddings"] = ORIGINAL
    config["rope_parameters"].pop("original_max_position_embeddings")
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    return str(folder), model


def _served(checkpoint, lengths, max_context, **options) -> list[float]:
    """Return the shortfall of each prompt's answer."""
    folder, model = checkpoint
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in lengths]
    given = OPTIONS | dict(max_context=max_context, dtype="float32") | options
    with Runtime.from_pretrained(folder, **given) as rt:
        answers = [list(answer.token_ids) for answer in rt.generate(prompts, PARAMS)]
    pairs = zip(prompts, answers, strict=True)
    return [greedy_shortfall(model, prompt, answer) for prompt, answer in pairs]


@pytest.mark.release
def test_a_short_runtime_has_the_short_factors(checkpoint):
    """Prompts that fit with their answers into the original context have PyTorch's answers."""
    assert max(_served(checkpoint, (1, 7, 20), ORIGINAL)) < ROUNDING


def test_a_longer_runtime_has_the_long_factors(checkpoint):
    """Sequences longer than the original context have the answers of PyTorch for all tokens.

    One of the prompts is shorter, and its answer is not. PyTorch's `generate` computes all keys
    again when it crosses the original context; here they have long factors from the beginning, so
    that a short sequence has another answer.
    """
    beyond = _served(checkpoint, (22, 33, 60), 128)
    assert max(beyond) < ROUNDING
    assert max(_served(checkpoint, (7,), 128)) > ROUNDING


@pytest.mark.release
def test_long_factors_over_stages_and_after_preemption(checkpoint):
    """The parts of a staged model have the same factors, and so have tokens computed again."""
    from jaxserve.sharding import StagePlan

    assert max(_served(checkpoint, (1, 7, 20), ORIGINAL, mesh=StagePlan.of([1, 1]))) < ROUNDING
    assert max(_served(checkpoint, (33, 60, 41, 50), 128, kv_memory="40kB")) < ROUNDING


def test_the_context_decides():
    """It is the model's own by default; other rotary embeddings do not depend on it."""
    name, fields, _ = VARIANTS["phi3_longrope"]
    given = getattr(transformers, name)(**fields).to_dict()
    config = config_from_hf(given)
    assert config.rope.scaling.is_long and config.max_position_embeddings == 256
    assert config.for_context(12) == config
    short = config.for_context(11)
    assert short != config and not short.rope.scaling.is_long
    assert short.for_context(256) == config
    other = config_from_hf({"model_type": "llama"})
    assert other.for_context(11) == other
    whole = config_from_hf({**given, "original_max_position_embeddings": 256})
    assert not whole.rope.scaling.is_long


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(short_factor=[1.0]), "longrope with -1 factors .* 3 short_factor"),
        (dict(short_factor=[1.0] * 4, long_factor=[1.0] * 4), "4 factors .* 6 rotated"),
        (dict(long_factor=None), "lacks .*long_factor"),
        (dict(rope_type="linear", factor=2.0), "'linear' is not supported for 'phi3'"),
    ],
)
def test_factors_that_do_not_fit_are_refused(changes, message):
    """Each error says how many there are, and how many there must be."""
    rope = {key: value for key, value in (LONGROPE["rope_parameters"] | changes).items() if value}
    given = VARIANTS["phi3_longrope"][1] | {"model_type": "phi3", "rope_parameters": rope}
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(given)
