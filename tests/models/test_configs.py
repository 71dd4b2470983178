"""Configurations of every family, as transformers 4 and 5 write them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.families import config_from_hf
from jaxserve.models.families.gpt2 import GPT3_SHAPES

pytestmark = pytest.mark.fast

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
    assert config_from_hf(old) == config_from_hf(new)
    assert hash(config_from_hf(old)) == hash(config_from_hf(new))
    assert config_from_hf(old).rope.theta == 5e5


def test_defaults_of_absent_fields():
    """head_dim and num_key_value_heads are computed from other fields if absent."""
    config = config_from_hf(LLAMA)
    assert (config.head_dim, config.num_kv_heads) == (4, 4)


def test_qwen_windows_start_at_max_window_layers():
    """Without layer_types, Qwen's window applies from max_window_layers on, if it is enabled."""
    qwen = {
        **LLAMA,
        "model_type": "qwen2",
        "num_key_value_heads": 4,
        "sliding_window": 8,
        "max_window_layers": 2,
    }
    assert config_from_hf(qwen).sliding_windows == (None, None, None)
    used = {**qwen, "use_sliding_window": True}
    assert config_from_hf(used).sliding_windows == (None, None, 8)
    assert config_from_hf(used | {"max_window_layers": 10**12}).sliding_windows == (None,) * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="rwkv"), r"nearest of the \d+ that are is .* docs/models.md lists them"),
        (dict(hidden_act="gelu"), "only 'silu' and 'swish'"),
        (dict(vocab_size=None), "lacks"),
        (dict(num_hidden_layers=20_000), "num_hidden_layers=20000 .* 1 to 1024"),
        (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000 is not supported"),
        (dict(num_hidden_layers="two"), "num_hidden_layers='two' is not supported"),
        (dict(num_attention_heads=0), "num_attention_heads=0 is not supported"),
        (dict(head_dim=10**9), "head_dim=1000000000 is not supported"),
        (dict(model_type="mixtral", num_local_experts=10**9), "num_local_experts=1000000000"),
        (dict(num_key_value_heads=3), "multiple of num_kv_heads=3"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic' is not supported"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    """Each error names the given value and the supported ones."""
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf({**LLAMA, **changes})


GEMMA3 = dict(
    model_type="gemma3_text",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=7,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    sliding_window=5,
)


def test_gemma3_of_both_transformers_agree():
    """Every sixth layer has global attention and its own rotary embedding; others share one."""
    old = config_from_hf(
        {
            **GEMMA3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    new = config_from_hf(
        {
            **GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == new
    assert old.sliding_windows == (5,) * 5 + (None, 5)
    assert [rope.theta for rope in old.layer_ropes] == [1e4] * 5 + [1e6, 1e4]
    assert not old.is_uniform


def test_a_base_beside_olmo3_is_that_of_all_layers():
    """transformers 4 writes one; transformers 5.24.0 reads it for layers without a window only."""
    olmo = {**LLAMA, "model_type": "olmo3", "num_key_value_heads": 4, "rope_theta": 1e4}
    config = config_from_hf(olmo)
    assert config.rope.theta == config.local_rope.theta == 1e4


@pytest.mark.parametrize("dtype", ["int8", "float64", jnp.bfloat16])
def test_the_dtype_is_one_of_three_names(dtype):
    """It is float32 by default, part of the configuration's identity, and kept by parts of it."""
    config = config_from_hf(LLAMA)
    half = replace(config, dtype="bfloat16")
    assert config.dtype == "float32"
    assert half.dtype == half.part(range(1, 3)).dtype == "bfloat16"
    assert config != half and hash(half) == hash(replace(config, dtype="bfloat16"))
    with pytest.raises(UnsupportedModelError, match="give .*'float32', 'bfloat16', 'float16'"):
        replace(config, dtype=dtype)


def test_gpt3_shapes_have_their_parameters():
    """The shapes of the ExeGPT paper's table 1 have about as many parameters as their names say."""
    for name, config in GPT3_SHAPES.items():
        billions = float(name.removeprefix("gpt3-").removesuffix("b"))
        weights = 12 * config.num_layers * config.hidden_size**2
        assert abs(weights / 1e9 / billions - 1) < 0.02


_LONGROPE = dict(rope_type="longrope", short_mscale=1.1, long_mscale=1.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(model_type="gpt2", vocab_size=9, n_embd=8, n_layer=1, n_head=None), "n_head"),
        (dict(model_type="gptj", vocab_size=9, n_embd=8, n_layer=1, n_head=1, rotary_dim=3), "3"),
        (dict(LLAMA, model_type="opt", ffn_dim=8, _remove_final_layer_norm=True), "_remove"),
        (dict(LLAMA, model_type="gpt_neox", hidden_act="quick_gelu"), "quick_gelu"),
        (dict(model_type="deepseek_v3", v_head_dim=200), "v_head_dim=200 is more than the 192"),
        (dict(model_type="deepseek_v3", num_key_value_heads=8), "num_key_value_heads"),
        (dict(model_type="phimoe", rope_scaling=_LONGROPE), "short_mscale=1.1 and long_mscale=1.2"),
        (dict(model_type="codegen", n_head=6, n_embd=48), "n_head=6"),
        (dict(model_type="hunyuan_v1_moe", num_hidden_layers=2, moe_topk=[1, 2]), "moe_topk"),
        (dict(model_type="deepseek_v2", topk_method="noaux_tc"), "topk_method"),
        (dict(model_type="glm4_moe_lite", mlp_layer_types=["none"] * 47), "mlp_layer_types"),
        (dict(model_type="llama4_text", layer_types=["sliding_attention"] * 48), "layer_types"),
        (dict(GEMMA3, layer_types=["chunked_attention"] * 7), "chunked_attention"),
    ],
)
def test_what_other_families_do_not_support_is_named(given, message):
    """Each error names the field."""
    with pytest.raises(UnsupportedModelError, match=message):
        config_from_hf(given)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32}, 64),
        ({"rope_type": "yarn", "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "linear", "factor": 0.5}, 64),
        (
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
            },
            64,
        ),
        ({"rope_type": "default"}, 64),
        (None, 64),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2"])
def test_a_scaling_lengthens_the_context(kind, scaling, longest):
    """Qwen's recipe, yarn of factor 4 on an unchanged 32k, has 128k.

    Lengths are those of vLLM's `_get_and_verify_max_len` (read, not run), except that nothing
    becomes shorter than config.json says; transformers 5.24.0 has no limit.
    """
    given = {**LLAMA, "model_type": kind, "max_position_embeddings": 64, "rotary_pct": 1.0}
    given |= {"rope_scaling": scaling, "num_key_value_heads": 4}
    assert config_from_hf(given).max_position_embeddings == longest
