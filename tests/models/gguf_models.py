"""Small random models in GGUF files, written by the reference writer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

LAYERS, HEADS, KV_HEADS, HEAD_DIM, EMBED, MLP, VOCAB = 2, 4, 2, 32, 64, 96, 40
NAMES = {
    "attn_norm": ("input_layernorm", (EMBED,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD_DIM, EMBED)),
    "attn_k": ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, EMBED)),
    "attn_v": ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, EMBED)),
    "attn_output": ("self_attn.o_proj", (EMBED, HEADS * HEAD_DIM)),
    "ffn_norm": ("post_attention_layernorm", (EMBED,)),
    "ffn_gate": ("mlp.gate_proj", (MLP, EMBED)),
    "ffn_up": ("mlp.up_proj", (MLP, EMBED)),
    "ffn_down": ("mlp.down_proj", (EMBED, MLP)),
}
BIASES = {f"attn_{x}": (f"self_attn.{x}_proj", NAMES[f"attn_{x}"][1][0]) for x in "qkv"}
METADATA = {
    "block_count": LAYERS,
    "context_length": 8192,
    "embedding_length": EMBED,
    "feed_forward_length": MLP,
    "attention__head_count": HEADS,
    "attention__head_count_kv": KV_HEADS,
    "attention__key_length": HEAD_DIM,
    "attention__value_length": HEAD_DIM,
    "attention__layer_norm_rms_epsilon": 1e-5,
    "rope__freq_base": 5000.0,
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute q and k as llama.cpp's converter does for the llama architecture."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _twin(arch: str, tied: bool, seed: int) -> dict[str, tuple[str, np.ndarray]]:
    """Return GGUF name -> (Hugging Face name, tensor in Hugging Face order)."""
    rng = np.random.default_rng(seed)

    def new(shape):
        return rng.normal(size=shape).astype(np.float32)

    tensors = {
        "token_embd.weight": ("model.embed_tokens.weight", new((VOCAB, EMBED))),
        "output_norm.weight": ("model.norm.weight", new((EMBED,))),
    }
    if not tied:
        tensors["output.weight"] = ("lm_head.weight", new((VOCAB, EMBED)))
    for layer in range(LAYERS):
        named = {
            f"{short}.weight": (f"{name}.weight", shape) for short, (name, shape) in NAMES.items()
        }
        if arch == "qwen2":
            named |= {f"{k}.bias": (f"{name}.bias", (size,)) for k, (name, size) in BIASES.items()}
        if arch == "qwen3":
            for x in "qk":
                named[f"attn_{x}_norm.weight"] = (f"self_attn.{x}_norm.weight", (HEAD_DIM,))
        for short, (name, shape) in named.items():
            tensors[f"blk.{layer}.{short}"] = (f"model.layers.{layer}.{name}", new(shape))
    return tensors


def write_gguf(
    path: Path,
    arch: str = "llama",
    quantisation: gguf.GGMLQuantizationType | None = None,
    tied: bool = False,
    leave_out: str | None = None,
    extra: dict[str, np.ndarray] | None = None,
    extra_type: gguf.GGMLQuantizationType | None = None,
    tokenizer: dict[str, object] | None = None,
    seed: int = 0,
    **metadata: object,
) -> dict[str, np.ndarray]:
    """Write a small model; return its tensors under Hugging Face names.

    `extra` tensors are written unchanged, as bytes of `extra_type` if one is given.
    """
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (METADATA | metadata).items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(f"{arch}.{key.replace('__', '.')}", value, kind)
    for key, value in (tokenizer or {}).items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType.get_type(value))
    twin = _twin(arch, tied, seed)
    for name, (_, tensor) in twin.items():
        if name == leave_out:
            continue
        if arch == "llama" and ".attn_q." in name:
            tensor = permuted(tensor, HEADS)
        if arch == "llama" and ".attn_k." in name:
            tensor = permuted(tensor, KV_HEADS)
        if quantisation is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, quantisation), raw_dtype=quantisation)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor, raw_dtype=extra_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: tensor for name, tensor in twin.values()}


# Each token is a letter, except "ab"; the last two are control tokens.
TOKENIZER = {
    "ggml.model": "gpt2",
    "ggml.pre": "gpt-2",
    "ggml.tokens": [*"abcdefghijklmnopqrstuvwxyzĠĊ.,!?'-012", "ab", "<|end|>", "<|bos|>"],
    "ggml.token_type": [1] * (VOCAB - 2) + [3, 3],
    "ggml.merges": ["a b"],
    "ggml.eos_token_id": VOCAB - 2,
    "ggml.bos_token_id": VOCAB - 1,
    "chat_template": "{{ messages[0]['content'] }}",
}
