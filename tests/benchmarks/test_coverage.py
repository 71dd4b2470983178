"""Coverage says of an architecture that it agrees, is refused, or is wrong."""

from __future__ import annotations

import pytest

from benchmarks.coverage import Architecture, architectures, check


@pytest.mark.release
def test_architectures_are_those_that_generate():
    """Text models of wrappers are among them; encoders, drafts and parts of others are not."""
    found = {each.kind: each for each in architectures()}
    assert {"llama", "gpt_neox", "gemma3_text", "rwkv"} <= found.keys()
    assert found["qwen2_vl_text"].wrapper == "qwen2_vl" and found["llama"].wrapper is None
    assert not found.keys() & {"bert", "bart", "gemma4_assistant", "gemma3", "llava"}


def test_what_is_not_supported_is_refused_with_what_it_lacks():
    row = check(Architecture("rwkv", "RwkvForCausalLM"))
    assert (row.outcome, row.family, row.error) == ("refused", None, None)
    assert row.nearest and "rescale_every" in row.unread
    assert row.reason and row.reason.startswith("UnsupportedModelError: model_type='rwkv'")


def test_another_error_is_a_failure():
    row = check(Architecture("nothing", "NothingForCausalLM"))
    assert (row.outcome, row.reason) == ("fails", "KeyError: 'nothing'")


@pytest.mark.release
def test_a_model_agrees():
    row = check(Architecture("llama", "LlamaForCausalLM"))
    assert (row.outcome, row.family, row.nearest) == ("agrees", "llama", None)
    assert row.error is not None and row.error < 1e-5 and row.shortfall == 0
