"""What GGUF files of each architecture say, as fields of a config.json and Hugging Face names.

The converters are llama.cpp's (`conversion/`), and so is the meaning of each key (`src/models/`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import numpy as np

from jaxserve.core.errors import CheckpointError, MissingExtraError, UnsupportedModelError
from jaxserve.models.rope import MAGNITUDE, RopeScaling, inverse_frequencies

Fields = dict[str, Any]
Order = tuple[int, np.ndarray] | None


@final
class Facts:
    """The metadata and the shapes of a GGUF file, and its tables of the rotary embedding.

    `where` names the file in errors, `shapes` and `factors` have the file's own names.

    Raises:
      UnsupportedModelError: an architecture that is not in `ARCHITECTURES`.
    """

    def __init__(
        self,
        where: str,
        metadata: Mapping[str, object],
        shapes: Mapping[str, tuple[int, ...]],
        factors: Mapping[str, np.ndarray],
    ):
        self.where = where
        self.shapes, self.factors = shapes, factors
        self._metadata = metadata
        self.name = str(metadata.get("general.architecture"))
        if self.name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{where} is of architecture {self.name!r}; GGUF files of {tuple(ARCHITECTURES)} "
                "are supported"
            )
        self.architecture = ARCHITECTURES[self.name]

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture's own."""
        return self._metadata.get(f"{self.name}.{key}", default)

    def predicts(self, tensor: str) -> bool:
        """Return whether a tensor is of a layer that predicts further tokens, which is not read."""
        layer = re.match(r"blk\.(\d+)\.", tensor)
        return layer is not None and int(layer[1]) >= self.num_layers

    @property
    def num_layers(self) -> int:
        return self.value("block_count", 0) - self.value("nextn_predict_layers", 0)

    def has(self, tensor: str) -> bool:
        return tensor in self.shapes

    def fields(self, **keys: str) -> Fields:
        """Return the values of those keys that the file has, as fields of the given names."""
        found = {name: self.value(key) for name, key in keys.items()}
        return {name: value for name, value in found.items() if value is not None}


@final
@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
      model_type: of config.json.
      more: returns the fields of config.json that only this architecture has, for the file's facts
        and the fields that all have.
      keys: such fields that are copied, and their keys.
      order: returns, for a Hugging Face name and config.json's fields, an axis and the stored place
        of each of its places; None if the orders agree.
      norm_shift: number that the converter adds to the weights of RMS norms.
      rotates_parts: whether a part of each head may be rotated.
      eps: field of config.json for the number that norms add to the variance.
      has_layer_norms: whether the key of that number is that of layer norms.
      kinds_by_heads: whether layers without KV heads are of another kind than attention.
      has_own_layers: whether `more` returns the fields that differ from layer to layer.
    """

    model_type: str
    more: Callable[[Facts, Fields], Fields] = lambda facts, common: {}
    keys: Mapping[str, str] = field(default_factory=dict)
    order: Callable[[str, Mapping[str, Any]], Order] = lambda name, config: None
    norm_shift: float = 0.0
    rotates_parts: bool = False
    eps: str = "rms_norm_eps"
    has_layer_norms: bool = False
    kinds_by_heads: bool = False
    has_own_layers: bool = False

    def original(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return a tensor's numbers as the model's own checkpoint has them."""
        if name.endswith(".A_log"):
            return np.log(-values)
        if name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight"):
            return values - np.asarray(self.norm_shift, values.dtype)
        return values

    def names(self, config: Fields | Mapping[str, Any], where: str) -> Callable[[str], str | None]:
        """Return the translation of Hugging Face names to the file's, by the package `gguf`."""
        try:
            import gguf
        except ImportError as error:
            raise MissingExtraError("gguf", "gguf", f"reading {where}") from error
        own = next(name for name, known in ARCHITECTURES.items() if known is self)
        kind = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}[own]
        table = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])

        def translate(name: str) -> str | None:
            whole = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name)
            assert whole is not None, "any text matches"
            stem, suffix = whole[1], whole[2] or ""
            if stem.endswith(".e_score_correction_bias"):
                stem, suffix = stem.removesuffix("_bias"), ".bias"
            if stem.endswith(".dt_bias"):
                stem, suffix = stem.replace("dt_bias", "dt_proj"), ".bias"
            if stem.endswith(".A_log"):
                return f"{table.get_name(stem)}"
            found = table.get_name(re.sub(r"\.experts\.\d+\.", ".experts.", stem))
            return None if found is None else found + (suffix or ".weight")

        return translate


def _llama(facts: Facts, common: Fields) -> Fields:
    if facts.value("expert_count", 0):
        return {"model_type": "mixtral"} | facts.fields(
            num_local_experts="expert_count", num_experts_per_tok="expert_used_count"
        )
    window = _window(facts, common)
    return window | {"model_type": "mistral"} if window else {}


def _window(facts: Facts, common: Fields) -> Fields:
    window = facts.value("attention.sliding_window")
    if not window:
        return {}
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}


def _qwen2_moe(facts: Facts, common: Fields) -> Fields:
    return _experts(facts) | {
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": facts.shapes["blk.0.ffn_gate_shexp.weight"][0],
    }


def _qwen3_moe(facts: Facts, common: Fields) -> Fields:
    # llama.cpp normalises the gates of this architecture whatever the model's config.json says.
    return _experts(facts) | {"norm_topk_prob": True}


def _experts(facts: Facts) -> Fields:
    return {
        "num_experts": facts.value("expert_count"),
        "num_experts_per_tok": facts.value("expert_used_count"),
        "moe_intermediate_size": facts.shapes["blk.0.ffn_gate_exps.weight"][1],
    }


def _gpt_oss(facts: Facts, common: Fields) -> Fields:
    # The ramp of gpt-oss's yarn has no whole ends; llama.cpp rounds them.
    return {
        "num_local_experts": facts.value("expert_count"),
        "num_experts_per_tok": facts.value("expert_used_count"),
        "intermediate_size": facts.shapes["blk.0.ffn_gate_exps.weight"][1],
        "rope_parameters": {**common["rope_parameters"], "truncate": False},
    }


def _qwen3_5(facts: Facts, common: Fields) -> Fields:
    num_values = facts.value("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": facts.value("ssm.conv_kernel"),
        "linear_key_head_dim": facts.value("ssm.state_size"),
        "linear_value_head_dim": facts.value("ssm.inner_size") // num_values,
        "linear_num_key_heads": facts.value("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "full_attention_interval": facts.value("full_attention_interval", 4),
    }


def _qwen3_5_moe(facts: Facts, common: Fields) -> Fields:
    size = facts.shapes["blk.0.ffn_gate_shexp.weight"][0]
    own = {"shared_expert_intermediate_size": size}
    return _qwen3_5(facts, common) | _experts(facts) | own


def _qwen3_next(facts: Facts, common: Fields) -> Fields:
    return _qwen3_5_moe(facts, common) | {"norm_topk_prob": True}


def _glm4_moe(facts: Facts, common: Fields) -> Fields:
    return {
        "n_routed_experts": facts.value("expert_count"),
        "num_experts_per_tok": facts.value("expert_used_count"),
        "moe_intermediate_size": facts.value("expert_feed_forward_length"),
        "n_shared_experts": facts.value("expert_shared_count", 0),
        "first_k_dense_replace": facts.value("leading_dense_block_count", 0),
        "routed_scaling_factor": facts.value("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(facts.value("expert_weights_norm", False)),
        "n_group": facts.value("expert_group_count", 1),
        "topk_group": facts.value("expert_group_used_count", 1),
        "use_qk_norm": facts.has("blk.0.attn_q_norm.weight"),
    }


def _llama4(facts: Facts, common: Fields) -> Fields:
    num_experts = facts.value("expert_count", 0)
    if not num_experts or facts.value("attention.sliding_window") == 0:
        raise UnsupportedModelError(
            f"{facts.where} is a Llama 4 without experts or without chunks of attention; load its "
            "safetensors folder"
        )
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": facts.value("expert_used_count"),
        "intermediate_size": facts.value("expert_feed_forward_length"),
        "intermediate_size_mlp": common["intermediate_size"],
        "interleave_moe_layer_step": facts.value("interleave_moe_layer_step"),
        # No key says so: llama.cpp knows Maverick, which has none, by its experts.
        "use_qk_norm": num_experts != 128,
    }


def _falcon(facts: Facts, common: Fields) -> Fields:
    has_two_norms = facts.has("blk.0.attn_norm_2.weight")
    is_new = has_two_norms or common["num_key_value_heads"] > 1
    return {
        "num_kv_heads": common["num_key_value_heads"],
        "ffn_hidden_size": common["intermediate_size"],
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
    }


def _queries_first(name: str, config: Mapping[str, Any]) -> Order:
    """Return the order of rows of Falcon's projection: all queries, then all keys, all values."""
    if not name.endswith(".query_key_value.weight"):
        return None
    heads, kv_heads = config["num_attention_heads"], config["num_kv_heads"]
    width = config["head_dim"]
    rows = np.arange((heads + 2 * kv_heads) * width)
    parts = np.split(rows, (heads * width, (heads + kv_heads) * width))
    by_head = [part.reshape(kv_heads, -1, width) for part in parts]
    return 0, np.concatenate(by_head, axis=1).reshape(-1)


def _tiled_heads(name: str, config: Mapping[str, Any]) -> Order:
    """Return the order of heads of values: stored by their place in a group, then by group."""
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = np.arange(num_values).reshape(-1, num_keys).T.reshape(-1)
    width = config["linear_value_head_dim"]
    rows = (heads[:, None] * width + np.arange(width)).reshape(-1)
    end = name.rpartition(".linear_attn.")[2].removesuffix(".weight")
    if end in ("in_proj_qkv", "conv1d"):
        first = 2 * num_keys * config["linear_key_head_dim"]
        return 0, np.concatenate([np.arange(first), first + rows])
    if end == "in_proj_z":
        return 0, rows
    if end in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return 0, heads
    return (1, rows) if end == "out_proj" else None


def _neighbours(name: str, config: Mapping[str, Any]) -> Order:
    """Return the order of rows of queries and keys that are rotated by neighbouring pairs."""
    kind = re.search(r"self_attn\.([qk])_proj\.", name)
    if kind is None:
        return None
    heads = config["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
    rows = heads * config["head_dim"]
    return 0, np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _gemma(facts: Facts, common: Fields) -> Fields:
    return {"tie_word_embeddings": True}


def _gemma2(facts: Facts, common: Fields) -> Fields:
    return _gemma(facts, common) | {"query_pre_attn_scalar": _query_scale(common, 46)}


def _gemma3(facts: Facts, common: Fields) -> Fields:
    theta = facts.value("rope.freq_base_swa", 10000.0)
    return _gemma(facts, common) | {
        "query_pre_attn_scalar": _query_scale(common, 62),
        # The scaling is that of the global layers, every sixth.
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **common["rope_parameters"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _gemma4(facts: Facts, common: Fields) -> Fields:
    pattern = facts.value("attention.sliding_window_pattern", ())
    windowed = [bool(each) for each in np.atleast_1d(pattern)]
    by_layer = facts.value("attention.head_count_kv"), facts.value("feed_forward_length")
    # Frequencies that are not rotated are divided by a huge number.
    divisors = facts.factors.get("rope_freqs.weight")
    fitting = all(np.size(each) in (1, len(windowed)) for each in by_layer)
    if len(set(windowed)) < 2 or divisors is None or not fitting:
        raise CheckpointError(
            facts.where,
            ["rope_freqs.weight, or kinds, KV heads or MLP sizes of some layers, are missing"],
            "convert the model again with a current llama.cpp",
        )
    heads, sizes = (np.broadcast_to(each, len(windowed)).tolist() for each in by_layer)
    first, whole = windowed.index(True), windowed.index(False)
    return _gemma(facts, common) | {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] != sizes[0],
        "num_key_value_heads": heads[first],
        "num_global_key_value_heads": heads[whole],
        "head_dim": facts.value("attention.key_length_swa"),
        "global_head_dim": common["head_dim"],
        "attention_k_eq_v": not facts.has(f"blk.{whole}.attn_v.weight"),
        "attention_bias": False,
        "num_kv_shared_layers": facts.value("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": facts.value("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": facts.shapes.get("per_layer_token_embd.weight", (0,))[0],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": facts.value("rope.freq_base"),
                "partial_rotary_factor": float((divisors == 1).mean()),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.value("rope.freq_base_swa", 10000.0),
            },
        },
    }


def _query_scale(common: Fields, layers_of_27b: int) -> float:
    """Return the scalar of queries, which no key has: llama.cpp knows the 27B models by layers."""
    if common["num_hidden_layers"] == layers_of_27b:
        return common["hidden_size"] / common["num_attention_heads"]
    return common["head_dim"]


def _olmo2(facts: Facts, common: Fields) -> Fields:
    if facts.value("attention.sliding_window"):
        raise UnsupportedModelError(
            f"{facts.where} is OLMo 3, whose windows GGUF files are not read here; load its "
            "safetensors folder"
        )
    return {}


def _starcoder2(facts: Facts, common: Fields) -> Fields:
    return {"use_bias": common["attention_bias"]}


def _command_r(facts: Facts, common: Fields) -> Fields:
    return {"tie_word_embeddings": True, "use_qk_norm": facts.has("blk.0.attn_q_norm.weight")}


def _phi3(facts: Facts, common: Fields) -> Fields:
    rope = {"rope_type": "default", **common["rope_parameters"]}
    own = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor")}
    if "rope_factors_long.weight" in facts.factors:
        own |= {
            "rope_type": "longrope",
            "short_factor": facts.factors["rope_factors_short.weight"].tolist(),
            "long_factor": facts.factors["rope_factors_long.weight"].tolist(),
            "attention_factor": rope[MAGNITUDE],
        }
    original = facts.value("rope.scaling.original_context_length")
    return {
        "rope_parameters": own,
        "original_max_position_embeddings": original or common["max_position_embeddings"],
        "sliding_window": facts.value("attention.sliding_window") or None,
    }


def _stablelm(facts: Facts, common: Fields) -> Fields:
    return {
        "use_qkv_bias": common["attention_bias"],
        "qk_layernorm": facts.has("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not facts.has("blk.0.ffn_norm.weight"),
    }


def _lfm2(facts: Facts, common: Fields) -> Fields:
    heads = np.broadcast_to(
        facts.value("attention.head_count_kv"), common["num_hidden_layers"]
    ).tolist()
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": facts.value("shortconv.l_cache"),
        "conv_bias": facts.has("blk.0.shortconv.in_proj.bias"),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
    }


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(model_type="llama", more=_llama, order=_neighbours),
        "qwen2": Architecture(model_type="qwen2", more=_window),
        "qwen2moe": Architecture(model_type="qwen2_moe", more=_qwen2_moe),
        "qwen3": Architecture(model_type="qwen3", more=_window),
        "qwen3moe": Architecture(model_type="qwen3_moe", more=_qwen3_moe),
        "qwen35": Architecture(
            model_type="qwen3_5_text",
            more=_qwen3_5,
            order=_tiled_heads,
            norm_shift=1.0,
            rotates_parts=True,
        ),
        "qwen35moe": Architecture(
            model_type="qwen3_5_moe_text",
            more=_qwen3_5_moe,
            order=_tiled_heads,
            norm_shift=1.0,
            rotates_parts=True,
        ),
        "qwen3next": Architecture(
            model_type="qwen3_next", more=_qwen3_next, norm_shift=1.0, rotates_parts=True
        ),
        "glm4moe": Architecture(model_type="glm4_moe", more=_glm4_moe, rotates_parts=True),
        "llama4": Architecture(model_type="llama4_text", more=_llama4),
        "falcon": Architecture(
            model_type="falcon",
            more=_falcon,
            order=_queries_first,
            eps="layer_norm_epsilon",
            has_layer_norms=True,
        ),
        "gpt-oss": Architecture(
            model_type="gpt_oss", more=_gpt_oss, keys={"sliding_window": "attention.sliding_window"}
        ),
        "gemma": Architecture(model_type="gemma", more=_gemma, norm_shift=1.0),
        "gemma2": Architecture(
            model_type="gemma2",
            more=_gemma2,
            keys={
                "sliding_window": "attention.sliding_window",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            norm_shift=1.0,
        ),
        "gemma3": Architecture(
            model_type="gemma3_text",
            more=_gemma3,
            keys={
                "sliding_window": "attention.sliding_window",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            norm_shift=1.0,
        ),
        "gemma4": Architecture(
            model_type="gemma4_text",
            more=_gemma4,
            keys={
                "sliding_window": "attention.sliding_window",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            has_own_layers=True,
        ),
        "granite": Architecture(
            model_type="granite",
            keys={
                "embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale",
                "attention_multiplier": "attention.scale",
                "logits_scaling": "logit_scale",
            },
            order=_neighbours,
        ),
        "smollm3": Architecture(model_type="smollm3", order=_neighbours),
        "olmo2": Architecture(model_type="olmo2", more=_olmo2),
        "starcoder2": Architecture(
            model_type="starcoder2", more=_starcoder2, eps="norm_epsilon", has_layer_norms=True
        ),
        "command-r": Architecture(
            model_type="cohere",
            more=_command_r,
            keys={"logit_scale": "logit_scale"},
            eps="layer_norm_eps",
            has_layer_norms=True,
        ),
        "cohere2": Architecture(
            model_type="cohere2",
            more=_command_r,
            keys={"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
            eps="layer_norm_eps",
            has_layer_norms=True,
        ),
        "nemotron": Architecture(
            model_type="nemotron",
            norm_shift=1.0,
            rotates_parts=True,
            eps="norm_eps",
            has_layer_norms=True,
        ),
        "stablelm": Architecture(
            model_type="stablelm",
            more=_stablelm,
            rotates_parts=True,
            eps="layer_norm_eps",
            has_layer_norms=True,
        ),
        "phi3": Architecture(model_type="phi3", more=_phi3, rotates_parts=True),
        "lfm2": Architecture(model_type="lfm2", more=_lfm2, eps="norm_eps", kinds_by_heads=True),
    }
)


def config_of(facts: Facts) -> Fields:
    """Return the fields of the model's config.json, for `families.config_from_hf`.

    Raises:
      CheckpointError: keys or tensors are missing, or contradict each other.
      UnsupportedModelError: what no model here computes.
    """
    missing: list[str] = []
    architecture = facts.architecture

    def required(key: str) -> Any:
        found = facts.value(key)
        if not (isinstance(found, int | float | np.ndarray) and np.all(np.asarray(found) > 0)):
            missing.append(f"metadata key {facts.name}.{key} is {found!r}, not above 0")
        return found

    config: Fields = {
        "model_type": architecture.model_type,
        "hidden_size": required("embedding_length"),
        "intermediate_size": facts.value("expert_feed_forward_length")
        if facts.value("expert_count", 0) and facts.value("feed_forward_length") is None
        else required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": required("attention.head_count"),
        architecture.eps: required(
            f"attention.layer_norm_{'' if architecture.has_layer_norms else 'rms_'}epsilon"
        ),
        "max_position_embeddings": facts.value("context_length", 2048),
        "tie_word_embeddings": not facts.has("output.weight"),
    }
    config["num_hidden_layers"] = facts.num_layers if not missing else 0
    blocks = [name for name in facts.shapes if name.startswith("blk.")]
    held = {name.split(".")[1] for name in blocks if missing or not facts.predicts(name)}
    if not missing and config["num_hidden_layers"] != len(held):
        missing.append(
            f"{config['num_hidden_layers']} layers are claimed, tensors of {len(held)} are held"
        )
    embedding = facts.shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        missing.append("tensor token_embd.weight is missing or not a matrix")
    if missing:
        raise CheckpointError(facts.where, missing, "use a complete GGUF file")
    heads = config["num_attention_heads"]
    config["vocab_size"] = embedding[0]
    config["num_key_value_heads"] = facts.value("attention.head_count_kv", heads)
    if architecture.kinds_by_heads:
        config["num_key_value_heads"] = int(np.max(config["num_key_value_heads"]))
    if not architecture.has_own_layers:
        _check_uniform(facts, config)
    config["head_dim"] = facts.value("attention.key_length", config["hidden_size"] // heads)
    config["attention_bias"] = facts.has("blk.0.attn_q.bias")
    config["mlp_bias"] = facts.has("blk.0.ffn_up.bias")
    if facts.value("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModelError(
            f"{facts.where}: values of {facts.value('attention.value_length')} a head and keys of "
            f"{config['head_dim']}; they must be of one size"
        )
    config["rope_parameters"] = {} if architecture.has_own_layers else _rope(facts, config)
    more = architecture.more(facts, config)
    if facts.value("expert_count", 0) and not any(name.endswith("experts") for name in more):
        raise UnsupportedModelError(
            f"{facts.where} is a mixture of {facts.value('expert_count')} experts, and GGUF files "
            f"of {facts.name!r} are read here without; load its safetensors folder"
        )
    return config | facts.fields(**architecture.keys) | more


def _check_uniform(facts: Facts, config: Fields) -> None:
    varying = [key for key, value in config.items() if isinstance(value, np.ndarray)]
    if varying:
        raise UnsupportedModelError(
            f"{facts.where}: {varying} differ from layer to layer; only uniform models are "
            "supported"
        )


def _rope(facts: Facts, config: Fields) -> Fields:
    rotated = facts.value("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"] and not facts.architecture.rotates_parts:
        raise UnsupportedModelError(
            f"{facts.where} rotates {rotated} of {config['head_dim']} dimensions a head; "
            f"for {facts.name!r} partial rotation is not supported"
        )
    # As llama.cpp: a factor without a type is linear, and attn_factor is always applied, in
    # addition to yarn's own. It reads yarn_beta_fast, yarn_beta_slow and yarn_attn_factor for
    # other architectures only.
    rope: Fields = {
        "rope_theta": facts.value("rope.freq_base", 10000.0),
        MAGNITUDE: facts.value("rope.scaling.attn_factor", 1.0),
    }
    if facts.architecture.rotates_parts:
        rope["partial_rotary_factor"] = rotated / config["head_dim"]
    kind = facts.value("rope.scaling.type", "linear")
    factor = facts.value("rope.scaling.factor") or facts.value("rope.scale_linear") or 1.0
    is_scaled = kind == "yarn" or (kind != "none" and factor != 1.0)
    if "rope_freqs.weight" in facts.factors:
        if is_scaled:
            raise UnsupportedModelError(
                f"{facts.where} has rope_freqs.weight and scaling of type {kind!r} by {factor}; "
                "one of both is supported"
            )
        return rope | _llama3_scaling(facts, config, rope["rope_theta"])
    if not is_scaled:
        return rope | {"rope_type": "linear", "factor": 1.0}
    rope |= {"rope_type": kind, "factor": factor}
    original = facts.value("rope.scaling.original_context_length")
    return rope | ({"original_max_position_embeddings": original} if original else {})


def _llama3_scaling(facts: Facts, config: Fields, theta: float) -> Fields:
    """Return Llama 3's RoPE scaling from `rope_freqs.weight`, the divisors of frequencies."""
    divisors = facts.factors["rope_freqs.weight"]
    plain = inverse_frequencies(config["head_dim"], theta, None)
    high = 1.0 if facts.name == "llama4" else 4.0
    for original in (8192, config["max_position_embeddings"]):
        scaling = {
            "rope_type": "llama3",
            "factor": round(float(divisors.max()), 4),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        llama3 = RopeScaling.from_hf(scaling, original)
        expected = plain / inverse_frequencies(config["head_dim"], theta, llama3)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
            return scaling
    raise UnsupportedModelError(
        f"{facts.where}: its rope_freqs.weight is not Llama 3's frequency scaling; only that of "
        f"low_freq_factor 1 and high_freq_factor {high:.0f} is supported"
    )
