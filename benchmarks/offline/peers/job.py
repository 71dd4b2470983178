"""The files of a job: the same weights in the format of every peer, and the requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from jaxserve.models.gguf import GGUFSource
from jaxserve.workload import WorkloadItem

# Inputs that share a scale with 4 bits, as in Q4_0.
_GROUP = 32


def write_config(model: GGUFSource, folder: Path, **more: Any) -> None:
    """Make a folder with the model's config.json."""
    folder.mkdir()
    # Without it vLLM takes the model for one that embeds.
    architectures = [f"{model.config['model_type'].capitalize()}ForCausalLM"]
    config = {**model.config, "architectures": architectures, **more}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_compressed_tensors(model: GGUFSource, folder: Path, bits: int) -> None:
    """Write a model with its layers' weights in few bits; embedding and head stay in float32.

    8 bits: W8A8, with a scale for each output and, of activations, for each token. 4 bits: W4A16,
    with a scale for each group of an output.
    """
    is_group = bits == 4
    common = {"type": "int", "symmetric": True}
    weights = {
        **common,
        "num_bits": bits,
        "dynamic": False,
        "strategy": "group" if is_group else "channel",
        "observer": "minmax",
        "group_size": _GROUP if is_group else None,
    }
    inputs = {**common, "num_bits": 8, "dynamic": True, "strategy": "token"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "format": "pack-quantized" if is_group else "int-quantized",
        "input_activations": None if is_group else inputs,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": group["format"],
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    write_config(model, folder, quantization_config=config)
    tensors: dict[str, np.ndarray] = {}
    for name in tqdm(model.shapes(), desc="writing compressed tensors", leave=False, delay=2):
        values = np.ascontiguousarray(model.read(name), np.float32)
        module, _, last = name.rpartition(".")
        if values.ndim == 2 and last == "weight" and ".layers." in name:
            rounded = _packed(values) if is_group else _rounded(values)
            tensors |= {f"{module}.{part}": each for part, each in rounded.items()}
        else:
            tensors[name] = values
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _rounded(weight: np.ndarray) -> dict[str, np.ndarray]:
    scales = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-10) / 127
    return {"weight": np.round(weight / scales).astype(np.int8), "weight_scale": scales}


def _packed(weight: np.ndarray) -> dict[str, np.ndarray]:
    groups = weight.reshape(len(weight), -1, _GROUP)
    scales = np.maximum(np.abs(groups).max(axis=-1), 1e-10) / 7.5
    codes = np.clip(np.round(groups / scales[..., None]), -8, 7).astype(np.int8) + 8
    nibbles = codes.astype(np.uint32).reshape(len(weight), -1, 8)
    words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    return {
        "weight_packed": words.view(np.int32),
        "weight_scale": scales,
        "weight_shape": np.array(weight.shape, np.int64),
    }


# The blocks for which the peers have kernels, by our format.
BLOCKS = {"int8": gguf.GGMLQuantizationType.Q8_0, "int4": gguf.GGMLQuantizationType.Q4_0}


def write_models(source: Path, folder: Path, quantize: str | None = None) -> dict[str, str]:
    """Write a GGUF model as safetensors with a config.json (a folder), and as GGUF in F16 and F32.

    Matrices are rounded to float16 once and written from there, so that all files hold the same
    values. The F32 file is for llama.cpp, which recognises end tokens by their names and forbids
    them when it should ignore them. In this file control tokens have other names, and the end token
    is one that no answer has.

    With `quantize`, except "bf16", GGUF files are added with the matrices in the blocks of
    `BLOCKS`, the embedding's and the head's in Q8_0, or for "keep" in the source's: "few_bits", and
    "few_bits_endless" for llama.cpp. For vLLM, which reads no GGUF file on CPUs, the weights of the
    layers are rounded to a folder "compressed_tensors" (see `vllm_folder`). Our runtime rounds the
    same float16 numbers when it loads them, or keeps the source's blocks.
    """
    paths = {
        "F16": folder / "model.F16.gguf",
        "F32": folder / "model.F32.gguf",
        "safetensors": folder / "safetensors",
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_gguf(source, paths["F16"], np.dtype(np.float16))
    _write_gguf(paths["F16"], paths["F32"], np.dtype(np.float32), endless=True)
    _write_safetensors(paths["F16"], paths["safetensors"])
    if quantize not in (None, "bf16"):
        for kind, endless in (("few_bits", False), ("few_bits_endless", True)):
            paths[kind] = folder / f"model.{kind}.gguf"
            keeps = quantize == "keep"
            _write_gguf(
                source if keeps else paths["F16"],
                paths[kind],
                np.dtype(np.float32),
                endless=endless,
                keeps=keeps,
                blocks=BLOCKS.get(quantize),
            )
    if quantize in BLOCKS:
        paths["compressed_tensors"] = folder / "compressed_tensors"
        write_compressed_tensors(
            GGUFSource(paths["F16"]), paths["compressed_tensors"], 8 if quantize == "int8" else 4
        )
    return {kind: str(path) for kind, path in paths.items()}


def write_job(
    path: Path,
    models: Mapping[str, str],
    items: Sequence[WorkloadItem],
    *,
    batch_size: int,
    settings: Mapping[str, Any],
    fewer: Sequence[int] = (),
    speculates: bool = False,
) -> None:
    """Write the job file.

    `models` are those of `write_models`; `batch_size` is the most sequences at once; `max_context`
    the tokens of the longest prompt and answer; `kv_cache_gib` holds a whole batch of those in
    float32; `requests` have a `prompt` of token ids, `num_output_tokens`, and the `max_tokens` that
    a scheduler may know. `settings` are for our runtime alone. For each number in `fewer`, that
    many of the first requests are also answered alone. If it `speculates`, peers look proposals up
    in the request. `activations` is the dtype in which a peer computes with weights in 16 or fewer
    bits: 16 bits if the processor has instructions for it, since peers are faster then.
    """
    max_context = max(len(i.prompt_token_ids) + i.num_output_tokens for i in items)
    config = GGUFSource(models["F16"]).config
    values_a_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    bytes_a_token = values_a_token * config["head_dim"] * np.dtype(np.float32).itemsize
    in_few_bits = settings.get("quantize") is not None
    job = {
        "models": dict(models),
        "batch_size": batch_size,
        "max_context": max_context,
        "kv_cache_gib": 1 + batch_size * max_context * bytes_a_token // 2**30,
        "settings": dict(settings),
        "activations": "bfloat16" if in_few_bits and _has_bfloat16() else "float32",
        "fewer": list(fewer),
        "speculates": speculates,
        "requests": [
            {
                "prompt": list(item.prompt_token_ids),
                "num_output_tokens": item.num_output_tokens,
                "max_tokens": item.max_tokens,
            }
            for item in items
        ],
    }
    path.write_text(json.dumps(job), encoding="utf-8")


def _has_bfloat16() -> bool:
    about = Path("/proc/cpuinfo")
    flags = set(about.read_text(encoding="utf-8").split()) if about.is_file() else set()
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _write_safetensors(source: Path, folder: Path) -> None:
    model = GGUFSource(source)
    write_config(model, folder)
    tensors = {
        name: np.ascontiguousarray(model.read(name), np.float32)
        for name in tqdm(model.shapes(), desc="writing safetensors", leave=False, delay=2)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_gguf(
    source: Path,
    path: Path,
    dtype: np.dtype,
    *,
    endless: bool = False,
    keeps: bool = False,
    blocks: gguf.GGMLQuantizationType | None = None,
) -> None:
    """Rewrite the file in its order, with matrices unchanged, in blocks, or in `dtype`."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(path, architecture)
    if not keeps:
        kind = gguf.LlamaFileType.MOSTLY_F16 if dtype.itemsize == 2 else gguf.LlamaFileType.ALL_F32
        if blocks is not None:
            kind = gguf.LlamaFileType[f"MOSTLY_{blocks.name}"]
        writer.add_file_type(kind)
    changed = _without_end(reader) if endless else {}
    for field in reader.fields.values():
        # Those that the writer adds itself.
        if field.name.startswith("GGUF.") or field.name in writer.kv_data[0]:
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = changed.get(field.name, field.contents())
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in tqdm(reader.tensors, desc=f"writing {path.name}", leave=False, delay=2):
        if keeps:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if blocks is not None and values.ndim > 1:
            is_end = not tensor.name.startswith("blk.")
            kind = gguf.GGMLQuantizationType.Q8_0 if is_end else blocks
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
            continue
        writer.add_tensor(tensor.name, values.astype(dtype if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _without_end(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Return metadata under which no token that a model produces ends its answer."""
    keys = gguf.Keys.Tokenizer
    types = reader.fields[keys.TOKEN_TYPE].contents()
    control = [i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    names = list(reader.fields[keys.LIST].contents())
    for token in control:
        names[token] = f"<|control {token}|>"
    never = control[-1] if control else len(names) - 1
    return {keys.LIST: names, keys.EOS_ID: never, keys.EOT_ID: never, keys.EOM_ID: never}
