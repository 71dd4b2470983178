"""Weights and configuration of a Llama-family model from a GGUF file, under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import ml_dtypes
import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxserve.core.errors import CheckpointError, MissingExtraError, UnsupportedModelError
from jaxserve.models.gguf_file import PLAIN_TYPES, GGUFFile, TensorInfo
from jaxserve.models.rope import MAGNITUDE, RopeScaling, inverse_frequencies

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_PLAIN_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Tables of the rotary embedding, whose parameters are in the metadata or recovered from it.
_ROPE_TABLES = ("rope_freqs.weight", "attn_rot_embd.weight")


@final
class GGUFSource:
    """A `WeightSource` over one GGUF file, which reads one tensor at a time.

    llama.cpp stores the query and key projections of the `llama` architecture with their rows
    permuted (rotation by neighbouring pairs); `read` returns them in Hugging Face order.

    Attributes:
      where: the path, for error messages.
      file: the header, with `metadata` for the tokenizer.
      config: the fields of the model's config.json, for `families.config_from_hf`.

    Raises:
      CheckpointError: not a GGUF file, cut off, damaged, or without a key that it needs.
      UnsupportedModelError: another architecture, or tensors that no family uses.
      MissingExtraError: quantised tensors, and the `gguf` package is not installed.
    """

    def __init__(self, path: str | Path):
        self.where = str(path)
        self.file = GGUFFile(path)
        self._tensors = self._named()
        self.config: Mapping[str, Any] = self._recovered_config()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor by its Hugging Face name; matrices are [out, in]."""
        return {name: info.shape for name, info in self._tensors.items()}

    def dtypes(self) -> Mapping[str, str]:
        """Return the ggml type of every tensor, such as "Q4_K"."""
        return {name: info.type_name for name, info in self._tensors.items()}

    def type_name(self, name: str) -> str:
        """Return the ggml type of a tensor, such as "Q4_K"."""
        return self._tensors[name].type_name

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Return a tensor, or its part at `index` (unit steps); dequantises only its rows.

        Quantised tensors come as float32, the others in their stored dtype.

        Raises:
          CheckpointError: no such tensor, or its blocks cannot be dequantised.
        """
        return self.read_as(self._dequantised, name, index)

    def read_as(
        self,
        decode: Callable[[TensorInfo, UInt8[np.ndarray, "*rows row_bytes"]], np.ndarray],
        name: str,
        index: tuple[slice, ...] | None = None,
    ) -> np.ndarray:
        """Return a tensor, or its part at `index`, with its stored rows decoded by `decode`.

        Raises:
          CheckpointError: no such tensor.
        """
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(
                self.where, [f"tensor {name!r} is missing"], "use a complete GGUF file"
            )
        index = tuple(index or ())
        rows = self.file.rows(info).reshape(*info.shape[:-1], info.row_bytes)
        order = self._row_order(name)
        if len(info.shape) == 1:
            values = decode(info, rows)
            values = values if order is None else values[order]
            return values[index]
        first = index[0] if index else slice(None)
        picked = rows[first] if order is None else rows[order[first]]
        return decode(info, picked)[(slice(None), *index[1:])]

    def _named(self) -> dict[str, TensorInfo]:
        tensors, unknown = {}, []
        for name, info in self.file.tensors.items():
            if name.endswith(_ROPE_TABLES):
                continue
            renamed = _hugging_face_name(name)
            if renamed is None:
                unknown.append(name)
            else:
                tensors[renamed] = info
        architecture = self.file.metadata.get("general.architecture")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedModelError(
                f"{self.where} is of architecture {architecture!r}; GGUF files of "
                f"{SUPPORTED_ARCHITECTURES} are supported"
            )
        if unknown:
            raise UnsupportedModelError(
                f"{self.where} holds tensors that no Llama-family model here uses: "
                f"{unknown[:8]}{' and more' if len(unknown) > 8 else ''}"
            )
        return tensors

    def _row_order(self, name: str) -> Int[np.ndarray, " rows"] | None:
        """Return the stored row for each row in Hugging Face order; None where the orders agree."""
        if self.file.metadata["general.architecture"] != "llama":
            return None
        kind = re.search(r"self_attn\.([qk])_proj\.", name)
        if kind is None:
            return None
        heads = self.config["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
        rows = self._tensors[name].shape[0]
        if rows % (2 * heads):
            raise CheckpointError(
                self.where,
                [f"tensor {name!r} has {rows} rows, not a multiple of 2 x {heads} heads"],
                "the file's head counts and tensors disagree; convert the model again",
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _dequantised(
        self, info: TensorInfo, rows: UInt8[np.ndarray, "*rows row_bytes"]
    ) -> Shaped[np.ndarray, "*rows row_length"]:
        """Return the values of `rows`."""
        if info.ggml_type in PLAIN_TYPES:
            return np.ascontiguousarray(rows).view(_PLAIN_DTYPES[info.type_name])
        try:
            import gguf
        except ImportError as error:
            raise MissingExtraError("gguf", "gguf", f"reading {info.type_name} tensors") from error
        try:
            return gguf.dequantize(rows, gguf.GGMLQuantizationType(info.ggml_type))
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.where}: tensor {info.name!r} has type {info.type_name}, which the `gguf` "
                "package cannot dequantise; use another quantisation, such as Q8_0 or Q4_K_M"
            ) from error
        except Exception as error:  # any kind, from damaged blocks
            raise CheckpointError(
                self.where,
                [f"tensor {info.name!r} cannot be dequantised: {error}"],
                "the file is damaged; download or copy it again",
            ) from error

    def _recovered_config(self) -> dict[str, Any]:
        architecture = str(self.file.metadata["general.architecture"])
        missing: list[str] = []

        def value(key: str, default: Any = None, *, required: bool = False) -> Any:
            found = self.file.metadata.get(f"{architecture}.{key}", default)
            if required and not (isinstance(found, int | float | np.ndarray) and np.all(found > 0)):
                missing.append(f"metadata key {architecture}.{key} is {found!r}, not above 0")
            return found

        if value("expert_count", 0):
            raise UnsupportedModelError(
                f"{self.where} is a mixture of {value('expert_count')} experts; only dense models "
                "are supported"
            )
        config = {
            "model_type": architecture,
            "hidden_size": value("embedding_length", required=True),
            "intermediate_size": value("feed_forward_length", required=True),
            "num_hidden_layers": value("block_count", required=True),
            "num_attention_heads": value("attention.head_count", required=True),
            "rms_norm_eps": value("attention.layer_norm_rms_epsilon", required=True),
            "max_position_embeddings": value("context_length", 2048),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
        }
        held = {name.split(".")[2] for name in self._tensors if name.startswith("model.layers.")}
        if config["num_hidden_layers"] != len(held):
            missing.append(
                f"{config['num_hidden_layers']} layers are claimed, tensors of {len(held)} are held"
            )
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None or len(embedding.shape) != 2:
            missing.append("tensor token_embd.weight is missing or not a matrix")
        if missing or embedding is None:
            raise CheckpointError(self.where, missing, "use a complete GGUF file")
        self._check_uniform(config)
        heads = config["num_attention_heads"]
        config["vocab_size"] = embedding.shape[0]
        config["num_key_value_heads"] = value("attention.head_count_kv", heads)
        config["head_dim"] = value("attention.key_length", config["hidden_size"] // heads)
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        config["mlp_bias"] = "model.layers.0.mlp.up_proj.bias" in self._tensors
        self._check_uniform(config)
        if value("attention.value_length", config["head_dim"]) != config["head_dim"]:
            raise UnsupportedModelError(
                f"{self.where}: values of {value('attention.value_length')} a head and keys of "
                f"{config['head_dim']}; they must be of one size"
            )
        window = value("attention.sliding_window")
        if window:
            config["sliding_window"] = window
            config["use_sliding_window"] = True
            config["max_window_layers"] = 0
            if architecture == "llama":
                config["model_type"] = "mistral"
        config["rope_parameters"] = self._rope(config, value)
        return config

    def _check_uniform(self, config: Mapping[str, Any]) -> None:
        varying = [key for key, value in config.items() if isinstance(value, np.ndarray)]
        if varying:
            raise UnsupportedModelError(
                f"{self.where}: {varying} differ from layer to layer; only uniform models are "
                "supported"
            )

    def _rope(self, config: Mapping[str, Any], value: Any) -> dict[str, Any]:
        rotated = value("rope.dimension_count", config["head_dim"])
        if rotated != config["head_dim"]:
            raise UnsupportedModelError(
                f"{self.where} rotates {rotated} of {config['head_dim']} dimensions a head; "
                "partial rotation is not supported"
            )
        # As llama.cpp: a factor without a type is linear, and attn_factor counts in every case, on
        # top of what yarn has. It reads yarn_beta_fast, yarn_beta_slow and yarn_attn_factor for
        # other architectures only.
        rope: dict[str, Any] = {
            "rope_theta": value("rope.freq_base", 10000.0),
            MAGNITUDE: value("rope.scaling.attn_factor", 1.0),
        }
        kind = value("rope.scaling.type", "linear")
        factor = value("rope.scaling.factor") or value("rope.scale_linear") or 1.0
        is_scaled = kind == "yarn" or (kind != "none" and factor != 1.0)
        if "rope_freqs.weight" in self.file.tensors:
            if is_scaled:
                raise UnsupportedModelError(
                    f"{self.where} has rope_freqs.weight and scaling of type {kind!r} by {factor}; "
                    "one of both is supported"
                )
            return rope | self._llama3_scaling(config, rope["rope_theta"])
        if not is_scaled:
            return rope | {"rope_type": "linear", "factor": 1.0}
        rope |= {"rope_type": kind, "factor": factor}
        original = value("rope.scaling.original_context_length")
        return rope | ({"original_max_position_embeddings": original} if original else {})

    def _llama3_scaling(self, config: Mapping[str, Any], theta: float) -> dict[str, Any]:
        """Return Llama 3's RoPE scaling from `rope_freqs.weight`, the divisors of frequencies."""
        info = self.file.tensors["rope_freqs.weight"]
        divisors = self._dequantised(info, self.file.rows(info)).reshape(-1).astype(np.float64)
        plain = inverse_frequencies(config["head_dim"], theta, None)
        for original in (8192, config["max_position_embeddings"]):
            scaling = {
                "rope_type": "llama3",
                "factor": round(float(divisors.max()), 4),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
            llama3 = RopeScaling.from_hf(scaling, original)
            expected = plain / inverse_frequencies(config["head_dim"], theta, llama3)
            if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
                return scaling
        raise UnsupportedModelError(
            f"{self.where}: its rope_freqs.weight is not Llama 3's frequency scaling; only that of "
            "low_freq_factor 1 and high_freq_factor 4 is supported"
        )


def _hugging_face_name(name: str) -> str | None:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _IN_LAYER:
        return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"
    top = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    if top and top[1] in _TOP_LEVEL:
        return f"{_TOP_LEVEL[top[1]]}.{top[2]}"
    return None
