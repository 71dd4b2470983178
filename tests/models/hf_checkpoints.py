"""Tiny random checkpoints written by PyTorch transformers, and PyTorch's logits for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

VOCAB_SIZE = 101

SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=256,
    # Large enough that logits differ by more than rounding.
    initializer_range=0.3,
)

_GPT_SIZES = dict(
    vocab_size=VOCAB_SIZE, n_embd=48, n_layer=2, n_head=6, n_positions=256, initializer_range=0.3
)
_FALCON_SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    ffn_hidden_size=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    max_position_embeddings=256,
    initializer_range=0.3,
)
_OPT_SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    ffn_dim=80,
    num_hidden_layers=2,
    num_attention_heads=6,
    max_position_embeddings=256,
    init_std=0.3,
)
_LATENT = SIZES | dict(
    num_key_value_heads=6,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    moe_intermediate_size=20,
    num_experts_per_tok=3,
    n_shared_experts=2,
    n_routed_experts=8,
)
_FACTORS = dict(
    embedding_multiplier=6.5, logits_scaling=1.7, residual_multiplier=0.22, attention_multiplier=0.3
)
_WINDOWS = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])
LONGROPE = dict(
    pad_token_id=None,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=500.0,
        partial_rotary_factor=0.75,
        short_factor=[1.0, 1.3, 2.1],
        long_factor=[1.5, 3.0, 8.0],
    ),
)

_SHARED_EXPERT = dict(
    num_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    shared_expert_intermediate_size=28,
)
_DELTA_RULE = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    attention_bias=True,
    head_dim=16,
    linear_conv_kernel_dim=3,
    linear_key_head_dim=10,
    linear_value_head_dim=14,
    linear_num_key_heads=3,
    linear_num_value_heads=6,
)

_NEMOTRON_MAMBA = dict(
    ssm_state_size=10,
    mamba_num_heads=6,
    mamba_head_dim=14,
    n_groups=3,
    conv_kernel=3,
    use_bias=True,
    chunk_size=8,
    time_step_min=0.3,
)

_GRANITE_HYBRID = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    attention_bias=True,
    shared_intermediate_size=28,
    embedding_multiplier=6.5,
    logits_scaling=1.7,
    residual_multiplier=0.22,
    attention_multiplier=0.3,
    mamba_n_heads=6,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=10,
    mamba_d_conv=3,
    mamba_proj_bias=True,
    mamba_chunk_size=8,
)

_FALCON_H1 = dict(
    attention_bias=True,
    mlp_bias=True,
    mamba_d_ssm=84,
    mamba_n_heads=6,
    mamba_d_head=14,
    mamba_n_groups=2,
    mamba_d_state=10,
    mamba_d_conv=3,
    mamba_chunk_size=8,
    lm_head_multiplier=0.7,
    embedding_multiplier=1.6,
    mlp_multipliers=[0.6, 1.2],
    key_multiplier=0.4,
    attention_in_multiplier=1.1,
    attention_out_multiplier=0.8,
    ssm_multipliers=[0.8, 1.3, 0.9, 1.1, 0.5],
    ssm_in_multiplier=0.9,
    ssm_out_multiplier=1.2,
)


def _of(
    config_class: str, *sizes: dict[str, Any], saved: dict[str, Any] | None = None, **fields: Any
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return a variant's config class, its fields, and its arguments of save_pretrained."""
    given: dict[str, Any] = {}
    for each in (*sizes, fields):
        given |= each
    return config_class, given, saved or {}


VARIANTS = {
    "llama": _of("LlamaConfig", SIZES, head_dim=16, attention_bias=True, mlp_bias=True),
    "internlm3": _of("InternLM3Config", SIZES, head_dim=16, attention_bias=True, mlp_bias=True),
    "cwm": _of("CwmConfig", SIZES, head_dim=16, sliding_window=7),
    "arcee": _of("ArceeConfig", SIZES, head_dim=16, attention_bias=True, mlp_bias=True),
    "llama3_rope": _of(
        "LlamaConfig",
        SIZES,
        saved=dict(max_shard_size="40KB"),
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "linear_rope": _of(
        "LlamaConfig", SIZES, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0)
    ),
    "yarn_rope": _of(
        "LlamaConfig",
        SIZES,
        rope_parameters=dict(
            rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64
        ),
    ),
    "mistral": _of("MistralConfig", SIZES, sliding_window=7, head_dim=16),
    "qwen2": _of(
        "Qwen2Config", SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": _of("Qwen3Config", SIZES, head_dim=16, tie_word_embeddings=True),
    "smollm2": _of("LlamaConfig", SIZES, tie_word_embeddings=True, rope_theta=1e5),
    "gpt2": _of("GPT2Config", _GPT_SIZES),
    "gpt_bigcode": _of("GPTBigCodeConfig", _GPT_SIZES, n_inner=80),
    "gpt_bigcode_heads": _of("GPTBigCodeConfig", _GPT_SIZES, multi_query=False),
    "gpt_neo": _of(
        "GPTNeoConfig",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=6,
        window_size=7,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=256,
        initializer_range=0.3,
    ),
    "biogpt": _of("BioGptConfig", SIZES, tie_word_embeddings=False),
    "xglm": _of(
        "XGLMConfig",
        vocab_size=VOCAB_SIZE,
        d_model=48,
        ffn_dim=80,
        num_layers=2,
        attention_heads=6,
        max_position_embeddings=256,
        init_std=0.3,
        tie_word_embeddings=False,
    ),
    "exaone4": _of("Exaone4Config", SIZES, _WINDOWS),
    "apertus": _of("ApertusConfig", SIZES, attention_bias=True),
    "stablelm": _of("StableLmConfig", SIZES, use_qkv_bias=True),
    "stablelm_parallel": _of(
        "StableLmConfig", SIZES, use_parallel_residual=True, qk_layernorm=True
    ),
    "starcoder2": _of("Starcoder2Config", SIZES, sliding_window=7),
    "nemotron": _of("NemotronConfig", SIZES, head_dim=16, attention_bias=True, mlp_bias=True),
    "jais2": _of("Jais2Config", SIZES, head_dim=16),
    "cohere": _of("CohereConfig", SIZES, attention_bias=True, logit_scale=0.5),
    "cohere_plus": _of("CohereConfig", SIZES, use_qk_norm=True),
    "cohere2": _of("Cohere2Config", SIZES, _WINDOWS, logit_scale=0.5),
    "falcon": _of("FalconConfig", _FALCON_SIZES, bias=True),
    "falcon_40b": _of(
        "FalconConfig",
        _FALCON_SIZES,
        new_decoder_architecture=True,
        num_kv_heads=2,
        tie_word_embeddings=False,
    ),
    "falcon_11b": _of(
        "FalconConfig",
        _FALCON_SIZES,
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
    ),
    "falcon_rw": _of(
        "FalconConfig", _FALCON_SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "bloom": _of(
        "BloomConfig",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        n_layer=2,
        n_head=6,
        initializer_range=0.3,
        tie_word_embeddings=False,
    ),
    "mpt": _of(
        "MptConfig",
        vocab_size=VOCAB_SIZE,
        d_model=48,
        n_layers=2,
        n_heads=6,
        max_seq_len=256,
        initializer_range=0.3,
        attn_config=dict(clip_qkv=1.5, softmax_scale=0.2),
    ),
    "opt": _of("OPTConfig", _OPT_SIZES, word_embed_proj_dim=48),
    "opt_350m": _of("OPTConfig", _OPT_SIZES, word_embed_proj_dim=24, do_layer_norm_before=False),
    "gptj": _of("GPTJConfig", _GPT_SIZES, rotary_dim=4),
    "codegen": _of("CodeGenConfig", _GPT_SIZES, n_head=8, n_embd=64, n_inner=80, rotary_dim=4),
    "persimmon": _of(
        "PersimmonConfig", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    ),
    "gpt_neox": _of(
        "GPTNeoXConfig",
        SIZES,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "gpt_neox_in_turn": _of(
        "GPTNeoXConfig",
        SIZES,
        use_parallel_residual=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0),
    ),
    "gemma": _of("GemmaConfig", SIZES, head_dim=16, attention_bias=True),
    "vaultgemma": _of(
        "VaultGemmaConfig",
        SIZES,
        _WINDOWS,
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "glm": _of("GlmConfig", SIZES, head_dim=16, pad_token_id=0),
    "glm4": _of("Glm4Config", SIZES, head_dim=16, pad_token_id=0),
    "ernie4_5": _of("Ernie4_5Config", SIZES, head_dim=16, use_bias=True),
    "helium": _of("HeliumConfig", SIZES, head_dim=8, attention_bias=True, mlp_bias=True),
    # with its head tied, it would repeat a token
    "gemma2": _of(
        "Gemma2Config",
        SIZES,
        _WINDOWS,
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    ),
    "gemma3": _of(
        "Gemma3TextConfig",
        SIZES,
        _WINDOWS,
        head_dim=16,
        query_pre_attn_scalar=24,
        tie_word_embeddings=False,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    "smollm3": _of(
        "SmolLM3Config",
        SIZES,
        num_hidden_layers=3,
        no_rope_layers=[1, 0, 0, 1],
        pad_token_id=None,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_bias=True,
        mlp_bias=True,
    ),
    "granite": _of("GraniteConfig", SIZES, _FACTORS, attention_bias=True, mlp_bias=True),
    "olmo": _of("OlmoConfig", SIZES, pad_token_id=None, attention_bias=True, clip_qkv=1.5),
    "olmo2": _of("Olmo2Config", SIZES, pad_token_id=None, attention_bias=True),
    "olmo3": _of(
        "Olmo3Config",
        SIZES,
        _WINDOWS,
        pad_token_id=None,
        rope_parameters=dict(
            full_attention=dict(
                rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=64
            ),
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
        ),
    ),
    "phi3": _of(
        "Phi3Config",
        SIZES,
        head_dim=20,
        pad_token_id=None,
        sliding_window=9,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.7),
    ),
    # Sequences of 12 tokens and more have long factors, as in a runtime of a longer context.
    "phi3_longrope": _of("Phi3Config", SIZES, LONGROPE, original_max_position_embeddings=11),
    "seed_oss": _of(
        "SeedOssConfig",
        SIZES,
        head_dim=20,
        pad_token_id=None,
        attention_out_bias=True,
        mlp_bias=True,
    ),
    "ministral": _of("MinistralConfig", SIZES, _WINDOWS, head_dim=16),
    "ministral3": _of(
        "Ministral3Config",
        SIZES,
        head_dim=20,
        pad_token_id=None,
        sliding_window=15,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=500.0,
            factor=4.0,
            original_max_position_embeddings=10,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.4,
        ),
    ),
    "gemma4": _of(
        "Gemma4TextConfig",
        SIZES,
        num_hidden_layers=7,
        layer_types=[*["sliding_attention", "full_attention"] * 3, "full_attention"],
        sliding_window=7,
        head_dim=12,
        global_head_dim=20,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=14,
        final_logit_softcapping=3.0,
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=1e4),
            full_attention=dict(
                rope_type="proportional", rope_theta=1e3, partial_rotary_factor=0.6
            ),
        ),
    ),
    # Without shared keys, inputs of layers and keys that are values.
    "gemma4_plain": _of(
        "Gemma4TextConfig",
        SIZES,
        _WINDOWS,
        head_dim=12,
        global_head_dim=20,
        hidden_size_per_layer_input=0,
        tie_word_embeddings=False,
    ),
    "mixtral": _of(
        "MixtralConfig", SIZES, num_local_experts=6, num_experts_per_tok=2, sliding_window=9
    ),
    "qwen3_moe": _of(
        "Qwen3MoeConfig",
        SIZES,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
    ),
    "qwen2_moe": _of(
        "Qwen2MoeConfig",
        SIZES,
        num_hidden_layers=3,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
    "gpt_oss": _of(
        "GptOssConfig",
        SIZES,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=1.5,
    ),
    "llama4": _of(
        "Llama4TextConfig",
        SIZES,
        num_hidden_layers=4,
        intermediate_size_mlp=60,
        head_dim=16,
        attention_bias=True,
        num_local_experts=6,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 0, 0],
        attention_chunk_size=16,
        floor_scale=5,
        attn_scale=0.3,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500.0,
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=32,
        ),
    ),
    "hunyuan": _of(
        "HunYuanDenseV1Config",
        SIZES,
        head_dim=16,
        attention_bias=True,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e2, alpha=20.0, factor=1.0),
    ),
    "hunyuan_moe": _of("HunYuanMoEV1Config", SIZES, head_dim=16, num_experts=6, moe_topk=[2, 2]),
    "olmoe": _of(
        "OlmoeConfig",
        SIZES,
        attention_bias=True,
        clip_qkv=1.5,
        num_experts=6,
        num_experts_per_tok=3,
        pad_token_id=0,
    ),
    "glm4_moe": _of(
        "Glm4MoeConfig",
        SIZES,
        num_hidden_layers=3,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=20,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_routed_experts=8,
        routed_scaling_factor=1.7,
        n_group=4,
        topk_group=2,
    ),
    "deepseek_v3": _of(
        "DeepseekV3Config",
        _LATENT,
        num_hidden_layers=2,
        attention_bias=True,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=500.0,
            factor=4.0,
            mscale=1.0,
            mscale_all_dim=0.8,
            original_max_position_embeddings=64,
        ),
    ),
    "deepseek_v2": _of(
        "DeepseekV2Config",
        _LATENT,
        q_lora_rank=None,
        mlp_bias=True,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
    ),
    "glm4_moe_lite": _of(
        "Glm4MoeLiteConfig", _LATENT, rope_interleave=False, mlp_layer_types=["sparse", "dense"]
    ),
    "phimoe": _of(
        "PhimoeConfig",
        SIZES,
        attention_bias=True,
        lm_head_bias=True,
        sliding_window=9,
        num_local_experts=6,
        router_jitter_noise=0.2,
    ),
    "dots1": _of(
        "Dots1Config",
        SIZES,
        num_hidden_layers=3,
        sliding_window=9,
        max_window_layers=1,
        moe_intermediate_size=20,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_routed_experts=6,
        first_k_dense_replace=2,
    ),
    "ernie4_5_moe": _of(
        "Ernie4_5_MoeConfig",
        SIZES,
        num_hidden_layers=4,
        use_bias=True,
        moe_intermediate_size=20,
        moe_k=2,
        moe_num_experts=6,
        moe_num_shared_experts=2,
        moe_layer_end_index=2,
    ),
    "minimax_m2": _of(
        "MiniMaxM2Config",
        SIZES,
        head_dim=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "granitemoe": _of(
        "GraniteMoeConfig", SIZES, _FACTORS, attention_bias=True, num_local_experts=6
    ),
    "granitemoeshared": _of(
        "GraniteMoeSharedConfig",
        SIZES,
        _FACTORS,
        num_local_experts=6,
        num_experts_per_tok=3,
        shared_intermediate_size=28,
    ),
    # layers with and without experts, a tensor for all experts
    "qwen3_moe_mixed": _of(
        "Qwen3MoeConfig",
        SIZES,
        saved=dict(save_original_format=False),
        num_hidden_layers=4,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
    "mamba": _of(
        "MambaConfig",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        num_hidden_layers=2,
        state_size=10,
        time_step_rank=7,
        conv_kernel=3,
        use_bias=True,
        initializer_range=0.3,
    ),
    "falcon_mamba": _of(
        "FalconMambaConfig",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        num_hidden_layers=2,
        state_size=10,
        tie_word_embeddings=False,
        initializer_range=0.3,
    ),
    "jamba": _of(
        "JambaConfig",
        SIZES,
        num_hidden_layers=4,
        num_experts=6,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=10,
        mamba_proj_bias=True,
    ),
    "mamba2": _of(
        "Mamba2Config",
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        num_hidden_layers=2,
        num_heads=6,
        head_dim=16,
        n_groups=3,
        state_size=10,
        chunk_size=8,
        use_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.3,
    ),
    "bamba": _of(
        "BambaConfig",
        SIZES,
        num_hidden_layers=3,
        attn_layer_indices=[1],
        attention_bias=True,
        mlp_bias=True,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=10,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        mamba_chunk_size=8,
    ),
    "qwen3_next": _of(
        "Qwen3NextConfig",
        SIZES,
        _DELTA_RULE,
        _SHARED_EXPERT,
        num_hidden_layers=3,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "qwen3_5_moe": _of(
        "Qwen3_5MoeTextConfig",
        {k: v for k, v in SIZES.items() if k != "intermediate_size"},
        _DELTA_RULE,
        _SHARED_EXPERT,
        layer_types=["linear_attention", "full_attention"],
    ),
    "qwen3_5": _of(
        "Qwen3_5TextConfig",
        SIZES,
        _DELTA_RULE,
        num_hidden_layers=3,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e4,
            partial_rotary_factor=0.5,
            mrope_interleaved=True,
            mrope_section=[1, 1, 2],
        ),
    ),
    "granite_hybrid": _of(
        "GraniteMoeHybridConfig", SIZES, _GRANITE_HYBRID, num_hidden_layers=3, num_local_experts=0
    ),
    "granite_hybrid_moe": _of(
        "GraniteMoeHybridConfig",
        SIZES,
        _GRANITE_HYBRID,
        num_hidden_layers=3,
        intermediate_size=20,
        num_local_experts=6,
        num_experts_per_tok=3,
        position_embedding_type="rope",
    ),
    "falcon_h1": _of("FalconH1Config", SIZES, _FALCON_H1, projectors_bias=True),
    "falcon_h1_norm": _of(
        "FalconH1Config", SIZES, _FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=True
    ),
    "nemotron_h": _of(
        "NemotronHConfig",
        {k: v for k, v in SIZES.items() if k != "num_hidden_layers"},
        _NEMOTRON_MAMBA,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        head_dim=16,
        mlp_bias=True,
    ),
    "nemotron_h_moe": _of(
        "NemotronHConfig",
        {k: v for k, v in SIZES.items() if k != "num_hidden_layers"},
        _NEMOTRON_MAMBA,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        routed_scaling_factor=1.7,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=28,
        moe_latent_size=24,
    ),
    "lfm2_moe": _of(
        "Lfm2MoeConfig",
        SIZES,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        conv_bias=True,
        conv_L_cache=4,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        routed_scaling_factor=1.7,
    ),
    "lfm2": _of(
        "Lfm2Config",
        SIZES,
        num_hidden_layers=3,
        full_attn_idxs=[1],
        conv_bias=True,
        conv_L_cache=4,
        block_ffn_dim_multiplier=1.1,
        block_multiple_of=12,
    ),
}

# `make test` runs every kind of parity test for these, and one kind for the others.
MAIN = (*("llama", "mistral", "qwen3", "mixtral", "gemma3", "gpt2", "opt_350m", "mamba2", "bamba"),)


# Second shapes of families, or families that only name another one's parts: `make test-all` has
# their parity tests.
FURTHER = {
    *("internlm3", "arcee", "cwm", "llama3_rope", "linear_rope", "qwen2", "smollm2", "codegen"),
    *("gpt_bigcode_heads", "stablelm_parallel", "cohere_plus", "falcon_11b", "opt", "gemma"),
    *("gpt_neox_in_turn", "glm", "gemma4_plain", "olmo", "hunyuan", "deepseek_v2", "granitemoe"),
    *("qwen3_moe_mixed", "granite_hybrid", "falcon_h1_norm", "nemotron_h", "qwen3_5", "biogpt"),
    *("xglm", "jais2", "falcon_40b", "vaultgemma", "ernie4_5", "helium", "glm4", "ministral"),
    *("hunyuan_moe", "olmoe", "phimoe", "dots1", "ernie4_5_moe", "minimax_m2", "granitemoeshared"),
}


def attention_of(variant: str) -> str:
    """Return the implementation of attention that is right in transformers 5.24.0."""
    return "sdpa" if variant == "falcon_rw" else "eager"  # which adds Falcon's ALiBi twice


def write_checkpoint(variant: str, folder: Path, dtype: torch.dtype = torch.float32):
    """Write a random checkpoint of `variant` to `folder`; return the model in float32."""
    config_class, fields, save_options = VARIANTS[variant]
    how = attention_of(variant)
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=how)
    for name, parameter in model.named_parameters():
        # Biases and norms are initialized with constants, which would hide an error.
        if parameter.ndim == 1 or name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):  # likewise
            torch.nn.init.normal_(buffer, std=0.2)
    for name, tensor in model.state_dict().items():
        if name.endswith("layer_scalar"):  # a buffer
            tensor.fill_(0.8)
    model.to(dtype).save_pretrained(folder, **save_options)
    # Read back, because .to(bfloat16) rounds the rotary frequencies permanently.
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=how
    ).eval()


def write_classifier(variant: str, folder: Path, num_labels: int, **fields: Any):
    """Write a random classifier, or with one label a reward model; return the model in float32."""
    config_class, sizes, _ = VARIANTS[variant]
    torch.manual_seed(3)
    config = getattr(transformers, config_class)(**sizes, num_labels=num_labels, **fields)
    model = transformers.AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    )
    model.save_pretrained(folder)
    return model.eval()


def write_embedder(variant: str, folder: Path):
    """Write a random model without a head; return it in float32."""
    model = write_checkpoint(variant, folder).base_model
    for file in folder.iterdir():
        file.unlink()
    model.save_pretrained(folder)
    return model


def torch_labels(model, tokens: Sequence[int]) -> np.ndarray:
    """Return a classifier's logits of one sequence, float32 [labels]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def torch_hidden(model, tokens: Sequence[int]) -> np.ndarray:
    """Return the last hidden states of a model without a head, float32 [tokens, hidden]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0].numpy()


def torch_logits(model, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of one sequence, float32 [tokens, vocab]."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens)[None]).logits[0].numpy()


def greedy_shortfall(model, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return by how much PyTorch's logit of a token of `answer` is below its best one, at most.

    0 means that PyTorch's greedy answer is the same.
    """
    logits = torch_logits(model, np.asarray([*prompt, *answer[:-1]]))[len(prompt) - 1 :]
    return float((logits.max(-1) - logits[np.arange(len(answer)), answer]).max())
