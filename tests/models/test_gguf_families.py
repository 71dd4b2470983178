"""GGUF files of every architecture that is read: PyTorch's logits for the original model.

The files are written as llama.cpp's converters do (`conversion/`), with the names of the package
`gguf`. Where transformers 5.24.0 reads an architecture too, it must find the same tensors.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from jaxserve.core.errors import CheckpointError
from jaxserve.models.families import config_from_hf
from jaxserve.models.gguf import GGUFSource
from jaxserve.models.gguf_architectures import ARCHITECTURES, Facts, config_of
from tests.common.tiers import some
from tests.models.gguf_models import permuted
from tests.models.hf_checkpoints import SIZES, VARIANTS, VOCAB_SIZE, torch_logits
from tests.models.serving import Server

PROMPT = np.random.default_rng(1).integers(0, VOCAB_SIZE, 29)
PHI3 = SIZES | dict(pad_token_id=None)
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20)

FALCON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    ffn_hidden_size=192,
    num_hidden_layers=2,
    num_attention_heads=6,
    initializer_range=0.3,
)

ROTATE_NEIGHBOURS = ("llama", "granite", "smollm3")
QWEN3_5 = SIZES | dict(
    num_hidden_layers=3,
    head_dim=16,
    linear_conv_kernel_dim=3,
    linear_key_head_dim=10,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    full_attention_interval=2,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
)

# Case -> architecture of the file, config class, its fields, whether transformers reads its files.
CASES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "llama": ("llama", "LlamaConfig", dict(SIZES, attention_bias=True, mlp_bias=True), True),
    "mixtral": ("llama", "MixtralConfig", dict(SIZES, num_local_experts=5), False),
    "qwen2": ("qwen2", "Qwen2Config", SIZES, True),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2MoeConfig",
        dict(SIZES, **EXPERTS, shared_expert_intermediate_size=24, norm_topk_prob=False),
        False,
    ),
    "qwen3": ("qwen3", "Qwen3Config", dict(SIZES, head_dim=16), True),
    "qwen3moe": (
        "qwen3moe",
        "Qwen3MoeConfig",
        dict(SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
        False,
    ),
    "qwen35": ("qwen35", "Qwen3_5TextConfig", QWEN3_5, False),
    "qwen35moe": (
        "qwen35moe",
        "Qwen3_5MoeTextConfig",
        {name: value for name, value in QWEN3_5.items() if name != "intermediate_size"}
        | EXPERTS
        | dict(shared_expert_intermediate_size=24),
        False,
    ),
    "qwen3next": (
        "qwen3next",
        "Qwen3NextConfig",
        QWEN3_5 | EXPERTS | dict(shared_expert_intermediate_size=24, norm_topk_prob=True),
        False,
    ),
    "glm4moe": (
        "glm4moe",
        "Glm4MoeConfig",
        dict(
            {**SIZES, "num_hidden_layers": 3},
            head_dim=16,
            attention_bias=True,
            use_qk_norm=True,
            moe_intermediate_size=20,
            num_experts_per_tok=2,
            n_shared_experts=2,
            n_routed_experts=6,
            routed_scaling_factor=1.7,
            n_group=3,
            topk_group=2,
        ),
        False,
    ),
    "llama4": (
        "llama4",
        "Llama4TextConfig",
        dict(
            {**SIZES, "num_hidden_layers": 5},
            intermediate_size_mlp=60,
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            interleave_moe_layer_step=2,
        ),
        False,
    ),
    "falcon": ("falcon", "FalconConfig", dict(FALCON, multi_query=True), False),
    "falcon_40b": (
        "falcon",
        "FalconConfig",
        dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
        False,
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOssConfig",
        dict(
            {**SIZES, "num_hidden_layers": 3},
            head_dim=16,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=7,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=15e4,
                factor=4.0,
                truncate=False,
                original_max_position_embeddings=64,
            ),
        ),
        False,
    ),
    "gemma": ("gemma", "GemmaConfig", dict(SIZES, head_dim=16), False),
    "gemma2": (
        "gemma2",
        "Gemma2Config",
        dict(SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=7),
        True,
    ),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        dict(
            {**SIZES, "num_hidden_layers": 7},
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=7,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
        False,
    ),
    "gemma4": ("gemma4", *VARIANTS["gemma4"][:2], False),
    "granite": (
        "granite",
        "GraniteConfig",
        dict(
            SIZES,
            embedding_multiplier=6.0,
            attention_multiplier=0.2,
            residual_multiplier=0.4,
            logits_scaling=3.0,
        ),
        False,
    ),
    "smollm3": (
        "smollm3",
        "SmolLM3Config",
        dict({**SIZES, "num_hidden_layers": 5}, pad_token_id=None),
        False,
    ),
    "olmo2": ("olmo2", "Olmo2Config", dict(SIZES, pad_token_id=None), False),
    "starcoder2": ("starcoder2", "Starcoder2Config", SIZES, True),
    "command-r": ("command-r", "CohereConfig", dict(SIZES, logit_scale=0.5), False),
    "cohere2": (
        "cohere2",
        "Cohere2Config",
        dict({**SIZES, "num_hidden_layers": 5}, logit_scale=0.5, sliding_window=7),
        False,
    ),
    "nemotron": ("nemotron", "NemotronConfig", SIZES, True),
    "stablelm": ("stablelm", "StableLmConfig", dict(SIZES, use_qkv_bias=True), True),
    "stablelm_parallel": (
        "stablelm",
        "StableLmConfig",
        dict(SIZES, use_parallel_residual=True),
        True,
    ),
    "phi3": ("phi3", "Phi3Config", PHI3 | dict(sliding_window=9), True),
    "phi3_longrope": (
        "phi3",
        "Phi3Config",
        PHI3
        | dict(
            original_max_position_embeddings=11,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=1e4,
                short_factor=[1.1, 1.3, 2.0, 3.1],
                long_factor=[1.2, 2.5, 4.0, 9.0],
                partial_rotary_factor=1.0,
            ),
        ),
        True,
    ),
    "lfm2": (
        "lfm2",
        "Lfm2Config",
        dict(
            {**SIZES, "num_hidden_layers": 3},
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention", "conv"],
        ),
        True,
    ),
}
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "shortconv.l_cache": "conv_L_cache",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "vocab_size": "vocab_size",
}


def _write(
    path: Path,
    arch: str,
    model: transformers.PreTrainedModel,
    quantisation: gguf.GGMLQuantizationType | None = None,
) -> None:
    config: Any = model.config
    if arch == "gemma4":  # its layers differ
        config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, arch)
    for key, field in KEYS.items():
        value = getattr(config, field, None)
        if key == "expert_count":
            value = value or getattr(config, "num_experts", None)
        if value is not None and not (key == "attention.sliding_window" and arch == "qwen2"):
            kind = gguf.GGUFValueType.get_type(value)
            writer.add_key_value(f"{arch}.{key}", value, kind)
    for key, value in _own_keys(arch, config).items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{arch}.{key}", value, kind)
    names = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon")
    eps = next(getattr(config, name) for name in names if hasattr(config, name))
    if ARCHITECTURES[arch].has_layer_norms:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(eps)
    for field in ("logits_scaling", "logit_scale"):
        if hasattr(config, field):
            writer.add_logit_scale(getattr(config, field))
    if arch.startswith(("qwen35", "qwen3next")):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        interval = config.layer_types.index("full_attention") + 1
        writer.add_key_value(f"{arch}.full_attention_interval", interval, gguf.GGUFValueType.UINT32)
    if arch.startswith("qwen35"):
        # A layer that predicts further tokens, which is not read.
        writer.add_block_count(config.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
        extra = f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"
        writer.add_tensor(extra, np.ones((4, 4), np.float32))
    if arch == "lfm2":
        kinds = config.layer_types
        heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in kinds]
        writer.add_head_count_kv(heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if arch == "gemma4":
        head_dim = config.per_layer_config[1].head_dim
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] == "proportional":
        rotated = int(head_dim * rope["partial_rotary_factor"] / 2)
        divisors = np.array([1.0] * rotated + [1e30] * (head_dim // 2 - rotated), np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)
        rope = {**rope, "partial_rotary_factor": 1.0}
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = config.original_max_position_embeddings
        stretched = config.max_position_embeddings / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(stretched) / math.log(original))
        )
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    for name, tensor in _converted(arch, model):
        if quantisation is None or tensor.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(name, gguf.quantize(tensor, quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _own_keys(arch: str, config: Any) -> dict[str, Any]:
    """Return the keys that the converter of an architecture writes in addition or instead."""
    if arch == "glm4moe":
        return {
            "expert_count": config.n_routed_experts,
            "expert_shared_count": config.n_shared_experts,
            "leading_dense_block_count": config.first_k_dense_replace,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    if arch == "llama4":
        return {
            "feed_forward_length": config.intermediate_size_mlp,
            "expert_feed_forward_length": config.intermediate_size,
            "interleave_moe_layer_step": config.interleave_moe_layer_step,
        }
    if arch == "falcon":
        is_new = config.new_decoder_architecture
        return {
            "feed_forward_length": 4 * config.hidden_size,
            "attention.head_count_kv": config.num_kv_heads if is_new else 1,
        }
    if arch == "gemma4":
        shared, num = config.num_kv_shared_layers, config.num_hidden_layers
        layers = list(config.per_layer_config)
        return {
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
            "attention.sliding_window_pattern": [
                kind == "sliding_attention" for kind in config.layer_types
            ],
            "attention.key_length_swa": config.head_dim,
            "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
            "feed_forward_length": [
                config.intermediate_size * (1 + (i >= num - shared)) for i in range(num)
            ],
            "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        }
    return {}


def _converted(arch: str, model: transformers.PreTrainedModel):
    config: Any = model.config
    kind = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {
        "q": config.num_attention_heads,
        "k": getattr(config, "num_key_value_heads", config.num_attention_heads),
    }
    for name, parameter in model.state_dict().items():
        tensor = parameter.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "gpt-oss" and ".experts." in name:
            parts = dict(_gpt_oss_experts(name, tensor))
        elif name.endswith(("self_attn.sinks", "layer_scalar")):
            parts = {f"{name}.weight": tensor}
        elif arch == "llama4" and ".experts." in name:  # inputs first
            parts = dict(_inputs_last(name, tensor.swapaxes(1, 2)))
        elif name.endswith("e_score_correction_bias"):
            parts = {name.replace("_bias", ".bias"): tensor}
        elif name.endswith("query_key_value.weight"):
            parts = {name: _queries_first(tensor, config)}
        elif name.endswith("in_proj_qkvz.weight"):
            parts = _without_heads(name, tensor, config)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            parts = dict(_inputs_last(name, tensor))
        else:
            parts = {name: tensor}
        for own, part in parts.items():
            found = re.search(r"self_attn\.([qk])_proj", own)
            if arch in ROTATE_NEIGHBOURS and found is not None:
                part = permuted(part, heads[found[1]])
            if ".linear_attn." in own:
                own, part = _delta_rule(own, part, config, is_tiled=arch != "qwen3next")
            elif ARCHITECTURES[arch].norm_shift and own.endswith("norm.weight"):
                part = part + np.float32(1)
            stem, _, suffix = own.rpartition(".")
            stored = table.get_name(stem)
            assert stored is not None, own
            yield f"{stored}.{suffix}".rstrip("."), np.atleast_1d(part.squeeze())


def _inputs_last(name: str, tensor: np.ndarray):
    """Gates and ups, which transformers 5 has in one tensor in memory, become two."""
    stem, _, which = name.rpartition(".")
    if which == "down_proj":
        yield f"{name}.weight", tensor
    else:
        gate, up = np.split(tensor, 2, axis=1)
        yield f"{stem}.gate_proj.weight", gate
        yield f"{stem}.up_proj.weight", up


def _queries_first(tensor: np.ndarray, config: Any) -> np.ndarray:
    """Rows of each KV head's queries, key and value become all queries, all keys, all values."""
    kv_heads = config.num_kv_heads if config.new_decoder_architecture else 1
    width = config.hidden_size // config.num_attention_heads
    by_head = tensor.reshape(kv_heads, -1, width, tensor.shape[1])
    parts = by_head[:, :-2], by_head[:, -2:-1], by_head[:, -1:]
    return np.concatenate([part.reshape(-1, tensor.shape[1]) for part in parts])


def _without_heads(name: str, tensor: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Rows of each key head's query, key, values and gates become two tensors, sorted by kind."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    by_head = tensor.reshape(keys, -1, tensor.shape[1])
    parts = np.split(by_head, np.cumsum((size, size, values)), axis=1)
    q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in parts)
    stem = name.removesuffix("qkvz.weight")
    return {f"{stem}qkv.weight": np.concatenate([q, k, v]), f"{stem}z.weight": z}


def _delta_rule(
    name: str, tensor: np.ndarray, config: Any, *, is_tiled: bool
) -> tuple[str, np.ndarray]:
    """Heads of values go by their place in a group first if `is_tiled`; -exp(A) is stored."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    first = 2 * keys * config.linear_key_head_dim

    def tiled(x: np.ndarray) -> np.ndarray:  # heads on the first axis
        if not is_tiled:
            return x
        return x.reshape(keys, values // keys, -1).swapaxes(0, 1).reshape(x.shape)

    end = name.rpartition("linear_attn.")[2]
    if end in ("in_proj_qkv.weight", "conv1d.weight"):
        return name, np.concatenate([tensor[:first], tiled(tensor[first:])])
    if end.startswith("in_proj"):
        return name, tiled(tensor)
    if end == "out_proj.weight":
        return name, tiled(tensor.T.copy()).T
    if end == "A_log":
        return f"{name}.", -np.exp(tiled(tensor))
    return (
        (name.replace("dt_bias", "dt_proj.bias"), tiled(tensor))
        if end == "dt_bias"
        else (
            name,
            tensor,
        )
    )


def _gpt_oss_experts(name: str, tensor: np.ndarray):
    """Gates and ups in turns become two tensors, and inputs the last axis."""
    stem, _, which = name.rpartition(".")
    kind = "bias" if which.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if which.startswith("down_proj"):
        yield f"{stem}.down_proj.{kind}", tensor
    else:
        yield f"{stem}.gate_proj.{kind}", tensor[:, ::2]
        yield f"{stem}.up_proj.{kind}", tensor[:, 1::2]


def _relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def test_every_architecture_is_tested():
    """A new architecture needs a case."""
    assert {arch for arch, *_ in CASES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", some(CASES, 0, 3, 8))
def test_a_file_has_the_logits_of_its_model(case, tmp_path):
    """Chunked prefill through the paged cache gives PyTorch's logits, to 1e-4."""
    arch, config_class, fields, others_read_it = CASES[case]
    torch.manual_seed(3)
    config = getattr(transformers, config_class)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim == 1:  # initialised with constants, which would hide an error
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.2)
    model = model.eval()
    _write(tmp_path / "model.gguf", arch, model)
    source = GGUFSource(tmp_path / "model.gguf")
    server = Server.from_source(source, config_from_hf(source.config))
    got = [*server.step([(0, PROMPT[:14])]), *server.step([(0, PROMPT[14:])])]
    wanted = torch_logits(model, PROMPT)
    assert _relative_error(np.concatenate(got), wanted) < 1e-4
    if others_read_it:
        theirs = load_gguf_checkpoint(
            tmp_path / "model.gguf", return_tensors=True, model_to_load=model
        )["tensors"]
        assert theirs.keys() <= model.state_dict().keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(tensor, model.state_dict()[name], msg=name)


def test_gemma4_needs_the_kinds_of_its_layers():
    """A file without them is refused by name."""
    metadata = {
        "general.architecture": "gemma4",
        "gemma4.block_count": 1,
        "gemma4.embedding_length": 48,
        "gemma4.feed_forward_length": 80,
        "gemma4.attention.head_count": 6,
        "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
    }
    shapes = {"token_embd.weight": (VOCAB_SIZE, 48), "blk.0.attn_q.weight": (48, 48)}
    with pytest.raises(CheckpointError, match="kinds, KV heads or MLP sizes"):
        config_of(Facts("a file", metadata, shapes, {}))


def test_an_expert_is_a_part_of_a_quantised_stack(tmp_path):
    """Every expert, whole and in part, has the numbers of its place in the stack."""
    fields = SIZES | EXPERTS | dict(hidden_size=64, head_dim=32, moe_intermediate_size=32)
    config = transformers.Qwen3MoeConfig(**fields | dict(intermediate_size=64, vocab_size=96))
    model = transformers.AutoModelForCausalLM.from_config(config)
    _write(tmp_path / "model.gguf", "qwen3moe", model, gguf.GGMLQuantizationType.Q8_0)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    source = GGUFSource(tmp_path / "model.gguf")
    for which in ("gate", "up", "down"):
        stack = stored[f"blk.1.ffn_{which}_exps.weight"]
        whole = gguf.dequantize(stack.data, stack.tensor_type)
        for n in range(5):
            name = f"model.layers.1.mlp.experts.{n}.{which}_proj.weight"
            assert source.shapes()[name] == whole[n].shape
            np.testing.assert_array_equal(source.read(name), whole[n])
            part = (slice(3, 20), slice(0, 16))
            np.testing.assert_array_equal(source.read(name, part), whole[n][part])
