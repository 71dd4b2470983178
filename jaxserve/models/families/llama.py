"""Llama and its relatives, which differ in settings: norms, windows, rotation, names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.config import DecoderConfig, Fields, QueryGrowth, kinds_in_turn
from jaxserve.models.decoder import Decoder
from jaxserve.models.family import Family
from jaxserve.models.llama_form import (
    LAYER,
    ROTARY_FIELDS,
    attention_weights,
    mlp_weights,
    rotary_decoder_fields,
    two_layer_weights,
)
from jaxserve.models.rope import Rope, rope_fields
from jaxserve.models.weights import Weight, fused_qkv, neighbours

_BIASES = dict(attention_bias=False, mlp_bias=False)
_QWEN = Fields.of(
    ROTARY_FIELDS,
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    use_sliding_window=False,
    sliding_window=4096,
    max_window_layers=28,
    layer_types=None,
    nullable=("num_key_value_heads", "sliding_window"),
)
_QWEN_2_VL = Fields.of(
    _QWEN.defaults,
    vocab_size=152064,
    hidden_size=8192,
    intermediate_size=29568,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_window_layers=80,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    nullable=(*_QWEN.nullable, "tie_word_embeddings", "use_sliding_window"),
)
_MISTRAL = Fields.of(
    ROTARY_FIELDS,
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    sliding_window=4096,
    nullable=("sliding_window",),
)
_GLM = Fields.of(
    ROTARY_FIELDS,
    vocab_size=151552,
    intermediate_size=13696,
    num_hidden_layers=40,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1.5625e-7,
    partial_rotary_factor=0.5,
    attention_bias=True,
    pad_token_id=151329,
)
_OLMO2 = ROTARY_FIELDS | dict(vocab_size=50304, attention_bias=False, rms_norm_eps=1e-5)
_FIELDS = {
    "llama": Fields.of(ROTARY_FIELDS, _BIASES),
    "internlm3": Fields.of(
        ROTARY_FIELDS,
        _BIASES,
        vocab_size=128512,
        intermediate_size=10240,
        num_hidden_layers=48,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        head_dim=128,
        nullable=("head_dim", "num_key_value_heads"),
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "cwm": Fields.of(
        ROTARY_FIELDS,
        vocab_size=128256,
        hidden_size=6144,
        intermediate_size=21504,
        num_hidden_layers=64,
        num_attention_heads=48,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        head_dim=128,
        mlp_bias=False,
        sliding_window=8192,
        layer_types=None,
    ),
    "arcee": Fields.of(
        ROTARY_FIELDS,
        _BIASES,
        hidden_size=2560,
        intermediate_size=18432,
        hidden_act="relu2",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    ),
    "mistral": _MISTRAL,
    "ministral": replace(_MISTRAL, defaults={**_MISTRAL.defaults, "layer_types": None}),
    "ministral3": Fields.of(
        ROTARY_FIELDS,
        vocab_size=131072,
        intermediate_size=14336,
        num_hidden_layers=34,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        sliding_window=None,
        pad_token_id=11,
    ),
    "qwen2": _QWEN,
    "qwen2_vl_text": _QWEN_2_VL,
    "qwen2_5_vl_text": _QWEN_2_VL,
    "qwen3": replace(_QWEN, defaults={**_QWEN.defaults, "head_dim": 128, "attention_bias": False}),
    "qwen3_vl_text": Fields.of(
        ROTARY_FIELDS,
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        max_position_embeddings=128000,
        rope_theta=5e5,
        head_dim=128,
        attention_bias=False,
        nullable=("num_key_value_heads", "tie_word_embeddings"),
    ),
    "seed_oss": Fields.of(
        ROTARY_FIELDS,
        vocab_size=155136,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524288,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        nullable=("num_key_value_heads", "head_dim"),
        pad_token_id=1,
    ),
    "smollm3": Fields.of(
        ROTARY_FIELDS,
        _BIASES,
        vocab_size=128256,
        hidden_size=2048,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2e6,
        use_sliding_window=False,
        sliding_window=None,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        layer_types=None,
        tie_word_embeddings=True,
        nullable=("num_key_value_heads",),
        pad_token_id=128004,
    ),
    "phi3": Fields.of(
        ROTARY_FIELDS,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        partial_rotary_factor=1.0,
        rms_norm_eps=1e-5,
        sliding_window=None,
        pad_token_id=32000,
    ),
    "glm": replace(_GLM, nullable=("head_dim", "num_key_value_heads")),
    "glm4": _GLM,
    "ernie4_5": Fields.of(
        ROTARY_FIELDS,
        vocab_size=103424,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=5e5,
        tie_word_embeddings=True,
        use_bias=False,
        nullable=("head_dim", "num_key_value_heads", "use_bias"),
    ),
    "helium": Fields.of(
        ROTARY_FIELDS,
        _BIASES,
        vocab_size=48000,
        hidden_size=2560,
        intermediate_size=7040,
        num_hidden_layers=24,
        num_attention_heads=20,
        num_key_value_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-8,
        rope_theta=1e5,
        pad_token_id=3,
    ),
    "olmo": Fields.of(
        ROTARY_FIELDS,
        without=("rms_norm_eps",),
        vocab_size=50304,
        attention_bias=False,
        clip_qkv=None,
        pad_token_id=1,
    ),
    "olmo2": Fields(_OLMO2, pad_token_id=1),
    "olmo3": Fields.of(
        _OLMO2,
        rope_theta=5e5,
        sliding_window=4096,
        layer_types=None,
        nullable=("sliding_window",),
        pad_token_id=1,
    ),
    "exaone4": Fields.of(
        ROTARY_FIELDS,
        vocab_size=102400,
        intermediate_size=16384,
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        sliding_window_pattern=4,
        layer_types=None,
        nullable=("sliding_window", "sliding_window_pattern"),
    ),
}
# The rotations of models whose config.json has none.
_CWM_ROTATION = dict(
    rope_type="llama3",
    rope_theta=1e6,
    factor=16.0,
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=8192,
)
_MINISTRAL_ROTATION = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale_all_dim=1.0,
    mscale=1.0,
    llama_4_scaling_beta=0.1,
)
_OLMO_EPS = 1e-5  # which no field of config.json sets


@final
@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """RMS norms, gated MLP, rotary embeddings of the whole head, except as `_READERS` say.

    Every fourth layer of SmolLM3 is not rotated (Yang et al., arXiv:2501.18795, section 3). Phi-3:
    arXiv:2404.14219, Phi-4-mini: arXiv:2503.01743, GLM-4: arXiv:2406.12793, OLMo: arXiv:2402.00838,
    OLMo 2: arXiv:2501.00656, OLMo 3: arXiv:2512.13961, EXAONE 4: arXiv:2507.11407.

    Attributes:
      rotates_neighbours: whether checkpoints rotate neighbouring dimensions.
      fuses_qkv: whether checkpoints have one tensor of queries, keys and values.
      fuses_gate: whether they have one of gate and up.
      end_norm_names: the names of norms after attention and MLP in checkpoints.
    """

    rope: Rope | None = Rope()
    rotates_neighbours: bool = False
    fuses_qkv: bool = False
    fuses_gate: bool = False
    end_norm_names: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> Self:
        given = _FIELDS[given["model_type"]].read(given)
        return cls(**_READERS.get(given["model_type"], rotary_decoder_fields)(given))


def _cwm(given: dict[str, Any]) -> dict[str, Any]:
    given["rope_parameters"] = given["rope_parameters"] or _CWM_ROTATION
    given["layer_types"] = given["layer_types"] or [
        "sliding_attention" if layer % 4 else "full_attention"
        for layer in range(given["num_hidden_layers"])
    ]
    return rotary_decoder_fields(given)


def _arcee(given: dict[str, Any]) -> dict[str, Any]:
    fields = rotary_decoder_fields(given, activations=("relu2",))
    return fields | dict(activation="relu2", is_gated=False)


def _ministral(given: dict[str, Any]) -> dict[str, Any]:
    if given["layer_types"] is None:
        given["layer_types"] = ["sliding_attention"] * given["num_hidden_layers"]
    return rotary_decoder_fields(given)


def _ministral3(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Ministral 3, whose queries grow with the position."""
    if given["rope_scaling"] is None and given["rope_parameters"] is None:
        given["rope_parameters"] = _MINISTRAL_ROTATION
    rope = rope_fields(given)
    beta = rope.get("llama_4_scaling_beta")
    period = rope.get("original_max_position_embeddings") or given["max_position_embeddings"]
    growth = QueryGrowth(beta=float(beta), period=int(period)) if beta else None
    return rotary_decoder_fields(given) | {"query_growth": growth}


def _qwen2(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | {"qkv_bias": True}


def _qwen3(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | {"qk_norm": True}


def _seed_oss(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | {"o_bias": bool(given["attention_out_bias"])}


def _smollm3(given: dict[str, Any]) -> dict[str, Any]:
    num_layers, flags = given["num_hidden_layers"], given["no_rope_layers"]
    if flags is None:
        every = given["no_rope_layer_interval"]
        flags = [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(flags) < num_layers:
        raise UnsupportedModelError(
            f"no_rope_layers={list(flags)} is not supported; give 1 for a layer with rotation and "
            f"0 for one without, for each of the {num_layers} layers"
        )
    rotated = tuple(map(bool, flags[:num_layers]))
    kinds = given["layer_types"]
    if kinds is None:  # layers without rotation have windows
        windowed = given["use_sliding_window"] and given["sliding_window"] is not None
        kinds = [
            "full_attention" if is_rotated or not windowed else "sliding_attention"
            for is_rotated in rotated
        ]
    # transformers' masks follow layer_types, whatever use_sliding_window is.
    given |= dict(layer_types=kinds, use_sliding_window=True)
    return rotary_decoder_fields(given) | {"rotated_layers": rotated}


def _phi3(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Phi-3; the original context is a field beside those of the rotation."""
    rope = rope_fields(given)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "longrope", "su", "yarn"):
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} is not supported for 'phi3'; only 'longrope' is, which older "
            "folders call 'su' or 'yarn'"
        )
    rope |= {
        "rope_type": kind if kind == "default" else "longrope",
        "original_max_position_embeddings": given["original_max_position_embeddings"],
    }
    given |= {"rope_scaling": None, "rope_parameters": rope}
    fields = rotary_decoder_fields(given, given["partial_rotary_factor"])
    return fields | dict(fuses_qkv=True, fuses_gate=True)


def _glm(given: dict[str, Any]) -> dict[str, Any]:
    fields = rotary_decoder_fields(given, given["partial_rotary_factor"])
    return fields | dict(o_bias=False, rotates_neighbours=True, fuses_gate=True)


def _glm4(given: dict[str, Any]) -> dict[str, Any]:
    names = "post_self_attn_layernorm", "post_mlp_layernorm"
    return _glm(given) | dict(norm_places="around", end_norm_names=names)


def _ernie(given: dict[str, Any]) -> dict[str, Any]:
    given |= dict.fromkeys(("attention_bias", "mlp_bias"), given["use_bias"])
    return rotary_decoder_fields(given) | {"rotates_neighbours": True}


def _helium(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | dict(o_bias=False, rotates_neighbours=True)


def _olmo(given: dict[str, Any]) -> dict[str, Any]:
    fields = rotary_decoder_fields({**given, "rms_norm_eps": _OLMO_EPS})
    return fields | dict(norm_kind="bare_layer", qkv_clip=given["clip_qkv"])


def _olmo2(given: dict[str, Any]) -> dict[str, Any]:
    return rotary_decoder_fields(given) | dict(norm_places="after", wide_qk_norm=True)


def _olmo3(given: dict[str, Any]) -> dict[str, Any]:
    """Return OLMo 3's fields with all kinds of layers, and the rotation of those with a window.

    `rope_scaling` is that of layers without one. A `rope_theta` beside it is that of all layers, as
    in transformers 4, which writes it there.
    """
    by_kind, theta = given["rope_parameters"] or {}, {"rope_theta": given["rope_theta"]}
    whole = theta | (by_kind.get("full_attention") or {}) | (given["rope_scaling"] or {})
    windowed = theta | (by_kind.get("sliding_attention") or {})
    kinds = given["layer_types"] or kinds_in_turn(given["num_hidden_layers"], 4)
    given |= {"rope_parameters": whole, "rope_scaling": None, "layer_types": kinds}
    fields = _olmo2(given)
    return fields | {"local_rope": Rope.from_hf(windowed, given["max_position_embeddings"])}


def _exaone4(given: dict[str, Any]) -> dict[str, Any]:
    """Return EXAONE 4's fields: norms of each head, and no rotation beside layers with a window."""
    window, every = given["sliding_window"], given["sliding_window_pattern"]
    if given["layer_types"] is None:
        if window is None or not isinstance(every, int) or every < 1:
            raise UnsupportedModelError(
                f"sliding_window={window} with sliding_window_pattern={every!r} is not supported "
                "without layer_types; give the kind of each layer there"
            )
        given["layer_types"] = kinds_in_turn(given["num_hidden_layers"], every)
    rotated = tuple(window is None or kind == "sliding_attention" for kind in given["layer_types"])
    fields = rotary_decoder_fields(given)
    return fields | dict(norm_places="after", rotated_layers=rotated, qk_norm=True)


_READERS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType(
    {
        "cwm": _cwm,
        "arcee": _arcee,
        "ministral": _ministral,
        "ministral3": _ministral3,
        **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), _qwen2),
        **dict.fromkeys(("qwen3", "qwen3_vl_text"), _qwen3),
        "seed_oss": _seed_oss,
        "smollm3": _smollm3,
        "phi3": _phi3,
        "glm": _glm,
        "glm4": _glm4,
        "ernie4_5": _ernie,
        "helium": _helium,
        "olmo": _olmo,
        "olmo2": _olmo2,
        "olmo3": _olmo3,
        "exaone4": _exaone4,
    }
)


@final
class Llama(Decoder):
    """The `Decoder` of a `LlamaConfig`."""


def _weights(config: LlamaConfig) -> dict[str, Weight]:
    order = None
    if config.rotates_neighbours:
        assert config.rope is not None
        order = neighbours(config.rope.dim or config.head_dim, config.head_dim)
    weights = attention_weights(config, order=order)
    weights |= mlp_weights() if config.is_gated else two_layer_weights()
    if config.fuses_qkv:
        sizes = dict(num_kv_heads=config.num_kv_heads, group=config.group, head_dim=config.head_dim)
        name = LAYER + "self_attn.qkv_proj.weight"
        weights["blocks.attention.wqkv"] = fused_qkv(name, "weight", **sizes)
    if config.fuses_gate:
        name = LAYER + "mlp.gate_up_proj.weight"
        weights["blocks.mlp.gate_up"] = Weight.of(name, "e u m", "(u m) e")
    if config.norm_places != "before":
        for part, name in zip(("attention", "mlp"), config.end_norm_names, strict=True):
            weights[f"blocks.{part}_end_norm.scale"] = Weight.of(f"{LAYER}{name}.weight")
    return weights


FAMILY = Family(fields=_FIELDS, config=LlamaConfig, decoder=Llama, weights=_weights)
