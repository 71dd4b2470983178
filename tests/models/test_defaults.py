"""What a config.json leaves out, or says with null, is what transformers 5.24.0 reads from it."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import transformers

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.families import FAMILIES, config_from_hf
from jaxserve.models.rope import Rope

pytestmark = pytest.mark.fast

KINDS = tuple(FAMILIES)

# Fields that no class declares: names of transformers 4, and what models read in passing.
_UNDECLARED = {
    "rope_scaling": None,
    "sliding_window_pattern": 6,
    "rotary_emb_base": 1e4,
    "rotary_pct": 0.25,
    "n_positions": None,  # of T5, where it is the length of the training's prompts
    "scale_decoder_outputs": True,
    "decoder_start_token_id": None,
    "head_dim": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "hybrid_override_pattern": "ME*-",
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rotary_dim": None,
    "tie_word_embeddings": False,  # of text models in models of images, which say it themselves
}
# T5's class ties in any case, and has the field from its base class.
_BY_KIND: dict[tuple[str, str], Any] = {
    ("t5", "tie_word_embeddings"): True,
    **{(kind, "partial_rotary_factor"): 0.5 for kind in ("glm", "glm4", "glm4_moe", "nemotron")},
    ("cohere2", "sliding_window_pattern"): 4,
    ("phi3", "partial_rotary_factor"): 1.0,
    ("minimax_m2", "partial_rotary_factor"): None,
    ("persimmon", "partial_rotary_factor"): 0.5,
}
# Nulls that a class of transformers lets pass, and that its model cannot be built with.
_NOT_BUILT = {
    "gemma4_text": ("global_head_dim",),
    # It is the whole head then, and a quarter after the class has written and read it.
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("partial_rotary_factor",)),
    **dict.fromkeys(("glm", "glm4"), ("partial_rotary_factor",)),
    "glm4_moe": ("partial_rotary_factor", "head_dim"),
    # With experts, of which the defaults have none.
    "dots1": ("n_group", "topk_group", "first_k_dense_replace"),
    "deepseek_v2": ("topk_method",),
    "deepseek_v3": (
        *("v_head_dim", "num_experts_per_tok", "n_group", "topk_group"),
        "first_k_dense_replace",
    ),
    "ernie4_5_moe": (
        *("moe_k", "moe_num_experts", "moe_num_shared_experts"),
        *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    ),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared"),
        (
            *("num_local_experts", "num_experts_per_tok", "embedding_multiplier"),
            *("logits_scaling", "residual_multiplier", "attention_multiplier"),
        ),
    ),
    "cohere": ("layer_norm_eps", "logit_scale"),
    "falcon": ("layer_norm_epsilon", "activation"),
    "nemotron": ("partial_rotary_factor",),
    "persimmon": ("partial_rotary_factor",),
    "stablelm": ("partial_rotary_factor",),
    "falcon_h1": (
        *("lm_head_multiplier", "embedding_multiplier", "key_multiplier"),
        *("attention_out_multiplier", "attention_in_multiplier"),
        *("ssm_in_multiplier", "ssm_out_multiplier"),
        *("mamba_expand", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ),
    "granitemoehybrid": (
        *("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
        *("num_local_experts", "num_experts_per_tok"),
        *("mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    ),
    "bamba": ("mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    # With windows, which the class reads with it.
    "qwen2_vl_text": ("max_window_layers",),
    "qwen2_5_vl_text": ("max_window_layers",),
}
# Fields without which the defaults are no model: half of GLM-4.5's heads would be 21 dimensions.
_GIVEN: dict[str, dict[str, Any]] = {"glm4_moe": {"head_dim": 128}}
# Names of fields that a class of transformers reads in passing.
_ALIASES = {
    "bloom": {"n_embed": "hidden_size"},
    "falcon": {"n_embed": "hidden_size"},
    "lfm2": {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"},
    "lfm2_moe": {"tie_embedding": "tie_word_embeddings"},
    "nemotron_h": {
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
    },
}
_BASES = ("rope_theta", "rotary_emb_base", "rotary_pct", "rope_local_base_freq")


def _class(kind: str) -> Any:
    return transformers.CONFIG_MAPPING[kind]


def _default(kind: str, name: str) -> Any:
    declared = _class(kind)
    if (kind, name) in _BY_KIND:
        return _BY_KIND[kind, name]
    if name in declared.__dataclass_fields__:
        return declared.__dataclass_fields__[name].default
    theta = declared.default_theta
    by_kind = theta if isinstance(theta, dict) else {"global": theta}
    if name in ("rope_theta", "rope_local_base_freq"):
        return by_kind["global" if name == "rope_theta" else "local"]
    return _UNDECLARED[name]


def _full(kind: str, **given: Any) -> dict[str, Any]:
    """Return a config.json with every field, as transformers completes what is given."""
    given = _GIVEN.get(kind, {}) | given
    with warnings.catch_warnings(action="ignore"):
        return {**_class(kind).from_dict(given).to_dict(), "model_type": kind}


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_defaults_is_that_of_transformers(kind):
    """Every field that a family reads has the default of its class (transformers 5.24.0)."""
    fields = FAMILIES[kind].fields[kind]
    assert fields.defaults == {name: _default(kind, name) for name in fields.defaults}
    assert (
        fields.aliases.items()
        <= {
            **_class(kind).attribute_map,
            **{field: alias for alias, field in _class(kind).attribute_map.items()},
            **_ALIASES.get(kind, {}),
        }.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_left_out_has_its_default(kind):
    """A config.json without a field, or without any, reads as the one that states all of them."""
    full = _full(kind)
    whole = config_from_hf(full)
    given = _GIVEN.get(kind, {})
    for name in full.keys() - {"model_type"} - given.keys():
        rest = {field: value for field, value in full.items() if field != name}
        assert config_from_hf(rest) == whole, name
    assert config_from_hf({"model_type": kind, **given}) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_null_is_not_absent(kind):
    """A null means what it means in transformers, or is refused where that refuses it."""
    for name in FAMILIES[kind].fields[kind].defaults:
        given = {"model_type": kind, **_GIVEN.get(kind, {}), name: None}
        try:
            full = _full(kind, **{name: None})
            if name in (*_BASES, *_NOT_BUILT.get(kind, ())):
                full = None
        except Exception:  # any kind: a field's own check, or arithmetic with None
            full = None
        if full is None:
            with pytest.raises(UnsupportedModelError, match=name):
                config_from_hf(given)
        else:
            assert config_from_hf(given) == config_from_hf(full), name


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("mixtral", {}, dict(norm_eps=1e-5, num_kv_heads=8)),
        ("gemma2", {}, dict(attention_soft_cap=50.0, logits_soft_cap=30.0)),
        ("gemma2", dict(attn_logit_softcapping=None), dict(attention_soft_cap=None)),
        ("mistral", dict(num_hidden_layers=2), dict(sliding_windows=(4096, 4096))),
        ("mistral", dict(num_hidden_layers=1, sliding_window=None), dict(sliding_windows=(None,))),
        ("qwen3", dict(hidden_size=64, num_attention_heads=32), dict(head_dim=128)),
        ("lfm2", dict(block_ff_dim=90, block_multiple_of=8), dict(intermediate_size=64)),
        ("lfm2", dict(tie_embedding=False), dict(tie_word_embeddings=False)),
        (
            "lfm2",
            dict(num_hidden_layers=2, full_attn_idxs=[1]),
            dict(layer_kinds=("recurrent", "attention")),
        ),
        ("qwen3_moe", {}, dict(intermediate_size=6144)),
        # transformers has a window of 0 tokens then, and no token sees any.
        (
            "qwen2_moe",
            dict(num_hidden_layers=2, layer_types=["sliding_attention"] * 2),
            dict(sliding_windows=(None, None)),
        ),
        *(
            ("minimax_m2", given, dict(rope=Rope(theta=5e6, dim=dim)))
            for given, dim in (
                (dict(rotary_dim=64), 64),
                (dict(partial_rotary_factor=0.25), 32),
                (dict(partial_rotary_factor=0.25, rotary_dim=64), 32),
            )
        ),
        (
            "nemotron_h",
            dict(hybrid_override_pattern="M*-M"),
            dict(layer_kinds=("recurrent", "attention", "mlp", "recurrent"), experts=None),
        ),
        (
            "nemotron_h",
            dict(layers_block_type=["mamba", "attention"], num_hidden_layers=7),
            dict(layer_kinds=("recurrent", "attention")),
        ),
        (
            "gptj",
            dict(hidden_size=64, num_attention_heads=4, rotary_dim=8),
            dict(hidden_size=64, num_heads=4),
        ),
        (
            "gemma2",
            dict(sliding_window_pattern=3, num_hidden_layers=2),
            dict(sliding_windows=(4096, None)),
        ),
    ],
)
def test_values_that_differ_from_family_to_family(kind, given, expected):
    """Some of the values, spelled out; `_full` has them from transformers 5.24.0, too."""
    config = config_from_hf({"model_type": kind, **given})
    assert {name: getattr(config, name) for name in expected} == expected
    assert config == config_from_hf(_full(kind, **given))


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("mixtral", {}, dict(num=8, size=14336, per_token=2)),
        ("qwen3_moe", {}, dict(num=128, size=768, per_token=8)),
        ("qwen3_moe", dict(num_experts=4, num_local_experts=6), dict(num=6)),
        ("mixtral", dict(num_experts=4, num_local_experts=6), dict(num=4)),
    ],
)
def test_experts_that_differ_from_family_to_family(kind, given, expected):
    """The same for the sizes of mixtures of experts."""
    config = config_from_hf({"model_type": kind, **given})
    assert {name: getattr(config.experts, name) for name in expected} == expected
    assert config == config_from_hf(_full(kind, **given))


def test_steps_of_nemotron_h_are_at_least_time_step_min():
    """Its class never reads time_step_limit (transformers 5.24.0)."""
    given = dict(time_step_limit=[0.5, 0.6], time_step_min=0.2)
    found = config_from_hf({"model_type": "nemotron_h", **given}).recurrence
    assert (found.min_step, found.max_step) == (0.2, math.inf)


def test_bases_of_rotations_that_are_left_out():
    """Mixtral's is 1e6, Llama's 1e4, and GPT-J rotates 64 dimensions (transformers 5.24.0)."""
    bases = {kind: config_from_hf({"model_type": kind}).rope for kind in ("mixtral", "llama")}
    assert {kind: rope.theta for kind, rope in bases.items()} == {"mixtral": 1e6, "llama": 1e4}
    assert config_from_hf({"model_type": "gptj"}).rope.dim == 64


def test_rope_scaling_counts_before_rope_parameters():
    """So it does in transformers 5.24.0, whose field is the base of it, not the parameters' own."""
    given = dict(
        rope_scaling=dict(rope_type="linear", factor=2.0),
        rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=3.0),
        rope_theta=5e5,
    )
    found = config_from_hf({"model_type": "llama", **given}).rope
    assert (found.scaling.factor, found.theta) == (2.0, 5e5)
    assert found == config_from_hf(_full("llama", **given)).rope


@pytest.mark.parametrize("used", [False, True])
def test_qwen3_moe_slides_in_every_layer(used):
    """With use_sliding_window, whatever max_window_layers says (transformers 5.24.0: no field)."""
    given = dict(
        num_hidden_layers=3, use_sliding_window=used, sliding_window=8, max_window_layers=2
    )
    config = config_from_hf({"model_type": "qwen3_moe", **given})
    assert config.sliding_windows == (8 if used else None,) * 3
    declared = _class("qwen3_moe")(**given)
    assert declared.sliding_window == (8 if used else None)


def test_a_base_that_is_no_number_is_refused():
    """A null inside the parameters is no absent field either."""
    for theta in (None, 0, -1.0, math.nan, "1e4"):
        given = dict(rope_parameters=dict(rope_type="default", rope_theta=theta))
        with pytest.raises(UnsupportedModelError, match="rope_theta"):
            config_from_hf({"model_type": "llama", **given})
