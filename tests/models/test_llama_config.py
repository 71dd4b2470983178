"""Configurations of the Llama family, as transformers 4 and 5 write them."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import LlamaConfig

LLAMA = dict(
    model_type="llama",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
)


def test_old_and_new_rope_fields_agree():
    """rope_theta with rope_scaling means the same as rope_parameters; the result is hashable."""
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    new = {**LLAMA, "rope_parameters": parameters}
    assert LlamaConfig.from_hf(old) == LlamaConfig.from_hf(new)
    assert hash(LlamaConfig.from_hf(old)) == hash(LlamaConfig.from_hf(new))
    assert LlamaConfig.from_hf(old).rope_theta == 5e5


def test_defaults_of_absent_fields():
    """head_dim and num_key_value_heads follow from the others when absent."""
    config = LlamaConfig.from_hf(LLAMA)
    assert (config.head_dim, config.num_kv_heads) == (4, 4)


def test_qwen_windows_start_at_max_window_layers():
    """Without layer_types, Qwen's window holds from max_window_layers on, if it is in use."""
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}
    assert LlamaConfig.from_hf(qwen).sliding_windows == (None, None, None)
    used = {**qwen, "use_sliding_window": True}
    assert LlamaConfig.from_hf(used).sliding_windows == (None, None, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="gpt2"), "supported are"),
        (dict(hidden_act="gelu"), "only 'silu'"),
        (dict(vocab_size=None), "lacks"),
        (dict(num_key_value_heads=3), "multiple of num_kv_heads=3"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
        (dict(quantization_config={"bits": 4}), "quantized"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    """Each refusal names what is given and what is supported."""
    with pytest.raises(UnsupportedModelError, match=message):
        LlamaConfig.from_hf({**LLAMA, **changes})
