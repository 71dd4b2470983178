"""What a Llama-family model is made of: frozen, hashable, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.models.rope import RopeScaling

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@final
@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Llama 2/3, Mistral, Qwen 2/3, SmolLM2.

    Attributes:
      rope_scaling: None leaves the frequencies as `rope_theta` gives them.
      max_position_embeddings: the longest context the model was made for, tokens.
      qkv_bias, o_bias, mlp_bias: which projections have biases.
      qk_norm: RMS norm over head_dim of queries and keys, before the rotation (Qwen 3).
      sliding_windows: one a layer, tokens; None is full attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        for name in _SIZES:
            value = getattr(self, name)
            if value < 1:
                raise UnsupportedModelError(f"{name}={value} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim={self.head_dim} is odd; RoPE needs an even one")
        if len(self.sliding_windows) != self.num_layers:
            raise UnsupportedModelError(
                f"{len(self.sliding_windows)} sliding windows for {self.num_layers} layers"
            )

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf(cls, given: Mapping[str, Any]) -> LlamaConfig:
        """From config.json as a dictionary, as transformers 4 or 5 writes it.

        Raises:
          UnsupportedModelError: naming what is given and what is supported.
        """
        kind = given.get("model_type")
        if kind not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedModelError(
                f"model_type={kind!r} is not supported here; supported are {SUPPORTED_MODEL_TYPES}"
            )
        missing = [name for name in _REQUIRED if given.get(name) is None]
        if missing:
            raise UnsupportedModelError(f"config.json lacks {missing}, which {kind!r} needs")
        if given.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModelError(
                f"hidden_act={given['hidden_act']!r} is not supported in the Llama family; "
                "only 'silu' is"
            )
        if given.get("quantization_config"):
            raise UnsupportedModelError(
                "quantized checkpoints (quantization_config) are not supported; use float32, "
                "bfloat16 or float16 weights"
            )
        max_position = given.get("max_position_embeddings") or 2048
        # transformers 5 writes rope_parameters; 4 writes rope_theta and rope_scaling.
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        attention_bias = bool(given.get("attention_bias", False))
        num_heads = given["num_attention_heads"]
        return cls(
            vocab_size=given["vocab_size"],
            hidden_size=given["hidden_size"],
            intermediate_size=given["intermediate_size"],
            num_layers=given["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=given.get("num_key_value_heads") or num_heads,
            head_dim=given.get("head_dim") or given["hidden_size"] // num_heads,
            rms_norm_eps=given.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or given.get("rope_theta") or 10000.0),
            rope_scaling=RopeScaling.from_hf(rope, max_position),
            max_position_embeddings=max_position,
            tie_word_embeddings=bool(given.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or (kind != "mistral" and attention_bias),
            o_bias=kind in ("llama", "qwen3") and attention_bias,
            mlp_bias=kind == "llama" and bool(given.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            sliding_windows=_sliding_windows(given),
        )


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
)
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


def _sliding_windows(given: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Mistral: all layers. Qwen: those that `layer_types` names, or from `max_window_layers` on."""
    num_layers = given["num_hidden_layers"]
    window = given.get("sliding_window")
    if given["model_type"] == "llama" or window is None:
        return (None,) * num_layers
    if given["model_type"] == "mistral":
        return (window,) * num_layers
    if not given.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = given.get("layer_types")
    if kinds is None:
        first = given.get("max_window_layers", 28)
        kinds = ["full_attention"] * first + ["sliding_attention"] * num_layers
        kinds = kinds[:num_layers]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModelError(
            f"layer_types={kinds} is not supported; give 'full_attention' or 'sliding_attention' "
            f"for each of the {num_layers} layers"
        )
    return tuple(window if name == "sliding_attention" else None for name in kinds)
